"""Changes of a mixture of experts that let Hugging Face's models compute the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.pieces import Index, TensorSource
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice

OUTPUTS = (".experts.weight2", ".experts.bias2")
CAPACITY = ("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity")


def without_capacity(checkpoint: Checkpoint) -> Checkpoint:
    """The same model without a capacity of the experts: Hugging Face's models drop no tokens, as generation here."""
    if model_config(checkpoint).moe_expert_capacity_factor is None:
        return checkpoint
    note = "the experts' capacity is left out: the model drops no tokens, as in generation"
    return _with_defaults(checkpoint, CAPACITY, note)


def with_scaled_experts(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with the scaling factor of its router as part of the experts' weights.

    Hugging Face's models without latent attention have no such factor.
    """
    model, weights = model_config(checkpoint), checkpoint.tensors["model"]
    factor = model.moe_router_topk_scaling_factor
    if factor is None or model.multi_latent_attention or not _is_exact(weights, factor):
        return checkpoint
    note = f"--moe-router-topk-scaling-factor {factor:g} becomes part of the experts' weights"
    changed = _with_defaults(checkpoint, ("moe_router_topk_scaling_factor",), note)
    return dataclasses.replace(changed, tensors={**checkpoint.tensors, "model": _Scaled(weights, factor)})


def _with_defaults(checkpoint: Checkpoint, names: Sequence[str], note: str) -> Checkpoint:
    """The same checkpoint with the defaults of some fields of the model's config, and a further note."""
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name in names}
    config = checkpoint.state["config"]
    config = config | {"model": config["model"] | defaults}
    return dataclasses.replace(
        checkpoint, state=checkpoint.state | {"config": config}, notes=(*checkpoint.notes, note)
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
