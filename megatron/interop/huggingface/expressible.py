"""Changes of a mixture of experts that let Hugging Face's models compute the same."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.pieces import Index, TensorSource
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice

OUTPUTS = ".experts.weight2"
CAPACITY = ("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity")


def expressible(checkpoint: Checkpoint) -> Checkpoint:
    """The same model without a capacity of the experts, and with their scaling factor as part of their weights.

    Hugging Face's models drop no tokens, as generation here. Those without latent attention have no scaling factor.
    """
    model = model_config(checkpoint)
    changed: list[str] = []
    notes, weights = checkpoint.notes, checkpoint.tensors["model"]
    if model.moe_expert_capacity_factor is not None:
        changed += CAPACITY
        notes = (*notes, "the experts' capacity is left out: the model drops no tokens, as in generation")
    factor = model.moe_router_topk_scaling_factor
    if factor is not None and not model.multi_latent_attention and _is_exact(weights, factor):
        changed.append("moe_router_topk_scaling_factor")
        notes = (*notes, f"--moe-router-topk-scaling-factor {factor:g} becomes part of the experts' weights")
        weights = _Scaled(weights, factor)
    if not changed:
        return checkpoint
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    settings = checkpoint.state["config"]["model"] | {name: defaults[name] for name in changed}
    config = checkpoint.state["config"] | {"model": settings}
    tensors = {**checkpoint.tensors, "model": weights}
    return dataclasses.replace(
        checkpoint, state=checkpoint.state | {"config": config}, tensors=tensors, notes=notes
    )


def _is_exact(weights: TensorSource, factor: float) -> bool:
    """True if the products of the experts' weights with a factor are as precise as the weights."""
    in_half = any(t["dtype"] != "float32" for name, t in weights.index.items() if name.endswith(OUTPUTS))
    return not in_half or math.frexp(factor)[0] == 0.5


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A `TensorSource` in which the outputs of all experts are multiplied by a factor."""

    source: TensorSource
    factor: float

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def index(self) -> Index:
        return self.source.index

    def read(self, name: str, spec: GlobalSlice) -> Tensor:
        values = self.source.read(name, spec)
        return values * self.factor if name.endswith(OUTPUTS) else values

    def read_into(self, target: Tensor, name: str, spec: GlobalSlice, begin: int) -> None:
        self.source.read_into(target, name, spec, begin)
        if name.endswith(OUTPUTS):
            target.mul_(self.factor)
