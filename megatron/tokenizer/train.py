"""Train a tokenizer's vocabulary on text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from megatron.errors import InputError
from megatron.tokenizer.bert import SPECIAL_TOKENS, UNKNOWN
from megatron.tokenizer.gpt2 import END_OF_TEXT

MIN_FREQUENCY = 2  # of a pair of pieces that is merged


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Train a byte-level BPE, as GPT-2's.

    Args:
        vocab_size: number of ids: the 256 bytes, then the results of merges, and `<|endoftext|>` last.

    Returns:
        File contents by name: vocab.json and merges.txt for GPT2BPETokenizer, tokenizer.json and tokenizer_config.json
        for HuggingFaceTokenizer and other programs.

    Raises:
        InputError: the text does not yield a vocabulary of this size.
    """
    tokenizer = HFTokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=MIN_FREQUENCY,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    vocab = _in_order(tokenizer, vocab_size)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "merges.txt": "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)]),
        "vocab.json": json.dumps({piece: i for i, piece in enumerate(vocab)}, indent=0) + "\n",
    }


def train_wordpiece(
    texts: Callable[[], Iterable[str]], vocab_size: int, *, lowercase: bool
) -> dict[str, str]:
    """Train a WordPiece vocabulary, as BERT's.

    Args:
        texts: returns the texts, the same ones each time; called twice.
        vocab_size: number of pieces: special tokens, characters at the start and inside of words, and merges of these.

    Returns:
        File contents by name: vocab.txt for BertWordPieceLowerCase or BertWordPieceCase.

    Raises:
        InputError: the text does not yield a vocabulary of this size.
    """
    tokenizer = HFTokenizer(WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # The trainer would number the ##characters in the order of a hash table, which differs between runs, and break ties
    # between pairs by these numbers. Pieces given as special tokens keep their order.
    given = [SPECIAL_TOKENS["pad"], UNKNOWN, *(SPECIAL_TOKENS[role] for role in ("cls", "sep", "mask"))]
    given += [f"##{character}" for character in _characters_inside_words(tokenizer, texts())]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=given,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return {
        "vocab.txt": "".join(f"{piece}\n" for piece in _in_order(tokenizer, vocab_size)),
        "tokenizer_config.json": json.dumps({"do_lower_case": lowercase}, indent=2) + "\n",
    }


def _characters_inside_words(tokenizer: HFTokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield the characters of the text that can follow another one in a word, sorted."""
    raw: set[str] = set()
    for text in texts:
        raw.update(text)
    for character in sorted(set(tokenizer.normalizer.normalize_str("".join(sorted(raw))))):
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{character}a")) == 1:
            yield character


def _in_order(tokenizer: HFTokenizer, vocab_size: int) -> list[str]:
    """Return the pieces in the order of their ids; raise unless there are `vocab_size`."""
    vocab = tokenizer.get_vocab()
    if len(vocab) < vocab_size:
        raise InputError(
            f"--vocab-size: {vocab_size} is too large for this text, which yields {len(vocab)} pieces; "
            "give more text, or lower it"
        )
    if len(vocab) > vocab_size:
        raise InputError(
            f"--vocab-size: {vocab_size} is too small; single characters and special tokens alone need {len(vocab)}"
        )
    return sorted(vocab, key=vocab.__getitem__)
