"""The form of a table of a model family of transformers.

Reading and writing use the same tables. A native tensor corresponds to one or several tensors of transformers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.model.config import ModelConfig

LAYER = "decoder.layers.{}."  # start of the names of a layer's native modules


def join_qkv(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Join the rows of separate query, key and value projections: for each group its queries, its key, its value."""
    groups, width = config.num_query_groups, config.kv_channels
    by_group = [x.reshape(groups, -1, width, *x.shape[1:]) for x in parts]
    return torch.cat(by_group, dim=1).flatten(0, 2)


def split_qkv(qkv: Tensor, config: ModelConfig) -> list[Tensor]:
    """The inverse of `join_qkv`."""
    groups, width = config.num_query_groups, config.kv_channels
    queries = config.num_attention_heads // groups
    by_group = qkv.view(groups, queries + 2, width, *qkv.shape[1:])
    return [x.flatten(0, 2) for x in by_group.split((queries, 1, 1), dim=1)]


@dataclasses.dataclass(frozen=True)
class Modules:
    """The modules of transformers that correspond to a native module, or the tensors that correspond to a native one.

    Attributes:
        names: their names, with `{}` for the index of the layer and `{expert}` for that of an expert.
        join: makes the native weight or bias, or its rows of an expert, from theirs.
        split: makes their weights or biases from the native one.
    """

    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor], ModelConfig], Tensor] = lambda parts, config: parts[0]
    split: Callable[[Tensor, ModelConfig], list[Tensor]] = lambda x, config: [x]


def same(name: str) -> Modules:
    return Modules((name,))


def transposed(name: str) -> Modules:
    """A `Conv1D`, with a weight of [inputs, outputs]."""
    return Modules((name,), lambda parts, config: parts[0].t(), lambda x, config: [x.t()])


def separate_qkv(*names: str) -> Modules:
    return Modules(names, join_qkv, split_qkv)


def fused_qkv(name: str) -> Modules:
    """A projection whose outputs are all queries, then all keys, then all values."""

    def join(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
        kv = config.num_query_groups * config.kv_channels
        return join_qkv(parts[0].split((len(parts[0]) - 2 * kv, kv, kv)), config)

    return Modules((name,), join, lambda qkv, config: [torch.cat(split_qkv(qkv, config))])


def transposed_qkv(name: str) -> Modules:
    """A `Conv1D` whose outputs are all queries, then all keys, then all values."""
    return Modules(
        (name,),
        lambda parts, config: join_qkv(parts[0].t().chunk(3), config),
        lambda qkv, config: [torch.cat(split_qkv(qkv, config)).t()],
    )


def gate_and_up(*names: str) -> Modules:
    return Modules(names, lambda parts, config: torch.cat(tuple(parts)), lambda x, config: list(x.chunk(2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family of transformers.

    Attributes:
        model_type: its name in config.json.
        architectures: classes of transformers that load such a model; the second is for BERT without the binary head.
        prefix: start of the names of all tensors except those of the heads; files of a model without heads lack it.
        modules: the corresponding modules of transformers, by native module; or tensors, by native tensor.
        ignored: matches names of tensors to skip: constants, and copies of tied embeddings.
        settings: keys of config.json, with the equivalent fields of ModelConfig.
        defaults: values of settings that config.json may omit.
        shape: fields of ModelConfig that are the same for the whole family.
        fixed: the supported values of further keys of config.json.
        activation: the key of config.json for the form of GELU, and its default; None for a gated MLP.
        tied: the default of tie_word_embeddings.
        older: older names of settings.
        equal: keys that must have the value of another key, or none.
        windows: the keys of attention windows, with their defaults.
        window_layers: for each of a number of layers, given the values of those keys, true if it has a window by
            default; None for families whose layers are all alike.
        rope_types: the supported values of rope_type.
        rope_theta: the default of rope_theta.
        rope_parameters: the default of rope_parameters.
        local_rope_theta: that of the layers with a window, if they have one of their own.
        unused: keys that do not change what a model of this family computes.
        read_keys: moves further keys, such as those of experts, to fields of ModelConfig.
        write_keys: the same keys for a model.
    """

    model_type: str
    architectures: tuple[str, ...]
    prefix: str
    modules: Mapping[str, Modules]
    ignored: str
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]
    shape: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    activation: tuple[str, str] | None
    tied: bool
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    window_layers: Callable[[dict[str, Any], int], list[bool]] | None = None
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    local_rope_theta: float | None = None
    unused: frozenset[str] = frozenset()
    read_keys: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    write_keys: Callable[[ModelConfig], dict[str, Any]] | None = None

    def architecture(self, task: str) -> str:
        """The class of transformers that loads the model with its heads."""
        return self.architectures[-1 if task == "BERT --bert-no-binary-head" else 0]

    def tensors(self, name: str, config: ModelConfig) -> tuple[list[list[str]], Modules]:
        """The names of the tensors of transformers that correspond to a native tensor, and their conversion.

        Returns:
            The names for each part of the native tensor: one part, or equal numbers of rows for each expert.
        """
        layer = re.search(r"(?<=\.layers\.)[0-9]+", name)
        pattern = re.sub(r"(?<=\.layers\.)[0-9]+", "{}", name)
        module, _, kind = pattern.rpartition(".")  # weight or bias
        modules, suffix = (
            (self.modules[pattern], "") if pattern in self.modules else (self.modules[module], f".{kind}")
        )
        number = layer and layer.group()
        experts = range((config.num_experts or 1) if "{expert}" in modules.names[0] else 1)
        return [
            [f"{theirs.format(number, expert=e)}{suffix}" for theirs in modules.names] for e in experts
        ], modules
