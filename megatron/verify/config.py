"""Flags of captures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.errors import InputError
from megatron.flags import flag
from megatron.performance.config import Fp8Config
from megatron.training.config import PluginConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureConfig(PluginConfig):
    """Capture of a run's first steps, for `megatron verify`."""

    capture: str | None = flag(
        None,
        "write losses, activations, gradients, weights and optimizer state of the first steps (docs/verify.md)",
        metavar="DIR",
    )
    capture_steps: int = flag(2, "with --capture: steps to write", low=1)
    capture_megabytes: int = flag(
        256,
        "with --capture: bytes of tensors that a rank writes per step, in units of 10^6; of further tensors only the "
        "norm is written",
        low=1,
    )

    def check(self, run: RunConfig) -> None:
        if self.capture is not None and Path(self.capture).exists():
            raise InputError(f"--capture: {self.capture} exists; name a new folder")
        if self.capture is not None:
            check_precision(run)


def check_precision(run: RunConfig) -> None:
    """Check that bounds of rounding errors are known for a run's precision.

    Raises:
        InputError: they are not.
    """
    fp8_format = run.plugin(Fp8Config).fp8_format
    if fp8_format is not None:
        raise InputError(
            f"--fp8-format: {fp8_format} rounds differently in each layout, since each rank scales its part; no bounds "
            "are known; verify and capture the run without --fp8-format"
        )
