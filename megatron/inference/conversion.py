"""Check a converted checkpoint: compare logits on fixed tokens with those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.inference.load import load_weights
from megatron.interop.external import meta_model
from megatron.interop.huggingface.settings import read_settings
from megatron.tokenizer import Tokenizer

# Largest difference relative to the largest logit: the rounding of fp32 sums in a deep model.
TOLERANCE = 1e-4
BATCH, MAX_LENGTH = 2, 64
# Use neither the network nor code in the directory, which transformers would offer to run.
FROM_FOLDER = {"local_files_only": True, "trust_remote_code": False}
LINES = (
    "Hello world, it's 12345 tests!",
    "  two spaces\tand a tab",
    "Ünïcödé, 中文 and 🎉",
    "CamelCase [UPPER]",
)


def fixed_tokens(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Return tokens [b, s], the same at each call, and their token types for BERT."""
    length = min(MAX_LENGTH, model_config(checkpoint).max_position_embeddings)
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(checkpoint.state["vocab_size"], (BATCH, length), generator=generator)
    return tokens, (torch.arange(length) >= length // 2).long().expand(BATCH, length)


@torch.no_grad()
def our_logits(checkpoint: Checkpoint) -> list[Tensor]:
    """Return the logits of our model in fp32 on the CPU: [b, s, v], and [b, 2] of BERT's binary head if it has one."""
    tokens, types = fixed_tokens(checkpoint)
    task = checkpoint.state["task"]
    model = meta_model(task, model_config(checkpoint), checkpoint.state["vocab_size"])
    load_weights(checkpoint, model, torch.float32)
    if task == "GPT":
        return [model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))]
    return [x for x in model(tokens, torch.ones_like(tokens), types) if x is not None]


@torch.no_grad()
def their_logits(folder: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """Return the same logits of the model that transformers loads from a directory, without vocabulary padding.

    Args:
        checkpoint: determines the tokens.

    Raises:
        ImportError: transformers is not installed, or has no such model.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokens, types = fixed_tokens(checkpoint)
    task, vocab_size = checkpoint.state["task"], checkpoint.state["vocab_size"]
    architecture = read_settings(folder / "config.json").family.architecture(task)
    if not hasattr(transformers, architecture):
        raise ImportError(f"transformers {transformers.__version__} has no {architecture}")
    model = getattr(transformers, architecture).from_pretrained(folder, **FROM_FOLDER).float().eval()
    if task == "GPT":
        return [model(tokens).logits[..., :vocab_size]]
    out = model(tokens, token_type_ids=types)
    if task == "BERT":
        return [out.prediction_logits[..., :vocab_size], out.seq_relationship_logits]
    return [out.logits[..., :vocab_size]]


def tokenizer_note(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Compare the `AutoTokenizer` of a directory with our tokenizer; returns a note if they differ."""
    from transformers import AutoTokenizer

    # Unsuitable files raise exceptions of any type.
    try:
        theirs = AutoTokenizer.from_pretrained(folder, **FROM_FOLDER)
        ids = [theirs.encode(line, add_special_tokens=False) for line in LINES]
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        return f"AutoTokenizer of transformers cannot load the tokenizer in {folder} ({type(error).__name__}: {why})"
    for line, expected in zip(LINES, ids, strict=True):
        if expected != tokenizer.tokenize(line):
            return f"AutoTokenizer of transformers tokenizes {line!r} differently than {tokenizer.name}"
    return None


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference relative to the largest logit of the same tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
