"""GPT-2's byte-level BPE, from vocab.json and merges.txt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron.flags import InputError
from megatron.tokenizer.base import Tokenizer, read_json, read_text

END_OF_TEXT = "<|endoftext|>"
# Contractions, then words, numbers and other signs, each with one space before it; then white space.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A longer run of white space overflows the stack of tiktoken's regular expressions, where they look ahead.
LONGEST_SPACE = 999_998
_TOO_LONG = re.compile(rf"(?<!\s)\s{{{LONGEST_SPACE + 1},}}")


class GPT2BPETokenizer(Tokenizer):
    """The tokenizer of GPT-2. In text, `<|endoftext|>` is some ordinary pieces, never the special token.

    Attributes:
        reachable: the ids that text can become, by piece; each piece a string of `byte_symbols`.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab = read_vocab(vocab_file)
        merges = read_merges(merge_file, vocab, vocab_file)
        if END_OF_TEXT not in vocab:
            raise InputError(
                f"{vocab_file}: holds no {END_OF_TEXT}, the end-of-document token of this tokenizer"
            )
        super().__init__(
            "GPT2BPETokenizer",
            files=[Path(vocab_file), Path(merge_file)],
            vocab_size=len(vocab),
            special_ids={"eod": vocab[END_OF_TEXT]},
        )
        # What the merges can make, the single bytes first. (A vocabulary may hold more, such as special tokens.)
        self.reachable = {
            piece: vocab[piece]
            for piece in (*ByteLevel.alphabet(), *(left + right for left, right in merges))
        }
        # No special token begins with a space, so a merge must have made each piece that does.
        lost = [piece for piece in vocab if piece.startswith("Ġ") and piece not in self.reachable]
        if lost:
            raise InputError(
                f"{merge_file}: has no merge for {len(lost)} pieces of {vocab_file}, {lost[0]!r} the first; "
                "it is cut short, or the files do not belong together"
            )
        self._bpe = HFTokenizer(BPE(vocab, merges))
        self._bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._bpe.decoder = ByteLevelDecoder()

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(ids)


def tiktoken_encoder(tokenizer: GPT2BPETokenizer) -> Callable[[Sequence[str]], list[np.ndarray]]:
    """A function that encodes a batch of texts by tiktoken, several times faster than `tokenize_batch`; but by the
    latter what tiktoken cannot encode.

    tiktoken joins any two pieces that make a third, lowest id first. That is BPE where ids follow the order of
    merges, as in GPT-2's files and those of `tools/train_tokenizer.py`; elsewhere the ids can differ.

    Raises:
        ImportError: tiktoken is not installed.
    """
    import tiktoken

    ranks = {piece_bytes(piece): i for piece, i in tokenizer.reachable.items()}
    encoding = tiktoken.Encoding("bpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> np.ndarray:
        if len(text) > LONGEST_SPACE and _TOO_LONG.search(text):
            return np.array(tokenizer.tokenize(text), dtype=np.uint32)
        return encoding.encode_to_numpy(text)

    return lambda texts: [encode(text) for text in texts]


def byte_symbols() -> dict[str, int]:
    """The byte that each character of a piece stands for: printable Latin-1 itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = byte_symbols()


def piece_bytes(piece: str) -> bytes:
    """The bytes of text that a piece of a byte-level vocabulary stands for."""
    return bytes(_BYTES[symbol] for symbol in piece)


def read_vocab(path: str) -> dict[str, int]:
    """Read vocab.json: one object of piece to id, the ids 0 to n - 1, each byte a piece.

    Raises:
        InputError: it is not so.
    """
    vocab = read_json(path)
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise InputError(f"{path}: is not a vocab.json, one object of pieces and their ids")
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise InputError(
            f"{path}: the ids of its {len(vocab)} pieces are not 0 to {len(vocab) - 1}, each once"
        )
    missing = sorted(set(ByteLevel.alphabet()) - vocab.keys())
    if missing:
        raise InputError(
            f"{path}: lacks {len(missing)} of the 256 single bytes, {missing[0]!r} the first; "
            "it is not the vocabulary of a byte-level BPE"
        )
    return vocab


def read_merges(path: str, vocab: dict[str, int], vocab_file: str) -> list[tuple[str, str]]:
    """Read merges.txt: on each line two pieces of `vocab` that make a third, the first to be merged on top.

    `vocab_file` is named in errors.

    Raises:
        InputError: it is not so.
    """
    lines = read_text(path).split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise InputError(f"{path}:{number}: {line!r} is not two pieces with a space between them")
        for piece in (*pieces, "".join(pieces)):
            if piece not in vocab:
                raise InputError(
                    f"{path}:{number}: {piece!r} is not in {vocab_file}; the files do not belong together"
                )
        merges.append((pieces[0], pieces[1]))
    return merges
