"""Flags of the watchdog and of the replica check."""

from __future__ import annotations

import dataclasses

from megatron.flags import flag
from megatron.training.config import PluginConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig(PluginConfig):
    """Detection of hangs and of corrupted weights."""

    hang_timeout: float = flag(
        540.0,
        "seconds without progress (a microbatch, a transfer, a file) before the run aborts with a stack report of "
        "all ranks; 0 waits forever",
        low=0,
        high=10**7,
    )
    check_weight_replicas_interval: int | None = flag(
        None,
        "iterations between checks that replicated weights are equal on all ranks; the run stops if they differ",
        low=1,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
    )
