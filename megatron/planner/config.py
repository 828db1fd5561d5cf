"""Flags of dry runs."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import flag, flag_name
from megatron.training.config import PluginConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRunConfig(PluginConfig):
    """Compute the cost of a run without its devices, data and processes."""

    dry_run: bool = flag(
        False,
        "count memory, communication and operations of an iteration of some ranks with fake tensors, and exit. Needs "
        "one process, no data and no GPU; --device auto means a GPU",
    )
    world_size: int | None = flag(
        None,
        "number of processes of the run (default: one model replica, tensor x context x pipeline size)",
        low=1,
        high=10**6,
    )
    dry_run_ranks: tuple[int, ...] | None = flag(
        None,
        "ranks to count (default: the first rank of the first, middle and last stage)",
        low=0,
        nargs="+",
        metavar="N",
    )
    dry_run_json: str | None = flag(None, "also write the counts to this file, as JSON", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self)[1:]:
            if not self.dry_run and getattr(self, field.name) is not None:
                raise InputError(f"{flag_name(field)} needs --dry-run")
