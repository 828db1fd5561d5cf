"""Choice of the fastest encoder whose ids equal those of `Tokenizer.tokenize`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer, piece_bytes, tiktoken_encoder

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str]) -> tuple[str, str]:
    """Choose between "tokenize_batch", which is always correct, and "tiktoken", which is faster.

    tiktoken is chosen if it gives the same ids for the sample and for each piece of the vocabulary.

    Returns:
        The name of the engine, and a description of the choice for the log.
    """
    if not isinstance(tokenizer, GPT2BPETokenizer):
        return "tokenize_batch", tokenizer.name

    try:
        encode = tiktoken_encoder(tokenizer)
    except ImportError:
        return "tokenize_batch", "tokenizers (tiktoken is several times faster: pip install tiktoken)"
    pieces = [piece_bytes(piece).decode("utf-8", errors="replace") for piece in tokenizer.reachable]
    texts = [*sample, "\n".join(pieces)]
    for ids, right in zip(encode(texts), tokenizer.tokenize_batch(texts), strict=True):
        if ids.tolist() != right:
            pairs = zip(ids.tolist(), right, strict=False)
            at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            shown = tokenizer.detokenize(right[max(0, at - 3) : at + 3])
            return (
                "tokenize_batch",
                f"tokenizers, because the ids of tiktoken differ, for example for {shown!r}",
            )
    return (
        "tiktoken",
        f"tiktoken, whose ids equal those of tokenizers on {len(sample)} texts and {len(pieces)} pieces",
    )


def encoder(tokenizer: Tokenizer, engine: str) -> Encode:
    """Return the encoder of an engine that `choose_engine` chose: texts to an array of ids each."""
    if engine == "tiktoken" and isinstance(tokenizer, GPT2BPETokenizer):
        return tiktoken_encoder(tokenizer)
    return lambda texts: [np.array(ids, dtype=np.uint32) for ids in tokenizer.tokenize_batch(texts)]
