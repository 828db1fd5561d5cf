"""Read the checkpoints of Megatron-LM v1 to v3.0: a file of torch.save for each of T x P ranks.

    mp_rank_00/model_optim_rng.pt         tensor-parallel rank 0 (P = 1)
    mp_rank_00_001/model_optim_rng.pt     tensor-parallel rank 0, stage 1

Each file holds the rank's shards of the model and of the optimizer state. Shards are joined when they are read.
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
from megatron.errors import InputError
from megatron.flags import either
from megatron.interop.external import ExternalTensor, ExternalTensors, list_names, meta_model
from megatron.interop.nvidia.chunks import STACK
from megatron.interop.nvidia.names import (
    HEAD_COPY,
    native_name,
    rank_folder,
    rows_by_head,
    shard_dim,
)
from megatron.interop.nvidia.optimizer import optimizer_tensors
from megatron.interop.nvidia.run import (
    check_tensors,
    counts_samples,
    heads_note,
    read_config,
    read_flags,
    read_state,
    schedule_of,
)
from megatron.interop.torch_file import StoredTensor, read_torch_file
from megatron.interop.unpickle import Record, shown_value
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer.config import TokenizerConfig

VERSIONS = (0, 1.0, 2.0, 3.0)
# The second name is used with the distributed optimizer.
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
# Limits that no model exceeds: a small malicious file could describe far more.
MAX_DEPTH, MAX_ENTRIES, MAX_NAME_LENGTH = 8, 10**6, 200
# Flags that change the tensors, and that no version up to 3.0 has.
NOT_READ = (
    "swiglu",
    "group_query_attention",
    "use_rotary_position_embeddings",
    "untie_embeddings_and_output_weights",
)


@dataclasses.dataclass(frozen=True)
class RankFiles:
    """The file and its content for each rank (tensor-parallel rank, stage)."""

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


# One rank's tensors by key, for each model chunk.
Chunks = list[dict[str, StoredTensor]]
# The shards of each tensor on all tensor-parallel ranks, by native name.
Shards = dict[str, list[StoredTensor]]


def open_legacy(
    folder: Path,
    tokenizer: TokenizerConfig,
    given: Mapping[str, Any],
    *,
    release: bool,
    load_optim: bool,
) -> Checkpoint:
    """Open the checkpoint in `folder`; of a release only the weights. See `open_megatron` for the other arguments.

    Raises:
        InputError: a file is missing or damaged, or the tensors are not those of a supported GPT or BERT.
    """
    ranks = read_rank_files(folder)
    path, content = ranks.first
    args = read_flags(path, content)
    chunks = {rank: model_chunks(ranks.paths[rank], whole) for rank, whole in ranks.contents.items()}
    bert = any(key.startswith("lm_head.") for rank in chunks.values() for chunk in rank for key in chunk)
    stack = "encoder" if bert else "decoder"
    shards, copies = by_native_name(ranks, chunks, stack)
    config = read_config(path, args, _sizes(shards, stack), given, NOT_READ)
    if config.num_attention_heads % ranks.tensor:
        raise InputError(
            f"--num-attention-heads: {config.num_attention_heads} heads cannot be divided among the {ranks.tensor} "
            f"tensor-parallel ranks in {folder}"
        )
    binary_head, padded = "binary_head.weight" in shards, whole_shape(WORD_TABLE, shards[WORD_TABLE])[0]
    task = "GPT" if not bert else "BERT" if binary_head else "BERT --bert-no-binary-head"
    model = meta_model(task, config, padded)
    check_tensors(
        folder,
        {name: whole_shape(name, tensors) for name, tensors in shards.items()},
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {shard.dtype for tensors in shards.values() for shard in tensors},
    )
    join = functools.partial(joined, config=config, version=_version(path, content))
    weights = {name: join(name, tensors) for name, tensors in shards.items()}
    if copies:
        weights[WORD_TABLE] = checked_copy(folder, weights[WORD_TABLE], shards[WORD_TABLE], copies)
    has_progress = not release and counts_samples(content, args)
    state = read_state(
        path,
        content if has_progress else {},
        args,
        task=task,
        model=config,
        tokenizer=tokenizer,
        padded=padded,
        bf16=shards[WORD_TABLE][0].dtype == torch.bfloat16,
    )
    tensors = {"model": ExternalTensors(folder, weights)}
    if load_optim and has_progress and "optimizer" in content:
        by_kind, state["optimizer_steps"] = optimizer_parts(ranks, chunks, stack)
        named = {f"{kind}/{name}": (name, p) for kind, found in by_kind.items() for name, p in found.items()}
        tensors["optimizer"] = ExternalTensors(folder, {name: join(*shard) for name, shard in named.items()})
    notes = [*_notes(ranks, args, shards), *heads_note(path, args, config)]
    if schedule_of(content) and not release and not has_progress:
        notes.append(f"{path} counts iterations in place of samples, as v1 did; only its weights are read")
    return Checkpoint(folder, state, tensors, notes=tuple(notes))


def _version(path: Path, content: dict[str, Any]) -> float:
    version = content.get("checkpoint_version", 0)
    if version not in VERSIONS:
        raise InputError(
            f"{path}: checkpoint_version is {shown_value(version)}; supported are {either(VERSIONS)}"
        )
    return version


def _notes(ranks: RankFiles, args: Record, shards: Shards) -> Iterator[str]:
    path = ranks.first[0]
    if not args.state:
        yield f"{path} lacks the flags of its run; the tanh form of GELU is assumed (--bias-gelu-fusion)"
    if shards[WORD_TABLE][0].dtype == torch.float16:
        yield f"{ranks.folder} is in fp16; its weights are converted to fp32 without loss"
    if path.name == "model_rng.pt":
        yield f"{ranks.folder} has a distributed optimizer's state (--use-distributed-optimizer), which is not read"


def read_rank_files(folder: Path) -> RankFiles:
    """Read the files of all ranks, without their tensors."""
    paths: dict[tuple[int, int], Path] = {}
    # Folders with only shards of the distributed optimizer have the same names as those of stages.
    for path in sorted(path for name in MODEL_FILES for path in folder.glob(f"mp_rank_*/{name}")):
        match = re.fullmatch(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3,4}))?(?:_([0-9]{3,4}))?", path.parent.name)
        if match and match[3]:  # of an expert-parallel rank
            raise _unsupported(folder)
        if match:
            paths.setdefault((int(match[1]), int(match[2] or 0)), path)
    if not paths:
        raise InputError(f"{folder}: holds no mp_rank_00/{MODEL_FILES[0]}, the file of rank 0")
    ranks = RankFiles(folder, paths, {})
    missing = [(t, p) for p in range(ranks.stages) for t in range(ranks.tensor) if (t, p) not in paths]
    if missing:
        named = ", ".join(f"{rank_folder(*rank, ranks.stages)}/{MODEL_FILES[0]}" for rank in missing[:10])
        raise InputError(
            f"{folder}: was written by {ranks.tensor} x {ranks.stages} ranks (tensor x pipeline), but lacks {named}"
        )
    for rank, path in paths.items():
        content = read_torch_file(path)
        if not isinstance(content, dict) or not ({"model", "model0"} & content.keys()):
            raise InputError(f"{path}: is not a Megatron-LM checkpoint (it holds no 'model')")
        model = content.get("model", content.get("model0"))
        if isinstance(model, dict) and any(str(key).startswith(STACK) for key in model):
            raise _unsupported(folder)
        ranks.contents[rank] = content
    args = read_flags(*ranks.first)
    for name, size in (("tensor", ranks.tensor), ("pipeline", ranks.stages)):
        said = args.get(f"{name}_model_parallel_size", size)
        if said != size:
            raise InputError(
                f"{folder}: holds files of {ranks.tensor} x {ranks.stages} ranks (tensor x pipeline), but was "
                f"written with {name}_model_parallel_size {said}; some are missing"
            )
    return ranks


def _unsupported(folder: Path) -> InputError:
    """The error for files of each rank that have the names of today's `torch_dist`."""
    return InputError(
        f"{folder}: was saved by current Megatron-LM with --ckpt-format torch, which is not supported; save it there "
        "with --ckpt-format torch_dist"
    )


def model_chunks(path: Path, content: dict[str, Any]) -> Chunks:
    """The tensors of a rank, for each model chunk; interleaved schedules have several."""
    if "model" in content:
        return [_flatten(path, content["model"])]
    count = sum(1 for key in content if type(key) is str and re.fullmatch(r"model[0-9]+", key))
    return [_flatten(path, content.get(f"model{i}")) for i in range(count)]


def _flatten(path: Path, model: Any) -> dict[str, StoredTensor]:
    found = {}
    for visited, (name, value) in enumerate(_entries("", model, 0)):
        if visited > MAX_ENTRIES or len(name) > MAX_NAME_LENGTH:
            raise InputError(f"{path}: has too many tensors, or too long a name ({name[:80]})")
        if isinstance(value, StoredTensor):
            found[name] = value
        elif not isinstance(value, dict):
            raise InputError(f"{path}: {name or 'model'} is neither a tensor nor a dict of tensors")
    return found


def _entries(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield a value and, if it is a dict, everything in it; None in place of a dict that is nested too deep."""
    if not isinstance(value, dict):
        yield name, value
    elif depth > MAX_DEPTH or any(type(key) is not str for key in value):
        yield name, None
    else:
        yield name, value
        for key, nested in value.items():
            yield from _entries(f"{name}.{key}" if name else key, nested, depth + 1)


def by_native_name(
    ranks: RankFiles, chunks: dict[tuple[int, int], Chunks], stack: str
) -> tuple[Shards, list[StoredTensor]]:
    """The shards of every tensor of the model, and those of the last stage's copy of the word embeddings.

    Raises:
        InputError: a rank has unknown tensors, or lacks some that others have.
    """
    numbers = {len(shards) for shards in chunks.values()}
    layers = {
        1 + max([int(n) for key in shard for n in re.findall(r"\.layers\.([0-9]{1,6})\.", key)], default=-1)
        for shards in chunks.values()
        for shard in shards
    }
    if len(numbers) > 1 or len(layers) > 1:
        raise InputError(f"{ranks.folder}: its ranks hold different numbers of layers or of model chunks")
    (each,) = layers
    found: dict[str, dict[int, StoredTensor]] = {}
    unknown = []
    for (t, p), shards in sorted(chunks.items()):
        for v, shard in enumerate(shards):
            for key, tensor in shard.items():
                name = key if key == HEAD_COPY else native_name(key, stack, (v * ranks.stages + p) * each)
                if name is None or t in found.get(name, {}):
                    unknown.append(f"{key} in {ranks.paths[t, p].parent.name}")
                else:
                    found.setdefault(name, {})[t] = tensor
    if unknown:
        raise InputError(f"{ranks.folder}: has unknown or duplicate tensors: {list_names(unknown)}")
    uneven = [name for name, shards in found.items() if len({shard.shape for shard in shards.values()}) > 1]
    uneven += [name for name, shards in found.items() if len(shards) != ranks.tensor]
    if uneven:
        raise InputError(
            f"{ranks.folder}: the tensor-parallel ranks hold unequal shards of {list_names(uneven)}"
        )
    whole = {name: [shards[t] for t in range(ranks.tensor)] for name, shards in found.items()}
    if WORD_TABLE not in whole or len(whole[WORD_TABLE][0].shape) != 2:
        raise InputError(f"{ranks.folder}: the first stage lacks the word embeddings")
    return whole, whole.pop(HEAD_COPY, [])


def whole_shape(name: str, shards: list[StoredTensor]) -> tuple[int, ...]:
    """The shape of a whole tensor, from the shards on the tensor-parallel ranks."""
    shape, dim = list(shards[0].shape), shard_dim(name)
    if dim is not None and dim < len(shape):
        shape[dim] *= len(shards)
    return tuple(shape)


def _sizes(shards: Shards, stack: str) -> dict[str, int]:
    """Fields of the model's config that follow from its tensors."""
    layers = {name.split(".")[2] for name in shards if name.startswith(f"{stack}.layers.")}
    wanted = {
        "hidden_size": (WORD_TABLE, -1),
        "max_position_embeddings": ("embedding.position_embeddings.weight", 0),
        "ffn_hidden_size": (f"{stack}.layers.0.mlp.linear_fc1.weight", 0),
    }
    shapes = {
        field: (whole_shape(name, shards[name]), dim)
        for field, (name, dim) in wanted.items()
        if name in shards
    }
    return {"num_layers": len(layers)} | {
        field: shape[dim] for field, (shape, dim) in shapes.items() if shape
    }


def checked_copy(
    folder: Path, table: ExternalTensor, shards: list[StoredTensor], copies: list[StoredTensor]
) -> ExternalTensor:
    """The word embeddings; reading them raises `InputError` unless the first and the last stage hold equal ones."""

    def read() -> Tensor:
        for t, (shard, copy) in enumerate(zip(shards, copies, strict=True)):
            if not torch.equal(shard.read(), copy.read()):
                raise InputError(
                    f"{folder}: the last stage's copy of the word embeddings differs from the first stage's "
                    f"(tensor-parallel rank {t}); the files are not from one model"
                )
        return table.parts[0]()

    return dataclasses.replace(table, parts=(read,))


def optimizer_parts(
    ranks: RankFiles, chunks: dict[tuple[int, int], Chunks], stack: str
) -> tuple[dict[str, Shards], int]:
    """The shards of the optimizer's state tensors, by kind; and the number of optimizer steps."""
    found: dict[str, dict[tuple[int, int], Chunks]] = {}
    for rank, path in ranks.paths.items():
        content = ranks.contents[rank]
        by_kind, steps = optimizer_tensors(
            path, content.get("optimizer"), chunks[rank], content.get("iteration", 0)
        )
        for kind, tensors in by_kind.items():
            found.setdefault(kind, {})[rank] = tensors
    return {kind: by_native_name(ranks, tensors, stack)[0] for kind, tensors in found.items()}, steps


def joined(name: str, shards: list[StoredTensor], config: ModelConfig, version: float) -> ExternalTensor:
    """A whole tensor, joined from its shards. fp16 becomes fp32, without loss."""
    dtype = torch.bfloat16 if shards[0].dtype == torch.bfloat16 else torch.float32
    read = functools.partial(_join, name, shards, config, version)
    return ExternalTensor(whole_shape(name, shards), dtype, (read,))


def _join(name: str, shards: list[StoredTensor], config: ModelConfig, version: float) -> Tensor:
    dim = shard_dim(name)
    if dim is None:
        return shards[0].read()
    tensors = [shard.read() for shard in shards]
    if ".linear_qkv." in name:
        heads = config.num_attention_heads // len(shards)
        tensors = [rows_by_head(tensor, version, heads) for tensor in tensors]
    return torch.cat(tensors, dim)
