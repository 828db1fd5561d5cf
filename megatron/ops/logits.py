"""Sizes that bound the memory of logits. The planner uses them too, and imports no torch."""

# Bytes of a chunk of logits, by device type.
LOGITS_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
# Most bytes of logits that are kept for backward. Computing them again takes 2hV of the 6N operations per token: 5% of
# a step with 345 million parameters and 51,200 rows.
LOGITS_KEPT_BYTES = 1 << 30
