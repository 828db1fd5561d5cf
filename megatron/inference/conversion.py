"""Whether two checkpoints are one model: logits on fixed tokens, by this program and by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.foreign import model_without_memory
from megatron.checkpoint.huggingface.settings import read_settings
from megatron.checkpoint.load import load_weights
from megatron.model.gpt import position_ids
from megatron.tokenizer import Tokenizer

# By how much of the largest logit others may differ: what the order of additions makes of fp32 in a deep model.
TOLERANCE = 1e-4
BATCH, LONGEST = 2, 64
# Neither the network nor code that lies in the folder, which transformers would else offer to run.
FROM_FOLDER = {"local_files_only": True, "trust_remote_code": False}
LINES = (
    "Hello world, it's 12345 tests!",
    "  two spaces\tand a tab",
    "Ünïcödé, 中文 and 🎉",
    "CamelCase [UPPER]",
)


def fixed_tokens(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Tokens [b, s] that are the same at each call, and BERT's types for them."""
    length = min(LONGEST, model_config(checkpoint).max_position_embeddings)
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(checkpoint.state["vocab_size"], (BATCH, length), generator=generator)
    return tokens, (torch.arange(length) >= length // 2).long().expand(BATCH, length)


@torch.no_grad()
def our_logits(checkpoint: Checkpoint) -> list[Tensor]:
    """Of GPT [b, s, v]; of BERT these of the words, and with a binary head [b, 2] of the order; computed in fp32 on
    the CPU."""
    tokens, types = fixed_tokens(checkpoint)
    task = checkpoint.state["task"]
    model = model_without_memory(task, model_config(checkpoint), checkpoint.state["vocab_size"])
    load_weights(checkpoint, model, torch.float32)
    if task == "GPT":
        return [model(tokens, position_ids(0, *tokens.shape, tokens.device))]
    return [x for x in model(tokens, torch.ones_like(tokens), types) if x is not None]


@torch.no_grad()
def their_logits(folder: Path, checkpoint: Checkpoint) -> list[Tensor]:
    """The same logits, of the model that transformers loads from a folder; without rows that pad the vocabulary.

    Args:
        checkpoint: what the tokens are made for.

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
    """In what `AutoTokenizer` of a folder differs from a tokenizer of ours, if in anything."""
    from transformers import AutoTokenizer

    # Files that it was not made for fail in it in any way.
    try:
        theirs = AutoTokenizer.from_pretrained(folder, **FROM_FOLDER)
        ids = [theirs.encode(line, add_special_tokens=False) for line in LINES]
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        return (
            f"AutoTokenizer of transformers loads no tokenizer from {folder} ({type(error).__name__}: {why})"
        )
    for line, expected in zip(LINES, ids, strict=True):
        if expected != tokenizer.tokenize(line):
            return f"AutoTokenizer of transformers gives {line!r} other ids than {tokenizer.name}"
    return None


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """As a share of the largest logit of the same kind."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
