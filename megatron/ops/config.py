"""Flags of the operations' implementations, and sizes that the planner needs too. Imports no torch."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import Config, flag

# Bytes of a chunk of logits, which adds to the whole gradient of the vocabulary table (2% of its time on an H100), and
# of the pieces that functions work on, which stay in a CPU's cache; by device type.
LOGITS_CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
LOGITS_PIECE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpsConfig(Config):
    """Implementations of the hot operations."""

    ops_backend: str = flag(
        "auto",
        "'plain': unfused PyTorch operations. 'compile': fused operations, some by torch.compile. 'auto': like "
        "'compile', but without torch.compile where it does not work or a CPU model is too small to benefit. 'apex': "
        "norms of NVIDIA's apex, on GPUs, in layers that are not compiled. 'layers': compile whole layers, as 'auto' "
        "does on GPUs",
        choices=("auto", "plain", "compile", "apex", "layers"),
    )
    torch_compile: bool = flag(True, "do not use torch.compile")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ops_backend in ("compile", "layers") and not self.torch_compile:
            raise InputError(
                f"--ops-backend {self.ops_backend} and --no-torch-compile exclude each other; leave one of them out"
            )
