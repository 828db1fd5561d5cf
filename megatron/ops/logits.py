"""Memory of logits. The planner uses it too, and imports no torch."""

# Bytes of a chunk of logits, by device type. Each chunk adds to the whole fp32 gradient of the vocabulary table:
# with 1 GiB, this takes 2% of the time of the chunk's products on an H100.
LOGITS_CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
# Bytes of them that a function works on; on a CPU they stay in its cache.
LOGITS_PIECE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}
