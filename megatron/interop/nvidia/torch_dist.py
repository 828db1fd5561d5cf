"""Read the weights of a GPT from a checkpoint of current Megatron-LM, written by torch.distributed.checkpoint.

    metadata.json    the format, "torch_dist"
    .metadata        a pickle: the shape and the chunks of each tensor, and the file of each chunk
    __0_0.distcp     chunks, each as torch.save writes it, one after the other
    common.pt        the flags of the run; in newer versions an object among the chunks

Names are the native ones, of the whole model. Exceptions are the layers of a homogeneous stack, which are stacked in
one tensor (`decoder.layers.mlp.linear_fc1.weight`), and norms that are fused with the linear layer after them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.errors import InputError
from megatron.flags import LARGEST
from megatron.interop.external import ExternalTensor, ExternalTensors, meta_model
from megatron.interop.nvidia.run import check_tensors, heads_note, read_config, read_flags, read_state
from megatron.interop.torch_file import StoredTensor, read_torch_file
from megatron.interop.unpickle import Record, unpickle
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer.config import TokenizerConfig

METADATA = ".metadata"
(MAX_LAYERS,) = (f.metadata["flag"].high for f in dataclasses.fields(ModelConfig) if f.name == "num_layers")
STACK = "decoder.layers."
# Prefixes of fused norms, and the native prefixes.
FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor, and its location in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int
    length: int


@dataclasses.dataclass(frozen=True)
class ChunkedTensor:
    """A tensor, and the blocks of which it consists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def read(self, layer: int | None) -> Tensor:
        """Read the tensor, or one of the layers that are stacked in it.

        Raises:
            InputError: a file is damaged, or chunks are missing or overlap.
        """
        stacked = int(layer is not None)
        values = torch.empty(self.shape[stacked:], dtype=self.dtype)
        missing = torch.ones(values.shape, dtype=torch.bool)
        for chunk in self.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if layer is not None and not chunk.offsets[0] <= layer < ends[0]:
                continue
            stored = read_torch_file(chunk.path, chunk.begin, chunk.length)
            if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (
                chunk.sizes,
                self.dtype,
            ):
                raise InputError(f"{chunk.path}: a chunk of {self.name} contradicts {METADATA}")
            if layer is not None:
                stored = stored.row(layer - chunk.offsets[0])
            block = tuple(slice(*ends) for ends in zip(chunk.offsets, ends, strict=True))[stacked:]
            if not missing[block].all():
                raise InputError(f"{chunk.path}: a chunk of {self.name} overlaps another")
            values[block] = stored.read()
            missing[block] = False
        if missing.any():
            raise InputError(
                f"{self.chunks[0].path.parent}: {missing.sum()} elements of {self.name} are in no file"
            )
        return values


def open_torch_dist(folder: Path, tokenizer: TokenizerConfig, given: Mapping[str, Any]) -> Checkpoint:
    """Open the checkpoint in `folder`, only its weights. See `open_megatron` for the other arguments.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not those of a supported GPT.
    """
    _check_format(folder)
    tensors, objects = read_metadata(folder)
    optimizer = [name for name in tensors if name.startswith("optimizer.")]
    parts: dict[str, tuple[ChunkedTensor, int | None]] = {}
    for name, chunks in tensors.items():
        if name not in optimizer:
            parts |= {ours: (chunks, layer) for ours, layer in native_names(name, chunks.shape)}
    shapes = {name: chunks.shape[layer is not None :] for name, (chunks, layer) in parts.items()}
    if len(shapes.get(WORD_TABLE, ())) != 2:
        raise InputError(f"{folder}: holds no GPT ({METADATA} lacks the word embeddings)")
    path, args = _flags(folder, objects)
    config = read_config(path, args, _sizes(folder, shapes, args), given)
    padded = shapes[WORD_TABLE][0]
    model = meta_model("GPT", config, padded)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dtypes = {chunks.dtype for chunks, _ in parts.values()}
    check_tensors(folder, shapes, expected, dtypes)
    bf16 = dtypes == {torch.bfloat16}
    dtype = torch.bfloat16 if bf16 else torch.float32
    sources = {
        name: ExternalTensor(shapes[name], dtype, functools.partial(chunks.read, layer))
        for name, (chunks, layer) in parts.items()
    }
    state = read_state(
        path, {}, args, task="GPT", model=config, tokenizer=tokenizer, padded=padded, bf16=bf16
    )
    notes = (
        [] if args.state else [f"{folder} lacks the flags of its run; the defaults apply to those not given"]
    )
    notes += heads_note(path, args, config)
    if optimizer:
        notes.append(f"{folder}: its optimizer state is not read")
    return Checkpoint(folder, state, {"model": ExternalTensors(folder, sources)}, notes=tuple(notes))


def _check_format(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        metadata = json.loads(path.read_bytes()[: 10**6])
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON") from None
    if not isinstance(metadata, dict) or metadata.get("sharded_backend") != "torch_dist":
        raise InputError(f"{path}: is not of the format 'torch_dist', the only one supported")


def read_metadata(folder: Path) -> tuple[dict[str, ChunkedTensor], dict[str, StoredChunk]]:
    """Read the tensors of a checkpoint, by name, and the chunks of its other objects.

    Raises:
        InputError: `.metadata` is damaged, or names files outside the folder.
    """
    path = folder / METADATA

    def refuse(*_: Any) -> None:
        raise ValueError("it contains a tensor")

    try:
        with path.open("rb") as file:
            whole = unpickle(file, str(path), tensor=refuse, storage=refuse)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        stored = {_chunk_key(index): info for index, info in whole.get("storage_data").items()}
        tensors, objects = {}, {}
        for name, entry in whole.get("state_dict_metadata").items():
            if type(name) is not str:
                raise ValueError("the name of a tensor is not a string")
            if entry.kind.endswith(".BytesStorageMetadata"):
                objects[name] = _chunk(folder, (), (), stored[name, None])
                continue
            shape, (dtype, *_) = _numbers(entry.get("size")), entry.get("properties").state
            chunks = [(_numbers(c.get("offsets")), _numbers(c.get("sizes"))) for c in entry.get("chunks")]
            if is_stacked(name) and (not shape or 0 in shape or shape[0] > MAX_LAYERS):
                raise ValueError(f"{name[:80]} stacks all layers, but has the shape {shape}")
            for offsets, sizes in chunks:
                if any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a chunk of {name} is out of its range")
            found = tuple(_chunk(folder, o, n, stored[name, o]) for o, n in chunks)
            if sum(chunk.length for chunk in found) < math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the chunks of {name} are too small for {shape}")
            tensors[name] = ChunkedTensor(name, shape, dtype, found)
        _check_lengths([chunk for tensor in tensors.values() for chunk in tensor.chunks])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({' '.join(str(error).split())[:200]})") from None
    return tensors, objects


def _check_lengths(chunks: list[StoredChunk]) -> None:
    """Raise `ValueError` if chunks are longer than their file, so that reading them would exhaust memory."""
    lengths: dict[Path, int] = {}
    for chunk in chunks:
        lengths[chunk.path] = lengths.get(chunk.path, 0) + chunk.length
    for path, length in lengths.items():
        if length > path.stat().st_size:
            raise ValueError(f"the chunks in {path.name} overlap")


def _chunk_key(index: Record) -> tuple[str, tuple[int, ...] | None]:
    """The name and offset of a chunk. They are checked first, because hashing arbitrary objects can crash Python."""
    name, offset = index.get("fqn"), index.get("offset")
    if type(name) is not str:
        raise ValueError("the name of a chunk is not a string")
    return name, None if offset is None else _numbers(offset)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(n) is not int or not 0 <= n <= LARGEST for n in values):
        raise ValueError("a shape or an offset is invalid")
    return values


def _chunk(folder: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Record) -> StoredChunk:
    name, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not re.fullmatch(r"__[0-9]+_[0-9]+\.distcp", name):
        raise ValueError(f"{name[:80]!r} is not the name of a chunk file")
    if info.get("transform_descriptors"):
        raise ValueError("chunks are compressed or encrypted")
    path = folder / name
    if not path.is_file() or begin + length > path.stat().st_size:
        raise InputError(f"{path}: is missing or too short; the checkpoint is incomplete")
    return StoredChunk(offsets, sizes, path, *_numbers((begin, length)))


def is_stacked(name: str) -> bool:
    """True for a tensor that stacks all layers."""
    return name.startswith(STACK) and not re.match(r"[0-9]", name[len(STACK) :])


def native_names(name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """The native names of the tensors in a tensor, each with its layer if they are stacked."""
    for theirs, ours in FUSED.items():
        name = name.replace(theirs, ours)
    if not is_stacked(name):
        return [(name, None)]
    return [(f"{STACK}{layer}.{name[len(STACK) :]}", layer) for layer in range(shape[0])]


def _flags(folder: Path, objects: dict[str, StoredChunk]) -> tuple[Path, Record]:
    """The flags of the run, empty if there are none, and their file."""
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
    return path, read_flags(path, whole)


def _sizes(folder: Path, shapes: dict[str, tuple[int, ...]], args: Record) -> dict[str, Any]:
    """Fields of the model's config that follow from its tensors."""
    layers = {name.split(".")[2] for name in shapes if name.startswith(STACK)}
    fc1, fc2 = (shapes.get(f"{STACK}0.mlp.{name}.weight") for name in ("linear_fc1", "linear_fc2"))
    if fc1 is None or fc2 is None or len(fc1) != 2 or len(fc2) != 2:
        raise InputError(f"{folder}: holds no GPT (its first layer lacks an MLP)")
    sizes = {
        "num_layers": len(layers),
        "hidden_size": shapes[WORD_TABLE][1],
        "ffn_hidden_size": fc2[1],
        "swiglu": fc1[0] == 2 * fc2[1],
        "add_bias_linear": f"{STACK}0.mlp.linear_fc2.bias" in shapes,
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in shapes else "RMSNorm",
        "untie_embeddings_and_output_weights": "output_layer.weight" in shapes,
    }
    positions = shapes.get("embedding.position_embeddings.weight")
    if positions:
        sizes |= {"max_position_embeddings": positions[0], "position_embedding_type": "learned_absolute"}
    return sizes
