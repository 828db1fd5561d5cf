"""Flags of process groups and parallel layout."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """How the processes that torchrun starts share the work."""

    distributed_backend: str | None = flag(
        None, "communication library (default: nccl on GPUs, gloo on CPUs)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "how long a process waits in a collective for the others before it stops", low=1, high=10**6
    )
