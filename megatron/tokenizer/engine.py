"""The fastest way to encode much text that gives the ids of `Tokenizer.tokenize`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from megatron.tokenizer.base import Tokenizer

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str]) -> tuple[str, str]:
    """Choose between "tokenize_batch", which is always right, and "tiktoken", which must prove that it is.

    tiktoken encodes the sample, and each piece of the vocabulary, and has to give the same ids.

    Returns:
        The name of the engine, and the reason in one line for people.
    """
    if tokenizer.name != "GPT2BPETokenizer":
        return "tokenize_batch", tokenizer.name
    from megatron.tokenizer.gpt2 import piece_bytes, tiktoken_encoder

    try:
        encode = tiktoken_encoder(tokenizer)
    except ImportError:
        return "tokenize_batch", "tokenizers (pip install tiktoken for one several times faster)"
    pieces = [piece_bytes(piece).decode("utf-8", errors="replace") for piece in tokenizer.reachable]
    texts = [*sample, "\n".join(pieces)]
    for ids, right in zip(encode(texts), tokenizer.tokenize_batch(texts), strict=True):
        if ids.tolist() != right:
            pairs = zip(ids.tolist(), right, strict=False)
            at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            shown = tokenizer.detokenize(right[max(0, at - 3) : at + 3])
            return "tokenize_batch", f"tokenizers, because the ids of tiktoken differ, as for {shown!r}"
    return "tiktoken", f"tiktoken, with the ids of tokenizers on {len(sample)} texts and {len(pieces)} pieces"


def encoder(tokenizer: Tokenizer, engine: str) -> Encode:
    """A function from texts to an array of ids for each, of the engine that `choose_engine` chose."""
    if engine == "tiktoken":
        from megatron.tokenizer.gpt2 import tiktoken_encoder

        return tiktoken_encoder(tokenizer)
    return lambda texts: [np.array(ids, dtype=np.uint32) for ids in tokenizer.tokenize_batch(texts)]
