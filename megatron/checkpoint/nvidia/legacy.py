"""Reads the checkpoints of Megatron-LM v1 to v3.0: a file of torch.save for each process of T x P.

    mp_rank_00/model_optim_rng.pt         of tensor-parallel process 0 (P = 1)
    mp_rank_00_001/model_optim_rng.pt     of tensor-parallel process 0, stage 1

Each holds the process's part of the model and of the optimizer's state. Parts are put together when they are read.
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

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.foreign import Assembled, Source, model_without_memory, shown
from megatron.checkpoint.nvidia.names import (
    HEAD_COPY,
    cut_dim,
    our_name,
    rank_folder,
    rows_by_head,
)
from megatron.checkpoint.nvidia.optimizer import optimizer_tensors
from megatron.checkpoint.nvidia.run import (
    check_tensors,
    counts_samples,
    heads_note,
    read_config,
    read_flags,
    read_state,
    schedule_of,
)
from megatron.checkpoint.torch_file import StoredTensor, read_torch_file
from megatron.checkpoint.unpickle import Record, shown_value
from megatron.flags import InputError, either
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer.config import TokenizerConfig

VERSIONS = (0, 1.0, 2.0, 3.0)
# The second one with the distributed optimizer.
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
# No model has dicts nested deeper, more tensors in a file, or longer names for them; a small file can ask for far more.
MOST_NESTED, MOST_ENTRIES, LONGEST_NAME = 8, 10**6, 200
# Flags that change what the tensors are, which the files of no version up to 3.0 have.
NOT_READ = (
    "swiglu",
    "group_query_attention",
    "use_rotary_position_embeddings",
    "untie_embeddings_and_output_weights",
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What the processes have written: of each pair (tensor-parallel process, stage) its file and its content."""

    folder: Path
    paths: dict[tuple[int, int], Path]
    contents: dict[tuple[int, int], dict[str, Any]]

    @property
    def first(self) -> tuple[Path, dict[str, Any]]:
        return self.paths[0, 0], self.contents[0, 0]

    @property
    def tensor(self) -> int:
        return 1 + max(t for t, _ in self.paths)

    @property
    def stages(self) -> int:
        return 1 + max(p for _, p in self.paths)


# Of one process, by chunk of its layers, the tensors by their keys.
Chunks = list[dict[str, StoredTensor]]
# By our names, the parts of the tensor-parallel processes.
Parts = dict[str, list[StoredTensor]]


def open_legacy(
    folder: Path,
    tokenizer: TokenizerConfig,
    given: Mapping[str, Any],
    *,
    release: bool,
    load_optim: bool,
) -> Checkpoint:
    """The checkpoint in `folder`; its weights alone if it is a release. The other arguments are as for
    `open_megatron`.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not those of a GPT or BERT of ours.
    """
    grid = read_grid(folder)
    path, content = grid.first
    args = read_flags(path, content)
    chunks = {rank: model_chunks(grid.paths[rank], whole) for rank, whole in grid.contents.items()}
    bert = any(key.startswith("lm_head.") for parts in chunks.values() for part in parts for key in part)
    stack = "encoder" if bert else "decoder"
    parts, copies = by_our_names(grid, chunks, stack)
    config = read_config(path, args, _sizes(parts, stack), given, NOT_READ)
    if config.num_attention_heads % grid.tensor:
        raise InputError(
            f"--num-attention-heads: {config.num_attention_heads} heads cannot be divided among the {grid.tensor} "
            f"tensor-parallel processes whose files {folder} holds"
        )
    binary_head, padded = "binary_head.weight" in parts, whole_shape(WORD_TABLE, parts[WORD_TABLE])[0]
    task = "GPT" if not bert else "BERT" if binary_head else "BERT --bert-no-binary-head"
    model = model_without_memory(task, config, padded)
    check_tensors(
        folder,
        {name: whole_shape(name, tensors) for name, tensors in parts.items()},
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {part.dtype for tensors in parts.values() for part in tensors},
    )
    join = functools.partial(source, config=config, version=_version(path, content))
    weights = {name: join(name, tensors) for name, tensors in parts.items()}
    if copies:
        weights[WORD_TABLE] = checked_copy(folder, weights[WORD_TABLE], parts[WORD_TABLE], copies)
    goes_on = not release and counts_samples(content, args)
    state = read_state(
        path,
        content if goes_on else {},
        args,
        task=task,
        model=config,
        tokenizer=tokenizer,
        padded=padded,
        bf16=parts[WORD_TABLE][0].dtype == torch.bfloat16,
    )
    foreign = {"model": Assembled(folder, weights)}
    if load_optim and goes_on and "optimizer" in content:
        by_kind, state["optimizer_steps"] = optimizer_parts(grid, chunks, stack)
        named = {f"{kind}/{name}": (name, p) for kind, found in by_kind.items() for name, p in found.items()}
        foreign["optimizer"] = Assembled(folder, {name: join(*part) for name, part in named.items()})
    notes = [*_notes(grid, args, parts), *heads_note(path, args, config)]
    if schedule_of(content) and not release and not goes_on:
        notes.append(f"{path} counts iterations, as v1 did, and not samples; its weights alone are read")
    return Checkpoint(folder, state, None, foreign, notes=tuple(notes))


def _version(path: Path, content: dict[str, Any]) -> float:
    version = content.get("checkpoint_version", 0)
    if version not in VERSIONS:
        raise InputError(
            f"{path}: checkpoint_version is {shown_value(version)}; known are {either(VERSIONS)}"
        )
    return version


def _notes(grid: Grid, args: Record, parts: Parts) -> Iterator[str]:
    path = grid.first[0]
    if not args.state:
        yield f"{path} does not hold the flags of its run; GELU is taken to be in its tanh form (--bias-gelu-fusion)"
    if parts[WORD_TABLE][0].dtype == torch.float16:
        yield f"{grid.folder} is in fp16; its weights become fp32, which holds them without loss"
    if path.name == "model_rng.pt":
        yield f"{grid.folder} keeps its optimizer apart (--use-distributed-optimizer), where it is not read"


def read_grid(folder: Path) -> Grid:
    """The files of all processes, their tensors not yet."""
    paths: dict[tuple[int, int], Path] = {}
    # Folders of the distributed optimizer, with its parts alone, are named as those of stages are.
    for path in sorted(path for name in MODEL_FILES for path in folder.glob(f"mp_rank_*/{name}")):
        match = re.fullmatch(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3,4}))?", path.parent.name)
        if match:
            paths.setdefault((int(match[1]), int(match[2] or 0)), path)
    if not paths:
        raise InputError(f"{folder}: holds no mp_rank_00/{MODEL_FILES[0]}, the first process's file")
    grid = Grid(folder, paths, {})
    missing = [(t, p) for p in range(grid.stages) for t in range(grid.tensor) if (t, p) not in paths]
    if missing:
        named = ", ".join(f"{rank_folder(*rank, grid.stages)}/{MODEL_FILES[0]}" for rank in missing[:10])
        raise InputError(
            f"{folder}: is of {grid.tensor} x {grid.stages} processes (tensor x pipeline), but lacks {named}"
        )
    for rank, path in paths.items():
        content = read_torch_file(path)
        if not isinstance(content, dict) or not ({"model", "model0"} & content.keys()):
            raise InputError(f"{path}: is not a checkpoint of Megatron-LM (it holds no 'model')")
        grid.contents[rank] = content
    args = read_flags(*grid.first)
    for name, size in (("tensor", grid.tensor), ("pipeline", grid.stages)):
        said = args.get(f"{name}_model_parallel_size", size)
        if said != size:
            raise InputError(
                f"{folder}: holds the files of {grid.tensor} x {grid.stages} processes (tensor x pipeline), but was "
                f"written with {name}_model_parallel_size {said}; some are missing"
            )
    return grid


def model_chunks(path: Path, content: dict[str, Any]) -> Chunks:
    """The tensors of a process, by chunk of its layers, of which interleaved schedules have several."""
    if "model" in content:
        return [_flatten(path, content["model"])]
    count = sum(1 for key in content if type(key) is str and re.fullmatch(r"model[0-9]+", key))
    return [_flatten(path, content.get(f"model{i}")) for i in range(count)]


def _flatten(path: Path, model: Any) -> dict[str, StoredTensor]:
    found = {}
    for visited, (name, value) in enumerate(_entries("", model, 0)):
        if visited > MOST_ENTRIES or len(name) > LONGEST_NAME:
            raise InputError(f"{path}: has more tensors than a model, or longer names ({name[:80]})")
        if isinstance(value, StoredTensor):
            found[name] = value
        elif not isinstance(value, dict):
            raise InputError(f"{path}: {name or 'model'} is neither a tensor nor a dict of some")
    return found


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value and, if it is a dict, all that is in it; what is nested too deep ends as None."""
    if not isinstance(value, dict):
        yield name, value
    elif depth > MOST_NESTED or any(type(key) is not str for key in value):
        yield name, None
    else:
        yield name, value
        for key, nested in value.items():
            yield from _entries(f"{name}.{key}" if name else key, nested, depth + 1)


def by_our_names(
    grid: Grid, chunks: dict[tuple[int, int], Chunks], stack: str
) -> tuple[Parts, list[StoredTensor]]:
    """The parts of every tensor of the whole model; and those of the last stage's copy of the table of words.

    Raises:
        InputError: a process has tensors that we have not, or lacks some that others have.
    """
    numbers = {len(parts) for parts in chunks.values()}
    layers = {
        1 + max([int(n) for key in part for n in re.findall(r"\.layers\.([0-9]{1,6})\.", key)], default=-1)
        for parts in chunks.values()
        for part in parts
    }
    if len(numbers) > 1 or len(layers) > 1:
        raise InputError(
            f"{grid.folder}: its processes do not hold as many layers each, or not as many chunks of them"
        )
    (each,) = layers
    found: dict[str, dict[int, StoredTensor]] = {}
    unknown = []
    for (t, p), parts in sorted(chunks.items()):
        for v, part in enumerate(parts):
            for key, tensor in part.items():
                name = key if key == HEAD_COPY else our_name(key, stack, (v * grid.stages + p) * each)
                if name is None or t in found.get(name, {}):
                    unknown.append(f"{key} in {grid.paths[t, p].parent.name}")
                else:
                    found.setdefault(name, {})[t] = tensor
    if unknown:
        raise InputError(f"{grid.folder}: has what a GPT or BERT has not, or not twice, {shown(unknown)}")
    uneven = [name for name, parts in found.items() if len({part.shape for part in parts.values()}) > 1]
    uneven += [name for name, parts in found.items() if len(parts) != grid.tensor]
    if uneven:
        raise InputError(
            f"{grid.folder}: the tensor-parallel processes do not hold equal parts of {shown(uneven)}"
        )
    whole = {name: [parts[t] for t in range(grid.tensor)] for name, parts in found.items()}
    if WORD_TABLE not in whole or len(whole[WORD_TABLE][0].shape) != 2:
        raise InputError(f"{grid.folder}: the first stage lacks the table of words")
    return whole, whole.pop(HEAD_COPY, [])


def whole_shape(name: str, parts: list[StoredTensor]) -> tuple[int, ...]:
    """The shape of one of our tensors, from the parts of the tensor-parallel processes."""
    shape, dim = list(parts[0].shape), cut_dim(name)
    if dim is not None and dim < len(shape):
        shape[dim] *= len(parts)
    return tuple(shape)


def _sizes(parts: Parts, stack: str) -> dict[str, int]:
    """The sizes of a model that its tensors tell."""
    layers = {name.split(".")[2] for name in parts if name.startswith(f"{stack}.layers.")}
    wanted = {
        "hidden_size": (WORD_TABLE, -1),
        "max_position_embeddings": ("embedding.position_embeddings.weight", 0),
        "ffn_hidden_size": (f"{stack}.layers.0.mlp.linear_fc1.weight", 0),
    }
    shapes = {
        field: (whole_shape(name, parts[name]), dim) for field, (name, dim) in wanted.items() if name in parts
    }
    return {"num_layers": len(layers)} | {
        field: shape[dim] for field, (shape, dim) in shapes.items() if shape
    }


def checked_copy(
    folder: Path, table: Source, parts: list[StoredTensor], copies: list[StoredTensor]
) -> Source:
    """The table of words, for whose reading the parts of the first stage must equal those of the last."""

    def read() -> Tensor:
        for t, (part, copy) in enumerate(zip(parts, copies, strict=True)):
            if not torch.equal(part.read(), copy.read()):
                raise InputError(
                    f"{folder}: the last stage's copy of the table of words is not the first stage's "
                    f"(tensor-parallel process {t}); the checkpoint is not of one model"
                )
        return table.read()

    return dataclasses.replace(table, read=read)


def optimizer_parts(
    grid: Grid, chunks: dict[tuple[int, int], Chunks], stack: str
) -> tuple[dict[str, Parts], int]:
    """By kind, the parts of the tensors of the optimizer; and the steps that it has taken."""
    found: dict[str, dict[tuple[int, int], Chunks]] = {}
    for rank, path in grid.paths.items():
        by_kind, steps = optimizer_tensors(path, grid.contents[rank].get("optimizer"), chunks[rank])
        for kind, tensors in by_kind.items():
            found.setdefault(kind, {})[rank] = tensors
    return {kind: by_our_names(grid, tensors, stack)[0] for kind, tensors in found.items()}, steps


def source(name: str, parts: list[StoredTensor], config: ModelConfig, version: float) -> Source:
    """A whole tensor from its parts. What NVIDIA has in fp16 is fp32 here, which holds it without loss."""
    dtype = torch.bfloat16 if parts[0].dtype == torch.bfloat16 else torch.float32
    return Source(whole_shape(name, parts), dtype, functools.partial(_join, name, parts, config, version))


def _join(name: str, parts: list[StoredTensor], config: ModelConfig, version: float) -> Tensor:
    dim = cut_dim(name)
    if dim is None:
        return parts[0].read()
    tensors = [part.read() for part in parts]
    if ".linear_qkv." in name:
        heads = config.num_attention_heads // len(parts)
        tensors = [rows_by_head(tensor, version, heads) for tensor in tensors]
    return torch.cat(tensors, dim)
