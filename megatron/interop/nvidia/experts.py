"""Experts in checkpoints of current Megatron-LM, and the flags of mixtures of experts.

    decoder.layers.mlp.experts.experts.linear_fc1.weight            [layers, experts, 2f, h]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight          [experts, 2f, h], if layers differ
    decoder.layers.3.mlp.experts.experts.5.linear_fc2.weight        [h, f], with one tensor for each expert; those of
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w      [f, h] gates and
    decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v      [f, h] values are then separate

SequentialMLP, GroupedMLP and TEGroupedMLP write the same names. Files with a tensor for each expert divide the gated
MLPs of other layers, and shared experts, in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.interop.experts import layer_freq
from megatron.interop.nvidia.chunks import STACK, LayerTensor
from megatron.interop.unpickle import Record, shown_value
from megatron.model.moe_config import MoEConfig

NATIVE = {"linear_fc1": "weight1", "linear_fc2": "weight2"}
# A small malicious file could describe far more.
(MAX_EXPERTS,) = (f.metadata["flag"].high for f in dataclasses.fields(MoEConfig) if f.name == "num_experts")
EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.(?:([0-9]{1,5})\.)?(linear_fc[12])\.weight(_[wv])?")
HALF = re.compile(r"(.+\.linear_fc1\.weight)(_[wv])")
# Stays in fp32 in a half-precision model, and has no optimizer state.
EXPERT_BIAS = ".mlp.router.expert_bias"
# Flags of the model, and of its training, with the same values here. The tensors tell --moe-layer-freq. A capacity is
# not among them: Megatron-LM's is that of the tokens on a rank, not of a sequence.
FLAGS = frozenset(
    "num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate moe_z_loss_coeff".split()
)


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """The tensors of a layer's experts, one after the other, with the rows of each as the native format has them.

    Attributes:
        experts: the tensors of each expert that are joined along their rows.
        transposed: the native format has the transpose of an expert.
    """

    experts: tuple[tuple[LayerTensor, ...], ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = sum(part.shape[0] for part in self.experts[0]), self.experts[0][0].shape[1]
        return (len(self.experts) * columns, rows) if self.transposed else (len(self.experts) * rows, columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.experts[0][0].dtype

    @property
    def parts(self) -> tuple[Any, ...]:
        """As `ExternalTensor.parts`."""
        return tuple(functools.partial(self.read_expert, i) for i in range(len(self.experts)))

    def read_expert(self, expert: int) -> Tensor:
        """The rows of an expert."""
        whole = torch.cat([part.read() for part in self.experts[expert]])
        return whole.t() if self.transposed else whole

    def read(self) -> Tensor:
        """The rows of all experts."""
        return torch.cat([read() for read in self.parts])


def expert_tensors(folder: Path, tensors: Mapping[str, LayerTensor]) -> dict[str, LayerTensor | ExpertTensor]:
    """The same tensors of one kind, with those of the experts, and the halves of gated MLPs, under native names.

    Raises:
        InputError: tensors of experts are missing, or have impossible shapes.
    """
    found: dict[str, LayerTensor | ExpertTensor] = {}
    divided: dict[str, dict[int, dict[str, LayerTensor]]] = {}  # native name, expert, half
    for name, tensor in tensors.items():
        if of_experts := EXPERTS.fullmatch(name):
            prefix, number, module, half = of_experts.groups()
            experts = divided.setdefault(prefix + NATIVE[module], {})
            if number is not None:
                experts.setdefault(int(number), {})[half or ""] = tensor
            elif len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
                experts |= {i: {"": tensor.at(i)} for i in range(tensor.shape[0])}
            else:
                raise InputError(
                    f"{folder}: {name} has the shape {tensor.shape}, not that of stacked experts"
                )
        elif of_gated := HALF.fullmatch(name):
            divided.setdefault(of_gated[1], {}).setdefault(0, {})[of_gated[2]] = tensor
        else:
            found[name] = tensor
    for name, experts in divided.items():
        parts = _in_order(folder, name, experts)
        found[name] = ExpertTensor(parts, transposed=name.endswith(f".{NATIVE['linear_fc2']}"))
    return found


def _in_order(
    folder: Path, name: str, experts: Mapping[int, Mapping[str, LayerTensor]]
) -> tuple[tuple[LayerTensor, ...], ...]:
    """The tensors of each expert, in order: a whole one, or the gate and the values."""
    parts = [experts.get(i, {}) for i in range(len(experts))]
    halves = {tuple(sorted(part, reverse=True)) for part in parts}
    if halves not in ({("",)}, {("_w", "_v")}):
        raise InputError(f"{folder}: {name} lacks an expert or a half of one, or is there in several forms")
    (order,) = halves
    found = tuple(tuple(part[half] for half in order) for part in parts)
    shapes = {tuple(tensor.shape for tensor in part) for part in found}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in next(iter(shapes))):
        raise InputError(f"{folder}: {name} consists of experts of unequal shapes")
    return found


def expert_sizes(shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, Any]:
    """Fields of the model's config that follow from the tensors of experts; none if there are no experts."""
    routers = [f"{STACK}{layer}.mlp.router.weight" in shapes for layer in range(layers)]
    if not any(routers):
        return {}
    mlp = f"{STACK}{routers.index(True)}.mlp."
    experts = shapes[f"{mlp}router.weight"][0]
    sizes = {
        "num_experts": experts,
        "moe_layer_freq": layer_freq(routers),
        "moe_ffn_hidden_size": shapes.get(f"{mlp}experts.weight2", (0,))[0] // max(experts, 1),
    }
    shared = shapes.get(f"{mlp}shared_experts.linear_fc2.weight")
    if shared is not None:
        sizes["moe_shared_expert_intermediate_size"] = shared[-1]
    return sizes


def expert_flags(path: Path, args: Record) -> dict[str, Any]:
    """Fields of the model's config that the flags of a run with experts give.

    Args:
        path: the file that holds `args`, for messages.

    Raises:
        InputError: the experts are balanced in a way that changes their choice.
    """
    if not args.get("num_experts"):
        return {}
    fields = {name: args.get(name) for name in FLAGS if args.get(name) is not None}
    types = args.get("moe_router_load_balancing_type")
    types = tuple(types) if isinstance(types, list) else (types or "aux_loss",)
    coefficients = args.get("moe_aux_loss_coeff", 0.0)
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(types)
    for kind in types:
        if kind in ("sinkhorn", "quantile_balancing"):
            raise InputError(
                f"{path}: was trained with --moe-router-load-balancing-type {shown_value(kind)}, which is not supported"
            )
    if types != ("none",):
        fields["moe_router_load_balancing_type"] = types
        fields["moe_aux_loss_coeff"] = tuple(float(value) for value in coefficients)
    return fields


def capacity_note(path: Path, args: Record) -> Iterator[str]:
    """A note if the experts had a capacity, which only training uses."""
    factor = args.get("moe_expert_capacity_factor")
    # Below 0, Megatron-LM has none.
    if args.get("num_experts") and isinstance(factor, int | float) and factor > 0:
        yield (
            f"{path}: was trained with --moe-expert-capacity-factor {shown_value(factor)}, which is not converted; "
            "give the flag to train on with a capacity"
        )
