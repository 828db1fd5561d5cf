"""A trained model and its tokenizer, from a checkpoint."""

from __future__ import annotations

import torch

from megatron.checkpoint.checkpoint import (
    check_vocabulary,
    model_config,
    saved_tokenizer,
)
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_weights
from megatron.flags import InputError
from megatron.model.gpt import GPTModel
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig


def load_gpt(load: str, tokenizer: TokenizerConfig, device: torch.device) -> tuple[GPTModel, Tokenizer]:
    """The GPT of the newest checkpoint in the folder `load`, in the dtype it was saved in.

    Args:
        tokenizer: if it names a type, used in place of the tokenizer saved with the checkpoint.

    Raises:
        InputError: there is no such checkpoint, it holds no GPT, or the tokenizer does not fit.
    """
    if tokenizer.tokenizer_type is None and tokenizer != TokenizerConfig():
        raise InputError("--tokenizer-type is required with other flags of the tokenizer")
    checkpoint = find_checkpoint(load, save=None)
    if checkpoint.state["task"] != "GPT":
        raise InputError(f"--load: {checkpoint.folder} holds a {checkpoint.state['task']}, not a GPT")
    chosen = build_tokenizer(tokenizer if tokenizer.tokenizer_type else saved_tokenizer(checkpoint))
    vocab_size = chosen.vocab_size
    check_vocabulary(checkpoint, vocab_size)
    # Without memory, so that sizes are held against the files first; and without the rows that pad the vocabulary,
    # which are no tokens.
    with torch.device("meta"):
        model = GPTModel(model_config(checkpoint), vocab_size=vocab_size, padded_vocab_size=vocab_size)
    training = checkpoint.state["config"].get("training", {})
    half = torch.float16 if training.get("fp16") else torch.bfloat16 if training.get("bf16") else None
    load_weights(checkpoint, model, half or torch.float32)
    return model.to(device), chosen
