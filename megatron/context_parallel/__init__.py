"""Context parallelism: attention over a sequence that ranks divide (`--context-parallel-size`)."""
