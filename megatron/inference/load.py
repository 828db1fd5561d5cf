"""Load a trained GPT and its tokenizer from a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import nn

import megatron.variants.registry  # noqa: F401 (tools that only generate do not import megatron.plugins)
from megatron.checkpoint.checkpoint import (
    Checkpoint,
    check_vocabulary,
    model_config,
)
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.formats import FORMATS
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.context_parallel.setup import heads_obstacle, with_context_parallel
from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.interop.formats import EXTERNAL_FORMATS
from megatron.interop.nvidia.read import is_megatron, open_megatron
from megatron.model.config import check_expert_parallel, check_tensor_parallel
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.backend import Ops
from megatron.ops.cpu.linear import decode_matmul, has_onednn
from megatron.ops.linear import matmul
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import named_parameters
from megatron.parallel.stages import split_layers
from megatron.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.tokenizer.config import TokenizerConfig

logger = logging.getLogger("megatron")

FORMATS.update(EXTERNAL_FORMATS)  # tools that only generate do not import megatron.plugins

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_gpt(config: InferenceConfig, tokenizer: TokenizerConfig, mesh: Mesh) -> tuple[GPTModel, Tokenizer]:
    """Find the checkpoint that `config` names, and call `build_gpt`."""
    return build_gpt(find_any_checkpoint(config, tokenizer, mesh), config, tokenizer, mesh)


def build_gpt(
    checkpoint: Checkpoint,
    config: InferenceConfig,
    tokenizer: TokenizerConfig,
    mesh: Mesh,
    *,
    as_trained: bool = False,
) -> tuple[GPTModel, Tokenizer]:
    """Build this process's part of a GPT and load its weights, saved in any layout. Collective over all processes.

    Args:
        tokenizer: replaces the tokenizer saved with the checkpoint if it has a type.
        as_trained: keep vocabulary padding in the softmax, and the capacity of experts, if training had them. By
            default they are left out.

    Raises:
        InputError: the checkpoint holds no GPT, or tokenizer or layout do not fit.
    """
    if tokenizer.tokenizer_type is None and tokenizer != TokenizerConfig():
        raise InputError(
            "--tokenizer is required with other tokenizer flags: the folder or file of the tokenizer"
        )
    for note in checkpoint.notes if mesh.is_first else ():
        logger.warning(f"--load: {note}")
    if checkpoint.state["task"] != "GPT":
        raise InputError(f"--load: {checkpoint.folder} holds a {checkpoint.state['task']}, not a GPT")
    model_settings = model_config(checkpoint)
    if not as_trained:
        # Without dropped tokens, which would depend on the other texts of the batch.
        model_settings = dataclasses.replace(
            model_settings,
            mask_padded_vocab=True,
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
        )
    check_tensor_parallel(model_settings, mesh.tp.size, mesh.tp.size)
    check_expert_parallel(model_settings, config.parallel, 0)
    for reason in heads_obstacle(model_settings, config.parallel):
        raise InputError(f"--context-parallel-size: {mesh.cp.size} {reason}")
    (chunk,) = split_layers(config.parallel, model_settings.num_layers)[mesh.pp.rank]
    loaded = _tokenizer(checkpoint, tokenizer)
    check_vocabulary(checkpoint, loaded.vocab_size)
    rows = loaded.vocab_size if model_settings.mask_padded_vocab else checkpoint.state["padded_vocab_size"]
    padded = padded_vocab_size(rows, 1, mesh.tp.size)
    if padded > rows and not model_settings.mask_padded_vocab:
        raise InputError(
            f"--tensor-model-parallel-size: {mesh.tp.size} does not divide the {rows} rows of the vocabulary, whose "
            "padding is part of this model"
        )
    dtype = _dtype(config, checkpoint)
    context = ModelContext.on_mesh(
        mesh,
        model_settings,
        config.parallel,
        vocab_size=loaded.vocab_size,
        padded_vocab_size=padded,
        ops=with_context_parallel(config.parallel, mesh, inference_ops(dtype, mesh.device)),
    )
    # Without memory: load_weights checks the shapes before it allocates.
    with torch.device("meta"):
        model = GPTModel(model_settings, context, chunk)
    with raise_on_all_ranks(mesh.world, InputError):
        load_weights(checkpoint, model, dtype)
    return model.to(mesh.device).eval().requires_grad_(False), loaded


def find_any_checkpoint(config: InferenceConfig, tokenizer: TokenizerConfig, mesh: Mesh) -> Checkpoint:
    """Find the checkpoint that `config` names, in any format. Collective over all processes.

    Args:
        tokenizer: for a Megatron-LM checkpoint, which has none.

    Raises:
        InputError: there is no such checkpoint.
    """
    root = Path(config.load)
    with raise_on_all_ranks(mesh.world, InputError):
        external = is_megatron(root)
        if external and config.ckpt_step is not None:
            raise InputError(
                f"--ckpt-step: {config.load} is a Megatron-LM checkpoint; give the directory of that iteration with "
                "--load"
            )
        if external:
            return open_megatron(root, tokenizer, load_optim=False)
    checkpoint = find_checkpoint(
        config.load,
        save=None,
        step=config.ckpt_step,
        verify=config.verify_checkpoint,
        weights_only=True,
        world=mesh.world,
    )
    assert checkpoint is not None  # only without --load
    return checkpoint


def _tokenizer(checkpoint: Checkpoint, given: TokenizerConfig) -> Tokenizer:
    chosen = given if given.tokenizer_type else saved_tokenizer(checkpoint)
    if chosen.tokenizer_type is None:
        raise InputError(
            f"--load: {checkpoint.folder} has no tokenizer; give --tokenizer, the folder or file of the one it was "
            "trained with"
        )
    return build_tokenizer(chosen)


def _dtype(config: InferenceConfig, checkpoint: Checkpoint) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    training = checkpoint.state["config"].get("training", {})
    return DTYPES["fp16" if training.get("fp16") else "bf16" if training.get("bf16") else "fp32"]


def inference_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    """Operations of inference, none of them compiled: decoding has a token at a time."""
    onednn = device.type == "cpu" and dtype == torch.float32 and has_onednn(dtype)
    return Ops(matmul=decode_matmul if onednn else matmul)


def load_weights(checkpoint: Checkpoint, model: nn.Module, dtype: torch.dtype) -> None:
    """Load the weights of a model, or of a rank's part of it, for evaluation or generation.

    The model may be on the meta device. Its weights are then on the CPU, in `dtype`.
    """
    weights = checkpoint.tensors["model"]
    values = {}
    for name, p in named_parameters(model):
        # The bias of experts decides between close scores, which are in fp32.
        kept = torch.float32 if name.endswith("router.expert_bias") else dtype
        values[name] = weights.read(p.tied or name, p.shard_spec).to(kept)
    model.load_state_dict(values, assign=True)
