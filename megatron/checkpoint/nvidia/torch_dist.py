"""Reads the weights of GPTs that today's Megatron-LM has saved, with torch.distributed.checkpoint.

    metadata.json    the format, "torch_dist"
    .metadata        a pickle: of each tensor its shape and its chunks, and in which file each of these lies
    __0_0.distcp     chunks, each as torch.save writes it, one after the other
    common.pt        the flags of the run; in newer versions an object among the chunks

Names are those of the whole model, and ours, but for the layers of a homogeneous stack, which are stacked in one tensor
(`decoder.layers.mlp.linear_fc1.weight`), and normalisations that are fused with the linear layer that follows.
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
from megatron.checkpoint.foreign import Assembled, Source, model_without_memory
from megatron.checkpoint.nvidia.run import check_tensors, heads_note, read_config, read_flags, read_state
from megatron.checkpoint.torch_file import StoredTensor, read_torch_file
from megatron.checkpoint.unpickle import Record, unpickle
from megatron.flags import LARGEST, InputError
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer.config import TokenizerConfig

METADATA = ".metadata"
(MOST_LAYERS,) = (f.metadata["flag"].high for f in dataclasses.fields(ModelConfig) if f.name == "num_layers")
STACK = "decoder.layers."
# What stands in the place of ours where normalisations are fused.
FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where in which file it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int
    length: int


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A tensor: its shape, and the blocks that it consists of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, layer: int | None) -> Tensor:
        """All of it; or of the layers that are stacked in it this one.

        Raises:
            InputError: a file is damaged, or chunks are missing or overlap.
        """
        begin = () if layer is None else (layer,)
        values = torch.empty(self.shape[len(begin) :], dtype=self.dtype)
        missing = torch.ones(values.shape, dtype=torch.bool)
        for chunk in self.chunks:
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if begin and not chunk.offsets[0] <= layer < ends[0]:
                continue
            stored = read_torch_file(chunk.path, chunk.begin, chunk.length)
            if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (
                chunk.sizes,
                self.dtype,
            ):
                raise InputError(f"{chunk.path}: a chunk of {self.name} is not what {METADATA} says")
            if begin:
                stored = stored.row(layer - chunk.offsets[0])
            place = tuple(slice(*ends) for ends in zip(chunk.offsets, ends, strict=True))[len(begin) :]
            if not missing[place].all():
                raise InputError(f"{chunk.path}: a chunk of {self.name} overlaps another")
            values[place] = stored.read()
            missing[place] = False
        if missing.any():
            raise InputError(
                f"{self.chunks[0].path.parent}: {missing.sum()} elements of {self.name} are in none of the files"
            )
        return values


def open_torch_dist(folder: Path, tokenizer: TokenizerConfig, given: Mapping[str, Any]) -> Checkpoint:
    """The weights of the checkpoint in `folder`. The other arguments are as for `open_megatron`.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not those of a GPT of ours.
    """
    _check_format(folder)
    tensors, objects = read_metadata(folder)
    optimizer = [name for name in tensors if name.startswith("optimizer.")]
    parts: dict[str, tuple[Chunks, int | None]] = {}
    for name, chunks in tensors.items():
        if name not in optimizer:
            parts |= {ours: (chunks, layer) for ours, layer in our_names(name, chunks.shape)}
    shapes = {name: chunks.shape[layer is not None :] for name, (chunks, layer) in parts.items()}
    if len(shapes.get(WORD_TABLE, ())) != 2:
        raise InputError(f"{folder}: holds no GPT ({METADATA} lacks the table of words)")
    path, args = _flags(folder, objects)
    config = read_config(path, args, _sizes(folder, shapes, args), given)
    padded = shapes[WORD_TABLE][0]
    model = model_without_memory("GPT", config, padded)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    dtypes = {chunks.dtype for chunks, _ in parts.values()}
    check_tensors(folder, shapes, wanted, dtypes)
    bf16 = dtypes == {torch.bfloat16}
    dtype = torch.bfloat16 if bf16 else torch.float32
    sources = {
        name: Source(shapes[name], dtype, functools.partial(chunks.read, layer))
        for name, (chunks, layer) in parts.items()
    }
    state = read_state(
        path, {}, args, task="GPT", model=config, tokenizer=tokenizer, padded=padded, bf16=bf16
    )
    notes = (
        []
        if args.state
        else [f"{folder} does not hold the flags of its run; what no flag says here is the default"]
    )
    notes += heads_note(path, args, config)
    if optimizer:
        notes.append(f"{folder}: the state of its optimizer is not read, its weights alone")
    return Checkpoint(folder, state, None, {"model": Assembled(folder, sources)}, notes=tuple(notes))


def _check_format(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        said = json.loads(path.read_bytes()[: 10**6])
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON") from None
    if not isinstance(said, dict) or said.get("sharded_backend") != "torch_dist":
        raise InputError(f"{path}: is of another format than 'torch_dist', the one that is read")


def read_metadata(folder: Path) -> tuple[dict[str, Chunks], dict[str, Chunk]]:
    """The tensors of a checkpoint, by name, and its other objects.

    Raises:
        InputError: `.metadata` is damaged, or names files out of the folder.
    """
    path = folder / METADATA

    def refuse(*_: Any) -> None:
        raise ValueError("it holds a tensor")

    try:
        with path.open("rb") as file:
            whole = unpickle(file, str(path), tensor=refuse, storage=refuse)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        stored = {_place(index): info for index, info in whole.get("storage_data").items()}
        tensors, objects = {}, {}
        for name, entry in whole.get("state_dict_metadata").items():
            if type(name) is not str:
                raise ValueError("the name of a tensor is not text")
            if entry.kind.endswith(".BytesStorageMetadata"):
                objects[name] = _chunk(folder, (), (), stored[name, None])
                continue
            shape, (dtype, *_) = _numbers(entry.get("size")), entry.get("properties").state
            chunks = [(_numbers(c.get("offsets")), _numbers(c.get("sizes"))) for c in entry.get("chunks")]
            if is_stacked(name) and (not shape or 0 in shape or shape[0] > MOST_LAYERS):
                raise ValueError(f"{name[:80]} is of all layers, but has the shape {shape}")
            for offsets, sizes in chunks:
                if any(o + n > total for o, n, total in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a chunk of {name} lies outside of it")
            found = tuple(_chunk(folder, o, n, stored[name, o]) for o, n in chunks)
            if sum(chunk.length for chunk in found) < math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the chunks of {name} are too small for {shape}")
            tensors[name] = Chunks(name, shape, dtype, found)
        _check_lengths([chunk for tensor in tensors.values() for chunk in tensor.chunks])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({' '.join(str(error).split())[:200]})") from None
    return tensors, objects


def _check_lengths(chunks: list[Chunk]) -> None:
    """Raise `ValueError` if chunks are longer than their files: whoever reads them would be told to take more memory
    than there is."""
    lengths: dict[Path, int] = {}
    for chunk in chunks:
        lengths[chunk.path] = lengths.get(chunk.path, 0) + chunk.length
    for path, length in lengths.items():
        if length > path.stat().st_size:
            raise ValueError(f"the chunks in {path.name} overlap")


def _place(index: Record) -> tuple[str, tuple[int, ...] | None]:
    """The name and offset under which a chunk is found. To hash what is not known to be these can crash Python."""
    name, offset = index.get("fqn"), index.get("offset")
    if type(name) is not str:
        raise ValueError("the name of a chunk is not text")
    return name, None if offset is None else _numbers(offset)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(n) is not int or not 0 <= n <= LARGEST for n in values):
        raise ValueError("a shape or an offset is not one")
    return values


def _chunk(folder: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Record) -> Chunk:
    name, begin, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not re.fullmatch(r"__[0-9]+_[0-9]+\.distcp", name):
        raise ValueError(f"{name[:80]!r} is not the name of one of its files")
    if info.get("transform_descriptors"):
        raise ValueError("chunks are compressed or encrypted")
    path = folder / name
    if not path.is_file() or begin + length > path.stat().st_size:
        raise InputError(f"{path}: is missing, or shorter than {METADATA} says; the checkpoint is not whole")
    return Chunk(offsets, sizes, path, *_numbers((begin, length)))


def is_stacked(name: str) -> bool:
    """Whether a tensor is of all layers."""
    return name.startswith(STACK) and not re.match(r"[0-9]", name[len(STACK) :])


def our_names(name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """Our names of what a tensor holds; each with its place in the stack, if it is one of layers."""
    for theirs, ours in FUSED.items():
        name = name.replace(theirs, ours)
    if not is_stacked(name):
        return [(name, None)]
    return [(f"{STACK}{layer}.{name[len(STACK) :]}", layer) for layer in range(shape[0])]


def _flags(folder: Path, objects: dict[str, Chunk]) -> tuple[Path, Record]:
    """The flags of the run, and the file that they are in; empty if it holds none."""
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
    """Fields of the model's config that its tensors tell."""
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
