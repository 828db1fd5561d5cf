"""Names of tensors in Megatron-LM's checkpoints, their sharding, and the order of rows in the QKV projection.

Each of T x P ranks writes a file of nested dicts. The keys here are those of its `model`, joined by dots. Layers are
numbered within a rank. Before version 2 the stack is called `transformer`, and self-attention `attention`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import Tensor

from megatron.model.vocabulary import WORD_TABLE

# The output layer's copy of the word embeddings, on the last of several stages.
HEAD_COPY = "word_embeddings_for_head.weight"

# Modules of a layer, by their name in Megatron-LM.
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# Modules before and after the layers.
BEFORE = {
    "language_model.embedding.word_embeddings": "embedding.word_embeddings",
    "language_model.embedding.position_embeddings": "embedding.position_embeddings",
    "language_model.embedding.tokentype_embeddings": "embedding.tokentype_embeddings",
}
AFTER = {
    "language_model.pooler.dense": "pooler.dense",
    "lm_head": "output_layer",
    "lm_head.dense": "lm_head.dense",
    "lm_head.layernorm": "lm_head.layer_norm",
    "binary_head": "binary_head",
}
# Dicts whose keys are not nested further.
CONTAINERS = (
    *BEFORE,
    "language_model.encoder",
    "language_model.pooler",
    "lm_head",
    "binary_head",
    "word_embeddings_for_head",
)
# Column-parallel modules, whose tensors are sharded by rows, and row-parallel ones, whose weight is sharded by columns.
BY_ROWS = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
BY_COLUMNS = ("linear_proj", "linear_fc2")


def rank_folder(tensor: int, stage: int, stages: int) -> str:
    """The folder of a rank's file."""
    return f"mp_rank_{tensor:02d}" if stages == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def native_name(key: str, stack: str, first_layer: int) -> str | None:
    """The native name of a tensor; None if it is unknown.

    Args:
        stack: "decoder" for GPT or "encoder" for BERT.
        first_layer: the index in the whole model of the rank's first layer.
    """
    module, _, leaf = key.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    for names in (BEFORE, AFTER):
        if module in names:
            return f"{names[module]}.{leaf}"
    found = re.fullmatch(r"language_model\.(?:encoder|transformer)\.(?:layers\.([0-9]{1,6})\.)?(.+)", module)
    if not found:
        return None
    layer, module = found.groups()
    if layer is None:
        return f"{stack}.final_layernorm.{leaf}" if module == "final_layernorm" else None
    ours = LAYER.get(re.sub(r"^attention\.", "self_attention.", module))
    return ours and f"{stack}.layers.{first_layer + int(layer)}.{ours}.{leaf}"


def stage_keys(
    stack: str, layers: range, *, first: bool, last: bool, names: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the key and the native name of each tensor of a stage, in the order of the file.

    Args:
        stack: "decoder" for GPT or "encoder" for BERT.
        layers: the indices of the stage's layers in the whole model.
        first, last: the stage is the first, the last, or both.
        names: the native names of the model's tensors; others are left out.
    """
    pairs: list[tuple[str, str]] = list(BEFORE.items()) if first else []
    for i, layer in enumerate(layers):
        pairs += [
            (f"language_model.encoder.layers.{i}.{theirs}", f"{stack}.layers.{layer}.{ours}")
            for theirs, ours in LAYER.items()
        ]
    if last:
        pairs += [("language_model.encoder.final_layernorm", f"{stack}.final_layernorm"), *AFTER.items()]
    for theirs, ours in pairs:
        for leaf in ("weight", "bias"):
            if f"{ours}.{leaf}" in names:
                yield f"{theirs}.{leaf}", f"{ours}.{leaf}"
    if last and not first:
        yield HEAD_COPY, WORD_TABLE


def nest(model: dict, key: str, tensor: Tensor) -> None:
    """Insert a tensor into the nested dicts of a file."""
    container = next(name for name in CONTAINERS if key.startswith(f"{name}."))
    for part in container.split("."):
        model = model.setdefault(part, {})
    model[key.removeprefix(f"{container}.")] = tensor


def shard_dim(name: str) -> int | None:
    """The dimension along which a native tensor is sharded over tensor-parallel ranks; None if it is replicated."""
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in BY_ROWS:
        return 0
    return 1 if module in BY_COLUMNS and leaf == "weight" else None


def is_vocabulary(name: str) -> bool:
    """True for a tensor with a row for each token id."""
    return name in (WORD_TABLE, "output_layer.bias")


def rows_by_head(part: Tensor, version: float, heads: int) -> Tensor:
    """Reorder the rows of a rank's QKV projection to [head, (query, key, value), channel], as since version 2."""
    if version >= 2.0:
        return part
    rows = part.shape[0] // (3 * heads)
    if version == 0:  # [(query, key, value), head, channel]
        return part.view(3, heads, rows, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
    # [head, channel, (query, key, value)]
    return part.view(heads, rows, 3, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
