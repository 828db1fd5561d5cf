"""A trained model and its tokenizer, from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import (
    Checkpoint,
    check_vocabulary,
    model_config,
    saved_tokenizer,
)
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_weights
from megatron.checkpoint.nvidia.read import is_megatron, open_megatron
from megatron.flags import InputError
from megatron.inference.config import InferenceConfig
from megatron.model.config import check_tensor_parallel
from megatron.model.gpt import GPTModel
from megatron.model.layers import TensorParallel
from megatron.ops.backend import Ops
from megatron.ops.compiler import as_written
from megatron.ops.linear import add_product, has_onednn, matmul, onednn_matmul
from megatron.ops.projected_loss import AT_ONCE, projected_loss
from megatron.parallel.collectives import together
from megatron.parallel.mesh import Mesh
from megatron.parallel.stages import split_layers
from megatron.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig

logger = logging.getLogger("megatron")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_gpt(config: InferenceConfig, tokenizer: TokenizerConfig, mesh: Mesh) -> tuple[GPTModel, Tokenizer]:
    """`build_gpt` of the checkpoint that `config` names."""
    return build_gpt(find_any_checkpoint(config, tokenizer, mesh), config, tokenizer, mesh)


def build_gpt(
    checkpoint: Checkpoint,
    config: InferenceConfig,
    tokenizer: TokenizerConfig,
    mesh: Mesh,
    *,
    as_trained: bool = False,
) -> tuple[GPTModel, Tokenizer]:
    """This process's part of the GPT of a checkpoint of any layout, and its tokenizer. Every process must take part.

    Args:
        tokenizer: if it names a type, used in place of the tokenizer saved with the checkpoint.
        as_trained: keep what pads the vocabulary in the softmax, where training included it. It is no token, and else
            left out.

    Raises:
        InputError: the checkpoint holds no GPT, the tokenizer does not fit, or the layout does not.
    """
    if tokenizer.tokenizer_type is None and tokenizer != TokenizerConfig():
        raise InputError("--tokenizer-type is required with other flags of the tokenizer")
    for note in checkpoint.notes if mesh.is_first else ():
        logger.warning(f"--load: {note}")
    if checkpoint.state["task"] != "GPT":
        raise InputError(f"--load: {checkpoint.folder} holds a {checkpoint.state['task']}, not a GPT")
    model_settings = model_config(checkpoint)
    if not as_trained:
        model_settings = dataclasses.replace(model_settings, mask_padded_vocab=True)
    check_tensor_parallel(model_settings, mesh.tp.size, mesh.tp.size)
    (chunk,) = split_layers(config.parallel, model_settings.num_layers)[mesh.pp.rank]
    chosen = _tokenizer(checkpoint, tokenizer)
    check_vocabulary(checkpoint, chosen.vocab_size)
    rows = chosen.vocab_size if model_settings.mask_padded_vocab else checkpoint.state["padded_vocab_size"]
    padded = padded_vocab_size(rows, 1, mesh.tp.size)
    if padded > rows and not model_settings.mask_padded_vocab:
        raise InputError(
            f"--tensor-model-parallel-size: {mesh.tp.size} does not divide the {rows} rows of the vocabulary, whose "
            "padding is part of this model"
        )
    dtype = _dtype(config, checkpoint)
    # Without memory, so that sizes are held against the files first.
    with torch.device("meta"):
        model = GPTModel(
            model_settings,
            vocab_size=chosen.vocab_size,
            padded_vocab_size=padded,
            chunk=chunk,
            tp=TensorParallel(mesh.tp, ops=_ops(dtype, mesh.device)),
        )
    with together(mesh.world, InputError):
        load_weights(checkpoint, model, dtype)
    return model.to(mesh.device).eval().requires_grad_(False), chosen


def find_any_checkpoint(config: InferenceConfig, tokenizer: TokenizerConfig, mesh: Mesh) -> Checkpoint:
    """The checkpoint of any kind that `config` names. Every process must take part.

    Args:
        tokenizer: of one of Megatron-LM's, which has none.

    Raises:
        InputError: there is no such checkpoint.
    """
    root = Path(config.load)
    with together(mesh.world, InputError):
        foreign = is_megatron(root)
        if foreign and config.ckpt_step is not None:
            raise InputError(
                f"--ckpt-step: {config.load} holds a checkpoint of NVIDIA's Megatron-LM; give the folder of that "
                "iteration by --load"
            )
        if foreign:
            return open_megatron(root, tokenizer, load_optim=False)
    return find_checkpoint(config.load, save=None, step=config.ckpt_step, world=mesh.world)


def _tokenizer(checkpoint: Checkpoint, given: TokenizerConfig) -> Tokenizer:
    chosen = given if given.tokenizer_type else saved_tokenizer(checkpoint)
    if chosen.tokenizer_type is None:
        raise InputError(
            f"--load: {checkpoint.folder} has no tokenizer; name it with --tokenizer-type, and --vocab-file, "
            "--merge-file or --tokenizer-model"
        )
    return build_tokenizer(chosen)


def _dtype(config: InferenceConfig, checkpoint: Checkpoint) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    training = checkpoint.state["config"].get("training", {})
    return DTYPES["fp16" if training.get("fp16") else "bf16" if training.get("bf16") else "fp32"]


# Rows that oneDNN multiplies by a weight, at most. It keeps what it prepares for each number of rows: those of prompts
# are many, and took a server's memory from 0.6 to 1 GB in two minutes.
FEW_ROWS = 64


def _ops(dtype: torch.dtype, device: torch.device) -> Ops:
    """Nothing compiled: what is short of time here are tokens one by one, which keep no compiled code busy."""
    onednn = device.type == "cpu" and dtype == torch.float32 and has_onednn(dtype)
    loss = functools.partial(projected_loss, as_written, matmul, add_product, AT_ONCE[device.type])
    return Ops(matmul=_matmul_of_few_rows if onednn else matmul, projected_loss=loss)


def _matmul_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`matmul`, of single tokens by oneDNN, which streams an fp32 weight twice as fast."""
    return (onednn_matmul if x.numel() <= FEW_ROWS * x.shape[-1] else matmul)(x, weight, bias)
