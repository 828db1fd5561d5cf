"""Sizes that bound the memory of logits. The planner uses them too, and imports no torch."""

# Bytes of a chunk of logits, by device type.
LOGITS_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
# Most bytes of logits that are kept for backward. A CPU has more memory for its speed, so it keeps more.
LOGITS_KEPT_BYTES = {"cpu": 1 << 30, "cuda": 1 << 27}
