"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982), with the scale factors of Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.optim.layout import Bucket
    from megatron.optim.matrices import MatrixShard
    from megatron.parallel.mesh import Axis

# Factors on updates by the shape [out, in] of the weight.
SCALE_FACTORS = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig(Config):
    muon_momentum: float = flag(0.95, "Muon: decay of the momentum", low=0, below=1)
    muon_nesterov: bool = flag(False, "Muon: Nesterov momentum", aliases=("--muon-use-nesterov",))
    muon_num_ns_steps: int = flag(5, "Muon: Newton-Schulz steps", low=1)
    muon_scale_mode: str = flag(
        "spectral",
        "Muon: factor on the update of a weight [out, in]: spectral is sqrt(max(out, in)), unit_rms_norm sqrt(out / "
        "in), shape_scaling sqrt(max(1, out / in))",
        choices=tuple(SCALE_FACTORS),
    )
    muon_extra_scale_factor: float = flag(
        1.0, "Muon: a further factor on the update; with spectral, 0.2 matches the size of AdamW's", above=0
    )


class Muon(OptimizerSpec):
    """Orthogonalized momentum for the matrices of layers, AdamW for all other parameters.

    The fused projection to queries, keys and values, and that of SwiGLU to gate and up, are one matrix each. With
    tensor parallelism all ranks gather the momentum and orthogonalize it, each for its own part of the weight.
    """

    config_class = MuonConfig

    @classmethod
    def check(cls, config: Any) -> None:
        if config.cpu_offload_optimizer and config.optimizer == "muon":
            raise InputError(
                "--cpu-offload-optimizer updates pieces of weights, and --optimizer muon needs whole matrices; use "
                "adam, sgd or lion"
            )

    def __init__(self, config: MuonConfig) -> None:
        self.config = config
        self.state = {"momentum_buffer": "float32"}

    def updates(self, name: str, p: nn.Parameter) -> bool:
        # Not embeddings, output layers and heads.
        return p.dim() == 2 and ".layers." in name

    def arrange(self, buckets: list[Bucket]) -> list[Bucket]:
        from megatron.optim.matrices import cut_between_matrices

        return cut_between_matrices(buckets)

    def divide(self, shard: Shard, bucket: Bucket, tp: Axis) -> list[MatrixShard]:
        from megatron.optim.matrices import matrices_of

        return matrices_of(shard, bucket, tp)

    def step(self, shards: Sequence[MatrixShard], inputs: StepInputs) -> None:
        config = self.config
        lr, taken = inputs.lr, 1 - inputs.found_inf
        for shard in shards:
            grad, momentum = shard.scaled_grad(inputs), shard.state["momentum_buffer"]
            momentum.lerp_(grad, taken * (1 - config.muon_momentum))
            update = grad.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
            update = shard.local(newton_schulz(shard.gather(update), config.muon_num_ns_steps))
            scale = SCALE_FACTORS[config.muon_scale_mode](*shard.shape) * config.muon_extra_scale_factor
            shard.weight.mul_(1 - taken * (lr * inputs.weight_decay)).sub_(update * (taken * (lr * scale)))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Move the singular values of `x` [rows, columns] close to 1, by a quintic iteration in the dtype of `x`.

    The coefficients are those of the Muon post, under which singular values end between about 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x
