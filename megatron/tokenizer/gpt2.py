"""GPT-2's byte-level BPE tokenizer, from vocab.json and merges.txt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer, read_json, read_text
from megatron.tokenizer.config import TokenizerConfig

END_OF_TEXT = "<|endoftext|>"
# Contractions; words, numbers and other symbols, each with one leading space; then whitespace.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# tiktoken's regular expressions, which look ahead, overflow their stack on a longer run of whitespace.
LONGEST_SPACE = 999_998
_TOO_LONG = re.compile(rf"(?<!\s)\s{{{LONGEST_SPACE + 1},}}")


class GPT2BPETokenizer(Tokenizer):
    """GPT-2 tokenizer. In text, `<|endoftext|>` becomes ordinary pieces, never the special token.

    Attributes:
        reachable: ids that text can produce, by piece. A piece is a string of `byte_symbols`.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab = read_vocab(vocab_file)
        merges = read_merges(merge_file, vocab, vocab_file)
        if END_OF_TEXT not in vocab:
            raise InputError(
                f"{vocab_file}: has no {END_OF_TEXT}, the end-of-document token of this tokenizer"
            )
        super().__init__(
            "GPT2BPETokenizer",
            files=[Path(vocab_file), Path(merge_file)],
            vocab_size=len(vocab),
            special_ids={"eod": vocab[END_OF_TEXT]},
        )
        # Single bytes and the results of merges. (A vocabulary may have more, such as special tokens.)
        self.reachable = {
            piece: vocab[piece]
            for piece in (*ByteLevel.alphabet(), *(left + right for left, right in merges))
        }
        # No special token starts with a space, so every piece that does results from a merge.
        lost = [piece for piece in vocab if piece.startswith("Ġ") and piece not in self.reachable]
        if lost:
            raise InputError(
                f"{merge_file}: no merge produces {len(lost)} pieces of {vocab_file}, such as {lost[0]!r}; "
                "the file is truncated, or the files do not belong together"
            )
        self._bpe = HFTokenizer(BPE(vocab, merges))
        self._bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._bpe.decoder = ByteLevelDecoder()

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> GPT2BPETokenizer:
        return cls(*config.require("vocab_file", "merge_file"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(ids)

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer. There `<|endoftext|>` in text is the special token."""
        tokenizer = HFTokenizer.from_str(self._bpe.to_str())
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer.to_str()


def tiktoken_encoder(tokenizer: GPT2BPETokenizer) -> Callable[[Sequence[str]], list[np.ndarray]]:
    """Return a function that encodes a batch of texts with tiktoken, several times faster than `tokenize_batch`.

    tiktoken merges any two pieces that form a third, lowest id first. That is BPE if ids follow the order of merges, as
    in GPT-2's files and those of `megatron train-tokenizer`; otherwise the ids can differ. Texts that tiktoken cannot
    encode fall back to `tokenize`.

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
    """Return the byte of each character in pieces: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = byte_symbols()


def piece_bytes(piece: str) -> bytes:
    """Return the bytes of text that a piece of a byte-level vocabulary encodes."""
    return bytes(_BYTES[symbol] for symbol in piece)


def read_vocab(path: str) -> dict[str, int]:
    """Read vocab.json: an object of piece to id, with ids 0 to n - 1 and a piece for each byte.

    Raises:
        InputError: the file is malformed.
    """
    vocab = read_json(path)
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise InputError(f"{path}: is not a vocab.json, an object of pieces and their ids")
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise InputError(f"{path}: the ids of its {len(vocab)} pieces are not 0 to {len(vocab) - 1}")
    missing = sorted(set(ByteLevel.alphabet()) - vocab.keys())
    if missing:
        raise InputError(
            f"{path}: lacks {len(missing)} of the 256 single bytes, such as {missing[0]!r}; "
            "it is not the vocabulary of a byte-level BPE"
        )
    return vocab


def read_merges(path: str, vocab: dict[str, int], vocab_file: str) -> list[tuple[str, str]]:
    """Read merges.txt: each line has two pieces of `vocab` that form a third, in merge order.

    Args:
        vocab_file: path of the vocabulary, for messages.

    Raises:
        InputError: the file is malformed.
    """
    lines = read_text(path).split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise InputError(f"{path}:{number}: {line[:60]!r} is not two pieces separated by a space")
        for piece in (*pieces, "".join(pieces)):
            if piece not in vocab:
                raise InputError(
                    f"{path}:{number}: {piece[:60]!r} is not in {vocab_file}; the files do not belong together"
                )
        merges.append((pieces[0], pieces[1]))
    return merges
