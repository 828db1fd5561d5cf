"""What the tensors of Megatron-LM's own layout are called, how they are cut, and how the rows of attention lie.

Each of T x P processes has written one file of nested dicts; the keys here are those of its `model`, joined by dots.
Layers are numbered within a process; in versions before 2, the stack is called `transformer` and attention `attention`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import Tensor

from megatron.model.vocabulary import WORD_TABLE

# Of the last of several stages: the output layer's copy of the table of words.
HEAD_COPY = "word_embeddings_for_head.weight"

# Modules of a layer: theirs, and ours.
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# Modules before and after the layers; of the name of one, the stack's, ours depends on the kind of model.
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
# The dicts whose keys are not nested further.
CONTAINERS = (
    *BEFORE,
    "language_model.encoder",
    "language_model.pooler",
    "lm_head",
    "binary_head",
    "word_embeddings_for_head",
)
# Modules whose tensors are cut by rows, and those of which the weight is cut by columns.
BY_ROWS = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
BY_COLUMNS = ("linear_proj", "linear_fc2")


def rank_folder(tensor: int, stage: int, stages: int) -> str:
    """The folder of a process's file."""
    return f"mp_rank_{tensor:02d}" if stages == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def our_name(key: str, stack: str, first_layer: int) -> str | None:
    """Our name of a tensor; None if we have no such tensor.

    Args:
        stack: "decoder" of a GPT or "encoder" of a BERT.
        first_layer: the number in the whole model of the process's first layer.
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
    """The keys of the tensors of one stage, and our names, in the order of the file; those alone that are in `names`.

    Args:
        stack: as above.
        layers: their numbers in the whole model.
        first, last: whether it is the first stage, the last one, or both.
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
    """Put a tensor where its key belongs in the nested dicts of a file."""
    container = next(name for name in CONTAINERS if key.startswith(f"{name}."))
    for part in container.split("."):
        model = model.setdefault(part, {})
    model[key.removeprefix(f"{container}.")] = tensor


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor-parallel processes hold parts of one of our tensors; None if all hold it."""
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in BY_ROWS:
        return 0
    return 1 if module in BY_COLUMNS and leaf == "weight" else None


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for every id."""
    return name in (WORD_TABLE, "output_layer.bias")


def rows_by_head(part: Tensor, version: float, heads: int) -> Tensor:
    """A process's part of a query-key-value projection, of so many heads, with its rows as version 2 and later, and we,
    have them: of each head its query, its key and its value."""
    if version >= 2.0:
        return part
    rows = part.shape[0] // (3 * heads)
    if version == 0:  # all queries, all keys, all values
        return part.view(3, heads, rows, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
    # Of each head, of each channel: query, key, value.
    return part.view(heads, rows, 3, *part.shape[1:]).transpose(1, 2).reshape(part.shape)
