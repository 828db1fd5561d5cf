"""Read a GPT from a checkpoint of current Megatron-LM, written by torch.distributed.checkpoint.

    metadata.json               the format, "torch_dist"
    .metadata, __0_0.distcp     tensors (see `chunks`)
    common.pt                   the flags of the run and its progress; in newer versions an object among the chunks

Names are the native ones, of the whole model. Exceptions are the layers of a homogeneous stack, which are stacked in
one tensor (`decoder.layers.mlp.linear_fc1.weight`), norms that are fused with the linear layer after them, and the
layers of a HybridModel (see `hybrid`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.errors import InputError
from megatron.files import read_file
from megatron.interop.external import ExternalTensor, ExternalTensors, list_names, meta_model
from megatron.interop.nvidia.chunks import (
    METADATA,
    MODEL,
    STACK,
    ChunkedTensor,
    LayerTensor,
    StoredChunk,
    is_stacked,
    kind_of,
    read_metadata,
)
from megatron.interop.nvidia.experts import (
    EXPERT_BIAS,
    ExpertTensor,
    capacity_note,
    expert_sizes,
    expert_tensors,
)
from megatron.interop.nvidia.hybrid import FINAL_NORM, NOT_READ, gpt_flags, gpt_name, is_hybrid
from megatron.interop.nvidia.model_space import check_model_space, open_states, steps_of
from megatron.interop.nvidia.run import (
    check_tensors,
    counts_samples,
    heads_note,
    read_config,
    read_flags,
    read_state,
)
from megatron.interop.torch_file import read_torch_file
from megatron.interop.unpickle import Record
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer.config import TokenizerConfig

# Prefixes of fused norms, and the native prefixes.
FORMAT_BYTES = 10**6  # of metadata.json
FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def open_torch_dist(
    folder: Path, tokenizer: TokenizerConfig, given: Mapping[str, Any], *, load_optim: bool
) -> Checkpoint:
    """Open the checkpoint in `folder`. See `open_megatron` for the other arguments.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not those of a supported GPT.
    """
    _check_format(folder)
    tensors, objects = read_metadata(folder)
    path, content = _common_state(folder, objects)
    args = read_flags(path, content)
    hybrid = is_hybrid(args)
    if hybrid:
        args = gpt_flags(path, args)
    elif any(name.startswith(FINAL_NORM) for name in tensors):
        raise InputError(f"{path}: holds a HybridModel, but lacks its flag --hybrid-layer-pattern")
    if load_optim:
        check_model_space(path, content, [*tensors, *objects])
    states = _by_kind(folder, tensors, hybrid)
    parts = states.pop(MODEL, {})
    shapes = {name: part.shape for name, part in parts.items()}
    if len(shapes.get(WORD_TABLE, ())) != 2:
        raise InputError(f"{folder}: holds no GPT ({METADATA} lacks the word embeddings)")
    config = read_config(path, args, _sizes(folder, shapes, args), given, NOT_READ if hybrid else ())
    padded = shapes[WORD_TABLE][0]
    model = meta_model("GPT", config, padded)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dtypes = {part.dtype for name, part in parts.items() if not name.endswith(EXPERT_BIAS)}
    check_tensors(folder, shapes, expected, dtypes)
    bf16 = dtypes == {torch.bfloat16}
    dtype = torch.bfloat16 if bf16 else torch.float32
    sources = {
        name: ExternalTensor(part.shape, torch.float32 if name.endswith(EXPERT_BIAS) else dtype, part.parts)
        for name, part in parts.items()
    }
    has_progress = counts_samples(content, args)
    state = read_state(
        path,
        content if has_progress else {},
        args,
        task="GPT",
        model=config,
        tokenizer=tokenizer,
        padded=padded,
        bf16=bf16,
    )
    if has_progress:
        state["config"]["data"]["data_order"] = "head"
    contents = {"model": ExternalTensors(folder, sources)}
    notes = (
        [] if args.state else [f"{folder} lacks the flags of its run; the defaults apply to those not given"]
    )
    notes += [*heads_note(path, args, config), *capacity_note(path, args)]
    if load_optim and states and has_progress:
        contents["optimizer"] = open_states(folder, states, sources)
        state["optimizer_steps"] = steps_of(path, content, states)
    elif load_optim and states:
        notes.append(
            f"{folder}: its optimizer state is not read, because {path.name} lacks the run's progress"
        )
    return Checkpoint(folder, state, contents, notes=tuple(notes))


def _check_format(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        metadata = json.loads(read_file(path, FORMAT_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON") from None
    if not isinstance(metadata, dict) or metadata.get("sharded_backend") != "torch_dist":
        raise InputError(f"{path}: is not of the format 'torch_dist', the only one supported")


def _by_kind(
    folder: Path, tensors: Mapping[str, ChunkedTensor], hybrid: bool
) -> dict[str, dict[str, LayerTensor | ExpertTensor]]:
    """The tensors of each kind, by native name of their weights."""
    kinds: dict[str, dict[str, LayerTensor]] = {}
    for name, whole in tensors.items():
        kind, weight = kind_of(name)
        found = native_tensors(gpt_name(weight) if hybrid else weight, whole)
        twice = found.keys() & kinds.setdefault(kind, {}).keys()
        if twice:
            raise InputError(f"{folder}: holds two tensors for each of {list_names(twice)}")
        kinds[kind] |= found
    return {kind: expert_tensors(folder, found) for kind, found in kinds.items()}


def native_tensors(name: str, whole: ChunkedTensor) -> dict[str, LayerTensor]:
    """A tensor that belongs to the weight `name`, or the layers that are stacked in it, by native name."""
    for theirs, ours in FUSED.items():
        name = name.replace(theirs, ours)
    if not is_stacked(name):
        return {name: LayerTensor(whole)}
    return {
        f"{STACK}{layer}.{name[len(STACK) :]}": LayerTensor(whole, (layer,))
        for layer in range(whole.shape[0])
    }


def _common_state(folder: Path, objects: dict[str, StoredChunk]) -> tuple[Path, dict[str, Any]]:
    """The state that all ranks share, empty if there is none, and its file."""
    path, whole = folder / METADATA, None
    chunk = next((chunk for name, chunk in objects.items() if name.startswith("common_state")), None)
    if (folder / "common.pt").exists():
        path = folder / "common.pt"
        whole = read_torch_file(path)
    elif chunk is not None:
        path = chunk.path
        whole = read_torch_file(path, chunk.begin, chunk.length)
        if isinstance(whole, list) and len(whole) == 1:
            (whole,) = whole
    return path, whole if isinstance(whole, dict) else {}


def _sizes(folder: Path, shapes: dict[str, tuple[int, ...]], args: Record) -> dict[str, Any]:
    """Fields of the model's config that follow from its tensors."""
    layers = {name.split(".")[2] for name in shapes if name.startswith(STACK)}
    sizes: dict[str, Any] = expert_sizes(shapes, len(layers))
    # The first layer of each kind gives the sizes.
    dense = [_product_shapes(shapes, f"{STACK}{i}.mlp.", "linear_fc{}.weight") for i in range(len(layers))]
    experts = [_product_shapes(shapes, f"{STACK}{i}.mlp.experts.", "weight{}") for i in range(len(layers))]
    found = next(filter(None, dense), None) or next(filter(None, experts), None)
    if found is None:
        raise InputError(f"{folder}: holds no GPT (its first layer lacks an MLP)")
    fc1, fc2 = found
    if any(dense):
        sizes |= {"ffn_hidden_size": fc2[1], "swiglu": fc1[0] == 2 * fc2[1]}
    else:
        sizes["swiglu"] = fc1[0] == 2 * fc2[0]
    sizes |= {
        "num_layers": len(layers),
        "hidden_size": shapes[WORD_TABLE][1],
        "add_bias_linear": f"{STACK}0.mlp.linear_fc2.bias" in shapes,
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in shapes else "RMSNorm",
        "untie_embeddings_and_output_weights": "output_layer.weight" in shapes,
    }
    positions = shapes.get("embedding.position_embeddings.weight")
    if positions:
        sizes |= {"max_position_embeddings": positions[0], "position_embedding_type": "learned_absolute"}
    return sizes


def _product_shapes(
    shapes: dict[str, tuple[int, ...]], prefix: str, names: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of the two products of an MLP, or of all experts of a layer; None if the layer has none."""
    fc1, fc2 = (shapes.get(prefix + names.format(i)) for i in (1, 2))
    return None if fc1 is None or fc2 is None or (len(fc1), len(fc2)) != (2, 2) else (fc1, fc2)
