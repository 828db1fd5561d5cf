"""Flags of how the hot operations are computed."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, InputError, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpsConfig(Config):
    """By which code the hot operations are computed."""

    ops_backend: str = flag(
        "auto",
        "'plain': PyTorch's own operations, one by one; 'compile': fused ones, some by torch.compile; 'auto': as "
        "'compile', but without torch.compile where it does not work, or is not worth it for a small model on a CPU, "
        "and on a GPU with apex's normalisations where it is installed; 'apex': the same, and it must be; "
        "'transformer-engine': the same with Transformer Engine's",
        choices=("auto", "plain", "compile", "apex", "transformer-engine"),
    )
    torch_compile: bool = flag(True, "compile nothing; operations run as PyTorch has them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ops_backend == "compile" and not self.torch_compile:
            raise InputError(
                "--ops-backend compile and --no-torch-compile exclude each other; leave one of them out"
            )
