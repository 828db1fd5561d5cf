"""Check a converted checkpoint: compare logits on fixed tokens with those of transformers."""

from __future__ import annotations

import os
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
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
LINES = (
    "Hello world, it's 12345 tests!",
    "  two spaces\tand a tab",
    "Ünïcödé, 中文 and 🎉",
    "CamelCase [UPPER]",
    "\n\n   \t\u00a0x  \r\n",
    "0123456789 3.14 1,000,000 2²",
    "ﬁ ① e\u0301 I'LL don't",
    "Ελληνικά العربية हिन्दी ไทย 한국어 日本語",
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
    model = getattr(transformers, architecture).from_pretrained(
        folder, attn_implementation="eager", **FROM_FOLDER
    )
    model = model.float().eval()
    if task == "GPT":
        return [model(tokens).logits[..., :vocab_size]]
    out = model(tokens, token_type_ids=types)
    if task == "BERT":
        return [out.prediction_logits[..., :vocab_size], out.seq_relationship_logits]
    return [out.logits[..., :vocab_size]]


def compare_tokenizers(folder: Path, tokenizer: Tokenizer) -> str:
    """Compare the ids of `AutoTokenizer` of a directory with those of our tokenizer. Returns the result in one line.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoTokenizer

    # Unsuitable files raise exceptions of any type.
    try:
        theirs = AutoTokenizer.from_pretrained(folder, **FROM_FOLDER)
        special = [f"a{theirs.decode([i])}b" for i in dict.fromkeys(tokenizer.special_ids.values())]
        ids = {text: theirs.encode(text, add_special_tokens=False) for text in (*LINES, *special)}
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        return (
            f"warning: token ids are not compared: AutoTokenizer of transformers cannot load the tokenizer in {folder} "
            f"({type(error).__name__}: {why})"
        )
    other = [text for text, expected in ids.items() if expected != tokenizer.tokenize(text)]
    if not other:
        return f"token ids of {len(ids)} texts equal those of AutoTokenizer of transformers"
    if set(other) <= set(special):
        return (
            f"token ids of {len(LINES)} texts equal those of AutoTokenizer of transformers, but special tokens "
            f"written in a text, such as {other[0][1:-1]!r}, are ordinary text for {tokenizer.name}"
        )
    return (
        f"warning: AutoTokenizer of transformers gives other ids than {tokenizer.name} for {len(other)} of {len(ids)} "
        f"texts, such as {other[0]!r}"
    )


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference relative to the largest logit of the same tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
