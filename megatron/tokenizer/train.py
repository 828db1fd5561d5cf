"""Train the vocabulary of a tokenizer on text."""

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

from megatron.flags import InputError
from megatron.tokenizer.bert import SPECIAL_TOKENS, UNKNOWN
from megatron.tokenizer.gpt2 import END_OF_TEXT

LEAST_COUNT = 2  # a pair of pieces that is seen once is not worth a piece of its own


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Train a byte-level BPE of GPT-2's kind.

    Args:
        vocab_size: number of ids: the 256 bytes, then what the merges make, and `<|endoftext|>` last.

    Returns:
        The contents of its files by their names: vocab.json and merges.txt for GPT2BPETokenizer, tokenizer.json
        and tokenizer_config.json for HuggingFaceTokenizer and other programs.

    Raises:
        InputError: the text does not yield a vocabulary of this size.
    """
    tokenizer = HFTokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=LEAST_COUNT,
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
    """Train a WordPiece vocabulary of BERT's kind.

    Args:
        texts: gives the text, and the same again when called again; it is read twice.
        vocab_size: number of pieces: the special tokens, the characters at the start and inside of words, and
            what they make.

    Returns:
        The content of vocab.txt, for BertWordPieceLowerCase or BertWordPieceCase, by its name.

    Raises:
        InputError: the text does not yield a vocabulary of this size.
    """
    tokenizer = HFTokenizer(WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    # The trainer would number the ##characters as it meets them in a hash table, in another order each time, and
    # break ties between pairs by those numbers. What it is given beforehand keeps its place.
    given = [SPECIAL_TOKENS["pad"], UNKNOWN, *(SPECIAL_TOKENS[role] for role in ("cls", "sep", "mask"))]
    given += [f"##{character}" for character in _characters_inside_words(tokenizer, texts())]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_COUNT,
        special_tokens=given,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return {"vocab.txt": "".join(f"{piece}\n" for piece in _in_order(tokenizer, vocab_size))}


def _characters_inside_words(tokenizer: HFTokenizer, texts: Iterable[str]) -> Iterator[str]:
    """The characters of the text that can follow another in a word, in order."""
    raw: set[str] = set()
    for text in texts:
        raw.update(text)
    for character in sorted(set(tokenizer.normalizer.normalize_str("".join(sorted(raw))))):
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{character}a")) == 1:
            yield character


def _in_order(tokenizer: HFTokenizer, vocab_size: int) -> list[str]:
    """The pieces by id, once there are as many of them as were asked for."""
    vocab = tokenizer.get_vocab()
    if len(vocab) < vocab_size:
        raise InputError(
            f"--vocab-size: {vocab_size} is too large for this text, which yields {len(vocab)} pieces; "
            "give more text, or ask for fewer"
        )
    if len(vocab) > vocab_size:
        raise InputError(
            f"--vocab-size: {vocab_size} is too small; single characters and special tokens alone take {len(vocab)}"
        )
    return sorted(vocab, key=vocab.__getitem__)
