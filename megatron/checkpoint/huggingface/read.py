"""A local folder of Hugging Face's as a checkpoint: config.json, safetensors, and a tokenizer if it has one."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.foreign import Assembled, Source, model_without_memory, shown, weights_state
from megatron.checkpoint.huggingface.families import Modules
from megatron.checkpoint.huggingface.settings import Settings, read_settings
from megatron.checkpoint.tensor_file import DTYPES, TensorFile
from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.model.vocabulary import WORD_TABLE
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import read_json
from megatron.tokenizer.config import TokenizerConfig

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.json")
Files = dict[str, TensorFile]  # by the name of a tensor, the file that holds it


def is_huggingface(folder: Path) -> bool:
    """Whether a folder looks like one of Hugging Face's."""
    return (folder / "config.json").is_file()


def open_huggingface(folder: Path) -> Checkpoint:
    """The model in a folder, its tensors not read yet but all accounted for.

    Raises:
        InputError: it is no such folder, this program has no such model, or tensors are missing, left over or of other
            shapes than config.json asks for.
    """
    if not is_huggingface(folder):
        raise InputError(f"--load: {folder} {why_not(folder, 'config.json')}")
    settings = read_settings(folder / "config.json")
    files = _find_files(folder)
    task = "GPT"
    if settings.family.model_type == "megatron-bert":
        task = "BERT" if "cls.seq_relationship.weight" in files else "BERT --bert-no-binary-head"
    tokenizer = _find_tokenizer(folder, settings)
    ids = build_tokenizer(tokenizer).vocab_size if tokenizer.tokenizer_type else settings.rows
    if ids > settings.rows:
        raise InputError(
            f"{folder}: its tokenizer has {ids} ids, more than the {settings.rows} rows (vocab_size) of the model; put "
            "the files of the tokenizer there that it was trained with, or none"
        )
    sources, notes = _find_sources(folder, files, settings, task, ids)
    if ids < settings.rows:
        notes.append(f"{settings.rows - ids} rows pad the vocabulary of {ids} ids; they are left out")
    bf16 = all(source.dtype == torch.bfloat16 for source in sources.values())
    state = weights_state(task, settings.model, tokenizer, vocab_size=ids, bf16=bf16)
    return Checkpoint(
        folder, state, None, {"model": Assembled(folder, sources)}, notes=(*settings.notes, *notes)
    )


def why_not(folder: Path, wanted: str) -> str:
    """What is wrong with a folder that does not hold a file that it should."""
    if folder.is_file():
        return "is a file; unpack it if it is an archive, and name the folder"
    if not folder.is_dir():
        hub = "; names of models on the Hugging Face hub are not looked up: download it first"
        return "is not a folder" + (hub if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) else "")
    return f"holds no {wanted}"


def _find_files(folder: Path) -> Files:
    """The files of all tensors."""
    names = ["model.safetensors"]
    listed: set[str] = set()
    if (folder / INDEX).is_file():
        weights = read_json(str(folder / INDEX))
        weights = weights.get("weight_map") if isinstance(weights, dict) else None
        if not isinstance(weights, dict) or not all(
            isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name)
            for name in weights.values()
        ):
            raise InputError(f"{folder / INDEX}: has no 'weight_map' of tensors to safetensors files")
        names, listed = sorted(set(weights.values())), set(weights)
    elif not (folder / "model.safetensors").is_file() and any(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"--load: {folder} holds its weights as a pickle, which can run code and is not read; convert it by "
            f'transformers: AutoModelForCausalLM.from_pretrained("{folder}").save_pretrained("NEW_FOLDER")'
        )
    files: Files = {}
    for name in names:
        file = TensorFile(folder / name)
        twice = files.keys() & file.tensors.keys()
        if twice:
            raise InputError(f"{file.path}: {min(twice)} is also in {files[min(twice)].path.name}")
        files |= dict.fromkeys(file.tensors, file)
    if listed - files.keys():
        raise InputError(f"{folder / INDEX}: {shown(listed - files.keys())} in none of the files")
    return files


def _find_sources(
    folder: Path, files: Files, settings: Settings, task: str, vocab_size: int
) -> tuple[dict[str, Source], list[str]]:
    """Where each tensor of ours comes from, and what is to be said of it."""
    _check_sizes(folder, files, settings)
    model = model_without_memory(task, settings.model, settings.rows)
    wanted = _match(folder, files, settings, model)
    used = {part for theirs, _ in wanted.values() for part in theirs}
    left = files.keys() - used
    if not settings.model.untie_embeddings_and_output_weights and HEAD in left:
        _check_copy(folder, files, wanted[WORD_TABLE][0][0])
        left -= {HEAD}
    _check_left(folder, files, settings, left, task)

    found = sorted({files[part].tensors[part].dtype for part in used})
    if unknown := [dtype for dtype in found if dtype not in DTYPES]:
        raise InputError(
            f"{folder}: has tensors of {', '.join(unknown)}; this program reads those of {', '.join(DTYPES)}"
        )
    dtype = torch.bfloat16 if found == ["BF16"] else torch.float32
    notes = [] if found in (["BF16"], ["F32"]) else [f"tensors of {', '.join(found)} become F32"]
    sources = {}
    for name, p in model.named_parameters():
        shape = p.place.shape if p.place.real is None else (vocab_size, *p.place.shape[1:])
        read = functools.partial(_read, files, *wanted[name], settings.model, dtype, shape[0])
        sources[name] = Source(shape, dtype, read)
    return sources, notes


def _check_sizes(folder: Path, files: Files, settings: Settings) -> None:
    """Refuse what is larger than all that is stored, before a model is made whose sizes may be beyond any memory."""
    config = settings.model
    if config.num_layers > len(files):
        raise InputError(
            f"{folder}: config.json has {config.num_layers} layers, but there are {len(files)} tensors in all"
        )
    stored = sum(math.prod(file.tensors[name].shape) for name, file in files.items())
    rows = [settings.rows, config.num_attention_heads * config.kv_channels, config.ffn_hidden_size]
    if config.position_embedding_type == "learned_absolute":
        rows.append(config.max_position_embeddings)
    if max(rows) * config.hidden_size > stored:
        raise InputError(
            f"{folder}: config.json asks for a tensor of {max(rows)} x {config.hidden_size}, but all tensors together "
            f"have {stored} elements"
        )


def _match(
    folder: Path, files: Files, settings: Settings, model: nn.Module
) -> dict[str, tuple[list[str], Modules]]:
    """Names of the tensors that each of ours is made of, and how; all are there, and of the right shapes."""
    family = settings.family
    prefix = "" if any(name.startswith(family.prefix) for name in files) else family.prefix
    wanted, missing, wrong = {}, [], []
    for name, p in model.named_parameters():
        theirs, modules = family.place(name)
        theirs = [part.removeprefix(prefix) for part in theirs]
        wanted[name] = theirs, modules
        for part, like in zip(theirs, modules.split(p, settings.model), strict=True):
            if part not in files:
                missing.append(part)
            elif (shape := files[part].tensors[part].shape) != tuple(like.shape):
                wrong.append(f"{part} {shape} in place of {tuple(like.shape)}")
    if missing:
        raise InputError(f"{folder}: lacks {shown(missing)}")
    if wrong:
        raise InputError(f"{folder}: config.json asks for other sizes than those of {shown(wrong)}")
    return wanted


def _read(
    files: Files, theirs: list[str], modules: Modules, config: ModelConfig, dtype: torch.dtype, rows: int
) -> Tensor:
    return modules.join([files[name].read(name).to(dtype) for name in theirs], config)[:rows]


def _check_copy(folder: Path, files: Files, table: str) -> None:
    """Make sure that the output layer of a tied model, if it is stored, is the table of words."""
    if not torch.equal(files[HEAD].read(HEAD), files[table].read(table)):
        raise InputError(
            f"{folder}: config.json says that output layer and word embeddings are one (tie_word_embeddings), but "
            f"{HEAD} and {table} differ"
        )


def _check_left(folder: Path, files: Files, settings: Settings, left: set[str], task: str) -> None:
    """Make sure that the tensors that are not read hold nothing of the model."""
    left = {name for name in left if not re.fullmatch(settings.family.ignored, name)}
    if task == "BERT --bert-no-binary-head":
        for name in [name for name in left if name.endswith("token_type_embeddings.weight")]:
            if files[name].read(name).any():
                raise InputError(
                    f"{folder}: has token types (embeddings that are not 0) but no head for the order of sentences; "
                    "this program has both or neither"
                )
            left.discard(name)
    if left:
        raise InputError(
            f"{folder}: has what a {settings.family.model_type} of this program has not, {shown(left)}"
        )


def _find_tokenizer(folder: Path, settings: Settings) -> TokenizerConfig:
    """The tokenizer whose files lie in a folder; without a type if none do."""
    family = settings.family
    path = {name: str(folder.absolute() / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    if family.model_type == "gpt2" and {"vocab.json", "merges.txt"} <= path.keys():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=path["vocab.json"], merge_file=path["merges.txt"]
        )
    if family.model_type == "megatron-bert" and "vocab.txt" in path:
        # Imported here, so that only such a folder needs the library of this tokenizer.
        from megatron.tokenizer.bert import ADDED, read_vocab

        file = folder / "tokenizer_config.json"
        lowercase = (read_json(str(file)) if file.is_file() else {}).get("do_lower_case", True)
        lines = len(read_vocab(path["vocab.txt"]))
        return TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase" if lowercase else "BertWordPieceCase",
            vocab_file=path["vocab.txt"],
            # A model not of Megatron-LM's has no rows for the two ids that are added to the lines.
            vocab_size=lines if settings.rows < lines + len(ADDED) else None,
        )
    if "tokenizer.json" in path:
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path["tokenizer.json"])
    models = sorted(folder.absolute().glob("*.model"))
    if models:
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(models[0]))
    return TokenizerConfig()
