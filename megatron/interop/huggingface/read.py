"""Open a local Hugging Face model as a checkpoint: config.json, safetensors, and a tokenizer if there is one."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.formats import why_not
from megatron.checkpoint.tensor_file import DTYPES
from megatron.errors import InputError
from megatron.interop.external import (
    ExternalTensor,
    ExternalTensors,
    list_names,
    meta_model,
    weights_only_state,
)
from megatron.interop.huggingface.family import Modules
from megatron.interop.huggingface.hub_file import HubFile, HubTensor
from megatron.interop.huggingface.moe import BIAS, next_token_layer, unstacked
from megatron.interop.huggingface.settings import Settings, read_settings
from megatron.interop.huggingface.tokenizers import find_tokenizer
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.parallel.parameters import named_parameters
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import read_json

INDEX = "model.safetensors.index.json"
Files = dict[str, HubTensor]


def is_huggingface(folder: Path) -> bool:
    """True if a folder looks like a Hugging Face model."""
    return (folder / "config.json").is_file()


def open_huggingface(folder: Path) -> Checkpoint:
    """Open the model in a folder, without reading its tensors.

    Raises:
        InputError: it is no Hugging Face model, the architecture is not supported, or tensors are missing, unknown or
            of other shapes than in config.json.
    """
    if not is_huggingface(folder):
        raise InputError(f"--load: {folder} {why_not(folder, 'config.json')}")
    settings = read_settings(folder / "config.json")
    files = _find_files(folder)
    if settings.model.num_experts is not None:
        files = unstacked(settings.family, files)
    task = "GPT"
    if settings.family.model_type == "megatron-bert":
        task = "BERT" if "cls.seq_relationship.weight" in files else "BERT --bert-no-binary-head"
    tokenizer = find_tokenizer(folder, settings)
    ids = build_tokenizer(tokenizer).vocab_size if tokenizer.tokenizer_type else settings.rows
    if ids > settings.rows:
        raise InputError(
            f"{folder}: its tokenizer has {ids} ids, more than the {settings.rows} rows (vocab_size) of the model; "
            "replace the tokenizer's files with those of the training run, or remove them"
        )
    sources, notes = _find_sources(folder, files, settings, task, ids)
    if ids < settings.rows:
        notes.append(f"{settings.rows - ids} rows of padding beyond the vocabulary of {ids} ids are dropped")
    bf16 = all(s.dtype == torch.bfloat16 for name, s in sources.items() if not name.endswith(BIAS))
    state = weights_only_state(task, settings.model, tokenizer, vocab_size=ids, bf16=bf16)
    return Checkpoint(
        folder, state, {"model": ExternalTensors(folder, sources)}, notes=(*settings.notes, *notes)
    )


def _find_files(folder: Path) -> Files:
    """Find the tensors in all files, by name."""
    names = ["model.safetensors"]
    listed: set[str] = set()
    # As in transformers, a single file comes before an index.
    if (folder / INDEX).is_file() and not (folder / names[0]).is_file():
        weights = read_json(str(folder / INDEX))
        weights = weights.get("weight_map") if isinstance(weights, dict) else None
        if not isinstance(weights, dict) or not all(
            isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name)
            for name in weights.values()
        ):
            raise InputError(f"{folder / INDEX}: has no 'weight_map' of tensors to safetensors files")
        names, listed = sorted(set(weights.values())), set(weights)
    elif not (folder / names[0]).is_file() and any(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"--load: {folder} holds its weights as a pickle, which can run code and is not read; convert it with "
            f'transformers: AutoModelForCausalLM.from_pretrained("{folder}").save_pretrained("NEW_FOLDER")'
        )
    files: Files = {}
    for name in names:
        file = HubFile(folder / name)
        twice = files.keys() & file.tensors.keys()
        if twice:
            raise InputError(f"{file.path}: {min(twice)} is also in {files[min(twice)].file.path.name}")
        files |= file.contents()
    if listed - files.keys():
        raise InputError(f"{folder / INDEX}: {list_names(listed - files.keys())} in none of the files")
    return files


def _find_sources(
    folder: Path, files: Files, settings: Settings, task: str, vocab_size: int
) -> tuple[dict[str, ExternalTensor], list[str]]:
    """Describe each native tensor by the tensors in the files; also returns notes for the user."""
    _check_sizes(folder, files, settings)
    model = meta_model(task, settings.model, settings.rows)
    matched = _match(folder, files, settings, model)
    used = {theirs for parts, _ in matched.values() for names in parts for theirs in names}
    left = files.keys() - used
    head = f"{settings.family.modules['output_layer'].names[0]}.weight"
    if not settings.model.untie_embeddings_and_output_weights and head in left:
        _check_copy(folder, files, head, matched[WORD_TABLE][0][0][0])
        left -= {head}
    ahead = next_token_layer(left, settings.model.num_layers)
    _check_left(folder, files, settings, left - ahead, task)

    biases = {theirs for name, (parts, _) in matched.items() if name.endswith(BIAS) for theirs in parts[0]}
    found = sorted({files[theirs].dtype for theirs in used - biases})
    if unknown := [dtype for dtype in found if dtype not in DTYPES]:
        raise InputError(
            f"{folder}: has tensors of dtype {', '.join(unknown)}; supported are {', '.join(DTYPES)}"
        )
    dtype = torch.bfloat16 if found == ["BF16"] else torch.float32
    notes = (
        [] if found in (["BF16"], ["F32"]) else [f"tensors of dtype {', '.join(found)} are converted to F32"]
    )
    if ahead:
        notes.append(
            f"{len(ahead)} tensors of layer {settings.model.num_layers}, for multi-token prediction, are not read"
        )
    sources = {}
    for name, p in named_parameters(model):
        shape = (
            p.shard_spec.shape
            if p.shard_spec.num_valid_rows is None
            else (vocab_size, *p.shard_spec.shape[1:])
        )
        parts, modules = matched[name]
        kept = torch.float32 if name.endswith(BIAS) else dtype
        rows = shape[0] // len(parts)
        read = [
            functools.partial(_read, files, names, modules, settings.model, kept, rows) for names in parts
        ]
        sources[name] = ExternalTensor(shape, kept, tuple(read))
    return sources, notes


def _check_sizes(folder: Path, files: Files, settings: Settings) -> None:
    """Raise `InputError` if config.json describes a model larger than the files, before it is built."""
    config = settings.model
    if config.num_layers > len(files):
        raise InputError(
            f"{folder}: config.json has {config.num_layers} layers, but there are {len(files)} tensors in all"
        )
    if (config.num_experts or 0) > len(files):
        raise InputError(
            f"{folder}: config.json has {config.num_experts} experts, but there are {len(files)} tensors in all"
        )
    stored = sum(math.prod(tensor.shape) for tensor in files.values())
    rows = [settings.rows, config.num_attention_heads * config.kv_channels, config.ffn_hidden_size]
    rows.append((config.num_experts or 0) * (config.moe_ffn_hidden_size or 0))
    rows.append(config.moe_shared_expert_intermediate_size or 0)
    if config.position_embedding_type == "learned_absolute":
        rows.append(config.max_position_embeddings)
    if max(rows) * config.hidden_size > stored:
        raise InputError(
            f"{folder}: config.json describes a tensor of {max(rows)} x {config.hidden_size}, but all tensors together "
            f"have {stored} elements"
        )


def _match(
    folder: Path, files: Files, settings: Settings, model: nn.Module
) -> dict[str, tuple[list[list[str]], Modules]]:
    """The names of the tensors for the parts of each native one, and their conversion; checks that they exist, and
    their shapes."""
    family = settings.family
    prefix = "" if any(name.startswith(family.prefix) for name in files) else family.prefix
    matched, missing, wrong = {}, [], []
    for name, p in named_parameters(model):
        parts, modules = family.tensors(name, settings.model)
        parts = [[theirs.removeprefix(prefix) for theirs in names] for names in parts]
        matched[name] = parts, modules
        like = modules.split(p[: len(p) // len(parts)], settings.model)
        for theirs, part in (
            (theirs, part) for names in parts for theirs, part in zip(names, like, strict=True)
        ):
            if theirs not in files:
                missing.append(theirs)
            elif files[theirs].shape != tuple(part.shape):
                wrong.append(f"{theirs} {files[theirs].shape}, not {tuple(part.shape)}")
    if missing:
        raise InputError(f"{folder}: lacks {list_names(missing)}")
    if wrong:
        raise InputError(f"{folder}: config.json contradicts the shapes of {list_names(wrong)}")
    return matched


def _read(
    files: Files, names: list[str], modules: Modules, config: ModelConfig, dtype: torch.dtype, rows: int
) -> Tensor:
    return modules.join([files[theirs].read().to(dtype) for theirs in names], config)[:rows]


def _check_copy(folder: Path, files: Files, head: str, table: str) -> None:
    """Raise `InputError` unless the stored output layer of a tied model equals the word embeddings."""
    if not torch.equal(files[head].read(), files[table].read()):
        raise InputError(
            f"{folder}: tie_word_embeddings is true in config.json, but {head} and {table} differ"
        )


def _check_left(folder: Path, files: Files, settings: Settings, left: set[str], task: str) -> None:
    """Raise `InputError` if a tensor that is not read is part of the model."""
    left = {name for name in left if not re.fullmatch(settings.family.ignored, name)}
    if task == "BERT --bert-no-binary-head":
        for name in [name for name in left if name.endswith("token_type_embeddings.weight")]:
            if files[name].read().any():
                raise InputError(
                    f"{folder}: has token type embeddings that are not zero, but no head for sentence order; only both "
                    "or neither are supported"
                )
            left.discard(name)
    if left:
        raise InputError(
            f"{folder}: has tensors that a supported {settings.family.model_type} lacks: {list_names(left)}"
        )
