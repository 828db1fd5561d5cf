"""Flags of recipes: parts of a training run beyond the default ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.errors import InputError
from megatron.flags import flag, flag_name
from megatron.training.config import PluginConfig, RunConfig

# The scale is an fp32 number, and has to stay one when it is doubled again and again.
LARGEST_SCALE = 2.0**48


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig(PluginConfig):
    """Loss scaling of fp16."""

    loss_scale: float | None = flag(
        None,
        "with --fp16: static loss scale (default: dynamic loss scaling)",
        above=0,
        high=LARGEST_SCALE,
    )
    initial_loss_scale: float = flag(
        2.0**32, "with --fp16: initial dynamic loss scale", above=0, high=LARGEST_SCALE
    )
    min_loss_scale: float = flag(1.0, "with --fp16: lower bound of the dynamic loss scale", above=0)
    loss_scale_window: int = flag(
        1000,
        "with --fp16: consecutive steps without overflow before the loss scale is doubled",
        low=1,
        high=2**31 - 1,
    )
    hysteresis: int = flag(
        2,
        "with --fp16: halve the loss scale at the Nth overflow since it last grew, and at every overflow after that",
        low=1,
        high=2**31 - 1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_loss_scale < self.min_loss_scale:
            raise InputError(
                f"--initial-loss-scale: {self.initial_loss_scale:g} is below --min-loss-scale {self.min_loss_scale:g}"
            )
        if self.loss_scale is None:
            return
        for field in dataclasses.fields(self):
            if field.name != "loss_scale" and getattr(self, field.name) != field.default:
                raise InputError(
                    f"{flag_name(field)}: {getattr(self, field.name):g} is for a dynamic scale, but --loss-scale "
                    f"{self.loss_scale:g} fixes it; give only one"
                )

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> list[str]:
        if values.get("fp16"):
            return []
        names = [flag_name(field) for field in dataclasses.fields(cls) if field.name in values]
        return [f"{name} has no effect: only --fp16 uses loss scaling" for name in names]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeConfig(PluginConfig):
    """Skipping of spikes."""

    spike_skip: float | None = flag(
        None,
        "skip steps whose loss or gradient norm exceeds the mean of the last 128 steps by more than SIGMA standard "
        "deviations; inactive until 64 steps are known; 6 skips only clear spikes",
        above=0,
        metavar="SIGMA",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RampUpConfig(PluginConfig):
    """Growth of the batch size."""

    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "with --train-samples: start with a global batch of START samples and raise it in steps of INCREMENT, to "
        "reach --global-batch-size after SAMPLES samples",
        low=0,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )

    def check(self, run: RunConfig) -> None:
        if self.rampup_batch_size is not None and run.training.train_samples is None:
            raise InputError("--rampup-batch-size needs --train-samples in place of --train-iters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitConfig(PluginConfig):
    """Exit before the last iteration."""

    exit_interval: int | None = flag(None, "save and exit when the iteration is a multiple of N", low=1)
    exit_duration_in_mins: int | None = flag(None, "save and exit after N minutes", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreezeConfig(PluginConfig):
    """Parameters that are not trained."""

    freeze: tuple[str, ...] | None = flag(
        None,
        "do not train the parameters whose names match one of these shell patterns, such as 'embedding.*' "
        "'decoder.layers.[0-3].*'; `inspect-checkpoint` lists the names",
        nargs="+",
        metavar="PATTERN",
        repeats=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveBestConfig(PluginConfig):
    """The best checkpoint."""

    save_best: bool = flag(
        False,
        "keep the checkpoint with the lowest validation loss in the folder 'best' of --save, beside those that "
        "--keep-last keeps; load it with --load DIR/best",
    )

    def check(self, run: RunConfig) -> None:
        if self.save_best and run.checkpoint.save is None:
            raise InputError("--save-best needs --save, the folder to write checkpoints to")
        if self.save_best and run.training.eval_iters == 0:
            raise InputError("--save-best needs evaluations; with --eval-iters 0 there are none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionConfig(PluginConfig):
    """Deletion of old checkpoints."""

    keep_last: int | None = flag(
        None, "keep the N newest checkpoints and delete older ones (default: keep all)", low=1
    )
    save_retain_interval: int | None = flag(
        None,
        "keep checkpoints whose iteration is a multiple of N, whatever --keep-last says; without --keep-last, keep "
        "only these and the newest",
        low=1,
    )

    def check(self, run: RunConfig) -> None:
        for name in ("keep_last", "save_retain_interval"):
            value = getattr(self, name)
            if value is not None and run.checkpoint.save is None:
                given = f"--{name.replace('_', '-')}: {value}"
                raise InputError(f"{given} needs --save, the folder to write checkpoints to")
