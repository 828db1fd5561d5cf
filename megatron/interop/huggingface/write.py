"""Write a checkpoint as a folder for `from_pretrained` of transformers, with one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.pieces import TensorSource
from megatron.checkpoint.storage import check_room, sync
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.files import read_file
from megatron.interop.convert import SHARD_BYTES, check_is_empty
from megatron.interop.external import meta_model, rows_of_parts
from megatron.interop.huggingface.families import FAMILIES
from megatron.interop.huggingface.family import Family, Modules
from megatron.interop.huggingface.moe import LOAD, ONLY_EXPERTS, moe_family, without_unused_sizes
from megatron.interop.huggingface.read import INDEX
from megatron.interop.huggingface.sentence_piece import BPE_MODEL, read_proto, to_tokenizer_json
from megatron.interop.huggingface.settings import to_config
from megatron.interop.tensor_writer import TensorToWrite, in_shards, write_tensors
from megatron.model.config import ModelConfig
from megatron.parallel.parameters import named_parameters
from megatron.parallel.slices import GlobalSlice
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import CONFIG_KEYS

logger = logging.getLogger("megatron")


def write_huggingface(
    checkpoint: Checkpoint, root: Path, advance: Callable[[int], object], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model of a checkpoint to the folder `root`; `advance` receives the bytes of each tensor written.

    A failure leaves no files behind.

    Raises:
        InputError: the folder is not empty, or Hugging Face has no such model.
        OSError: the folder cannot be written.
    """
    root = root.absolute()
    check_is_empty(root)
    task, model, rows = checkpoint.state["task"], model_config(checkpoint), checkpoint.state["vocab_size"]
    family = FAMILIES[choose_family(task, model)]
    if family.model_type == "llama":
        model = with_flags_of_biases(model)
    elif family.model_type in ONLY_EXPERTS:
        model = without_unused_sizes(model)
    try:
        config = to_config(family, model, rows)
    except InputError as error:
        raise InputError(f"--load: {checkpoint.folder}: {error}") from None
    tensors = tensors_of(family, checkpoint.tensors["model"], meta_model(task, model, rows), model)
    if task == "BERT --bert-no-binary-head":
        # transformers requires token type embeddings; zeros add nothing.
        shape, dtype = (2, model.hidden_size), tensors["bert.embeddings.word_embeddings.weight"].dtype
        types = TensorToWrite(shape, dtype, lambda: torch.zeros(shape, dtype=dtype))
        tensors["bert.embeddings.token_type_embeddings.weight"] = types
    if not model.mask_padded_vocab and rows < checkpoint.state["padded_vocab_size"]:
        logger.warning(
            f"--no-mask-padded-vocab: {checkpoint.state['padded_vocab_size'] - rows} rows of padding are dropped, "
            "which makes the other ids slightly more probable"
        )
    dtypes = {t.dtype for name, t in tensors.items() if not name.endswith("e_score_correction_bias")}
    config["architectures"] = [family.architecture(task)]
    config["torch_dtype"] = str(dtypes.pop())[6:] if len(dtypes) == 1 else "float32"

    saved = saved_tokenizer(checkpoint)
    tokenizer = build_tokenizer(saved) if saved.tokenizer_type else None
    special = {} if tokenizer is None else tokenizer.special_ids
    roles = {"bos_token_id": ("bos", "eod"), "eos_token_id": ("eos", "eod"), "pad_token_id": ("pad",)}
    config |= {key: next((special[r] for r in names if r in special), None) for key, names in roles.items()}
    contents = {"config.json": json_text(config)}
    if tokenizer is not None:
        contents |= tokenizer_contents(tokenizer, model.max_position_embeddings)
    write_folder(root, in_shards(tensors, shard_bytes), contents, advance)


def choose_family(task: str, model: ModelConfig) -> str:
    """The family nearest to a model."""
    if task != "GPT":
        return "megatron-bert"
    if model.num_experts is not None:
        return moe_family(model)
    if model.activation_function == "geglu":
        with_norms = "gemma3_text" if model.qk_layernorm else "gemma2"
        return with_norms if model.sandwich_norm else "gemma"
    if model.activation_function == "relu":
        return "opt"
    if model.position_embedding_type == "alibi":
        return "bloom"
    if model.position_embedding_type != "rope":
        return "gpt2"
    if model.norm_after:
        return "olmo2"
    if model.normalization == "LayerNorm":
        return "gpt_neox"
    if model.qk_layernorm:
        return "qwen3"
    if model.rotary_percent != 1:
        return "phi3"
    if model.add_qkv_bias and not (model.add_bias_linear or model.add_attention_bias):
        return "qwen2"
    return "llama" if model.window_size is None else "mistral"


def with_flags_of_biases(model: ModelConfig) -> ModelConfig:
    """The same model with a flag for the biases of attention and one for those of the MLP, as Llama has them."""
    return dataclasses.replace(
        model,
        add_bias_linear=False,
        add_qkv_bias=False,  # part of those of attention
        add_attention_bias=model.add_bias_linear or model.add_attention_bias,
        add_mlp_bias=model.add_bias_linear or model.add_mlp_bias,
    )


def tensors_of(
    family: Family, source: TensorSource, model: nn.Module, config: ModelConfig
) -> dict[str, TensorToWrite]:
    """The tensors of transformers, each computed when it is written."""

    # The tensors that come from one native tensor, or from its rows of an expert, are written one after the other.
    @functools.lru_cache(maxsize=1)
    def split(name: str, spec: GlobalSlice, modules: Modules) -> list[Tensor]:
        return modules.split(source.read(name, spec).to(dtype_of(name)), config)

    def dtype_of(name: str) -> torch.dtype:
        return getattr(torch, source.index[name]["dtype"])

    def make(name: str, spec: GlobalSlice, modules: Modules, i: int) -> Tensor:
        return split(name, spec, modules)[i]

    to_write = {}
    for name, p in named_parameters(model):
        if name.endswith(LOAD):
            continue
        parts, modules = family.tensors(name, config)
        like = modules.split(p[: len(p) // len(parts)], config)
        for rows, names in zip(rows_of_parts(len(p), len(parts)), parts, strict=True):
            spec = dataclasses.replace(p.shard_spec, ranges=(rows,)) if len(parts) > 1 else p.shard_spec
            for i, theirs in enumerate(names):
                make_part = functools.partial(make, name, spec, modules, i)
                to_write[theirs] = TensorToWrite(tuple(like[i].shape), dtype_of(name), make_part)
    return to_write


def write_folder(
    root: Path,
    shards: Iterable[dict[str, TensorToWrite]],
    contents: dict[str, bytes],
    advance: Callable[[int], object],
) -> None:
    """Write tensors and other files to a folder atomically."""
    shards = list(shards)
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    temporary = root.with_name(f".writing-{root.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed conversion
    temporary.mkdir(parents=True)
    try:
        check_room(temporary, size)
        weights: dict[str, str] = {}
        for i, shard in enumerate(shards):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(temporary / name, shard, advance)
            weights |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            contents = {
                INDEX: json_text({"metadata": {"total_size": size}, "weight_map": weights}),
                **contents,
            }
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.replace(root)
        sync(root.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def tokenizer_contents(tokenizer: Tokenizer, longest: int) -> dict[str, bytes]:
    """The files of a tokenizer, by the names that `AutoTokenizer` expects, and a tokenizer_config.json."""
    contents = [read_file(file) for file in tokenizer.files]
    settings: dict[str, Any] = {"model_max_length": longest}
    if isinstance(tokenizer, GPT2BPETokenizer):
        names = ["vocab.json", "merges.txt", "tokenizer.json"]
        contents.append(tokenizer.to_json().encode())
        end = "<|endoftext|>"
        settings |= {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
    elif tokenizer.name.startswith("BertWordPiece"):
        names = ["vocab.txt"]
        settings |= {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": tokenizer.name.endswith("LowerCase"),
        }
    elif tokenizer.name == "HuggingFaceTokenizer":
        names = ["tokenizer.json", *(file.name for file in tokenizer.files[1:])]
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    elif tokenizer.name == "SentencePieceTokenizer" and (converted := to_tokenizer_json(tokenizer.files[0])):
        proto = read_proto(tokenizer.files[0])
        # llama.cpp takes a tokenizer.model for BPE, and reads the other settings from tokenizer_config.json only.
        is_bpe = proto.trainer_spec.model_type == BPE_MODEL
        names = ["tokenizer.model" if is_bpe else tokenizer.files[0].name, "tokenizer.json"]
        contents.append(converted.encode())
        settings |= {CONFIG_KEYS[role]: proto.pieces[i].piece for role, i in tokenizer.special_ids.items()}
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
        added = json.loads(converted)["added_tokens"]
        settings["added_tokens_decoder"] = {str(token.pop("id")): token for token in added}
        if not proto.normalizer_spec.add_dummy_prefix:
            settings["add_prefix_space"] = False
    else:
        return {file.name: read_file(file) for file in tokenizer.files}
    return {"tokenizer_config.json": json_text(settings), **dict(zip(names, contents, strict=True))}


def json_text(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
