"""Flags of the optimizer and of the schedules of learning rate and weight decay.

Flags that belong to one optimizer are in its own file.
"""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.optim.registry import OPTIMIZERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonConfig(Config):
    """Flags that all optimizers share."""

    optimizer: str = flag(
        "adam",
        "; ".join(f"{name}: {(kind.__doc__ or '').partition('.')[0]}" for name, kind in OPTIMIZERS.items()),
        choices=tuple(OPTIMIZERS),
    )
    lr: float = flag(None, "peak learning rate", above=0, required=True)
    min_lr: float = flag(0.0, "learning rate at the end of the decay; lower bound after the warm-up", low=0)
    lr_decay_style: str = flag(
        "linear",
        "shape of the decay; WSD is warmup-stable-decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "iterations until the end of the decay, warm-up included (default: all of training)", low=1
    )
    lr_decay_samples: int | None = flag(
        None,
        "with --train-samples: samples until the end of the decay, warm-up included (default: all of training)",
        low=1,
    )
    lr_warmup_fraction: float | None = flag(
        None, "linear warm-up as a fraction of the decay's length", low=0, high=1
    )
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up", low=0)
    lr_warmup_samples: int = flag(0, "with --train-samples: samples of linear warm-up", low=0)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", low=0)
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the decay phase of warmup-stable-decay",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of the decay phase of warmup-stable-decay", low=1)
    lr_wsd_decay_samples: int | None = flag(
        None, "with --train-samples: samples of the decay phase of warmup-stable-decay", low=1
    )
    weight_decay: float = flag(
        0.01, "weight decay of matrices and embeddings; biases and norms are not decayed", low=0
    )
    start_weight_decay: float | None = flag(None, "weight decay at the start of training", low=0)
    end_weight_decay: float | None = flag(None, "weight decay at the end of training", low=0)
    weight_decay_incr_style: str = flag(
        "constant",
        "shape of the change from --start-weight-decay to --end-weight-decay",
        choices=("constant", "linear", "cosine"),
    )
    clip_grad: float = flag(1.0, "maximum global L2 norm of the gradient; 0 disables clipping", low=0)
    on_non_finite: str = flag(
        "stop",
        "on a NaN or infinite loss or gradient (which never changes the weights): 'stop' saves, reports the origin "
        "and exits; 'skip' continues, but exits after ten such steps in a row. With --fp16 this applies only once the "
        "loss scale cannot be lowered",
        choices=("stop", "skip"),
    )
    cpu_offload_optimizer: bool = flag(
        False,
        "keep optimizer state and fp32 copies of weights in host memory; each step copies them in pieces",
    )
    log_num_zeros_in_grad: bool = flag(False, "log the number of zero elements of the gradient")
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, take the schedules of learning rate and weight decay from the checkpoint instead of the command "
        "line",
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            raise InputError(f"--min-lr: {self.min_lr} is above --lr {self.lr}")
        if self.lr_warmup_init > self.lr:
            raise InputError(f"--lr-warmup-init: {self.lr_warmup_init} is above --lr {self.lr}")
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise InputError(
                f"--lr-warmup-fraction: {self.lr_warmup_fraction} was given with --lr-warmup-iters or "
                "--lr-warmup-samples; give only one"
            )
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant":
            if ends != (None, None):
                raise InputError(
                    "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
                )
        elif None in ends:
            raise InputError(
                f"--weight-decay-incr-style: {self.weight_decay_incr_style} needs both "
                "--start-weight-decay and --end-weight-decay"
            )


# The fields of the last base come first.
_OF_EACH = dict.fromkeys(
    o.config_class for o in reversed(OPTIMIZERS.values()) if o.config_class is not Config
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(*_OF_EACH, CommonConfig):  # type: ignore[misc]
    """Optimizer, clipping and schedules. A length in iterations means that many full --global-batch-size batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in OPTIMIZERS.values():
            kind.check(self)
