"""tiktoken tokenizer, from tiktoken's own vocabulary file or Megatron-LM's JSON."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer, read_json, read_text
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.gpt2 import END_OF_TEXT, LONGEST_SPACE
from megatron.tokenizer.gpt2 import PATTERN as GPT2_PATTERN

# A character that may precede a word, and the letters at the start and end of a word in patterns that split by case
# (CamelCase is two words). Letters without case, and marks, are in both classes.
_BEFORE, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_SUFFIX = r"(?i:'(?:[sdmt]|ll|ve|re))"
_SPACE = r"\s+(?!\S)|\s+"


def _split_by_case(after_word: str, number: str) -> str:
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{after_word}|{_BEFORE}{_UPPER}+{_LOWER}*{after_word}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACE}"


# Patterns that split text into words, within which pieces are merged. v1 and v2 are Megatron-LM's, the others OpenAI's.
PATTERNS = {
    "v1": rf"{_BEFORE}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACE}",
    "v2": _split_by_case("", r"\p{N}"),
    "gpt2": GPT2_PATTERN,
    "cl100k": rf"{_SUFFIX}|{_BEFORE}+\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACE}",
    "o200k": _split_by_case(f"{_SUFFIX}?", r"\p{N}{1,3}"),
}
# First special tokens of a JSON vocabulary, named and ordered as in Megatron-LM.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
ROLES = {
    "bos": "<s>",
    "eos": "</s>",
    "eod": "</s>",
    "mask": "<mask>",
    "pad": "<pad>",
    "cls": "<cls>",
    "sep": "<sep>",
}
JSON_VOCAB_SIZE = 2**17  # Megatron-LM's default --vocab-size for a JSON vocabulary


class TikTokenizer(Tokenizer):
    """Byte-level BPE that merges pieces by rank, computed by the tiktoken library.

    A Megatron-LM JSON vocabulary has special tokens first, then the pieces, up to `vocab_size` ids in total. In
    tiktoken's own file the ids are the ranks, and the id after the last one, <|endoftext|>, ends a document. Text never
    becomes a special token.
    """

    def __init__(self, path: str, *, pattern: str, num_special_tokens: int, vocab_size: int | None) -> None:
        try:
            import tiktoken
        except ImportError:
            raise InputError("TikTokenizer needs a library: pip install tiktoken") from None

        if not Path(path).is_file():
            raise InputError(f"--tokenizer-model: {path} is not a file; give a tiktoken vocabulary")
        if read_text(path).lstrip().startswith("["):
            names = [
                *SPECIAL_TOKENS,
                *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL_TOKENS), num_special_tokens)),
            ]
            special = {name: i for i, name in enumerate(names)}
            room = (vocab_size or JSON_VOCAB_SIZE) - len(names)
            if room < 256:
                raise InputError(
                    f"--vocab-size: {len(names) + room} is too small for --tiktoken-num-special-tokens {len(names)} "
                    "and the 256 single bytes"
                )
            pieces = _pieces_of_json(path)[:room]
            ranks = {piece: len(names) + rank for rank, piece in enumerate(pieces)}
            special_ids = {role: special[name] for role, name in ROLES.items()}
        else:
            ranks = _ranks_of_lines(path)
            special = {END_OF_TEXT: max(ranks.values(), default=-1) + 1}
            special_ids = {"eod": special[END_OF_TEXT]}
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise InputError(
                f"{path}: lacks {len(missing)} of the 256 single bytes, such as {missing[0]:#04x}; "
                "it is not a tiktoken vocabulary"
            )
        self._encoding = tiktoken.Encoding(
            path, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
        )
        # Whitespace in which the pattern looks ahead. Except in GPT-2's pattern it excludes line ends.
        space = r"\s" if pattern == "gpt2" else r"[^\S\r\n]"
        self._too_long = re.compile(rf"(?<!{space}){space}{{{LONGEST_SPACE + 1},}}(?!\s)")
        super().__init__(
            "TikTokenizer",
            files=[Path(path)],
            vocab_size=max(*ranks.values(), *special.values()) + 1,
            special_ids=special_ids,
        )

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> TikTokenizer:
        path, pattern = config.require("tokenizer_model", "tiktoken_pattern")
        special = config.tiktoken_num_special_tokens
        return cls(path, pattern=pattern, num_special_tokens=special, vocab_size=config.vocab_size)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        """Encode a text, split where it has more whitespace than tiktoken can encode."""
        ids: list[int] = []
        begin = 0
        for run in self._too_long.finditer(text) if len(text) > LONGEST_SPACE else ():
            for end in range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE):
                ids += self._encoding.encode_ordinary(text[begin:end])
                begin = end
        return ids + self._encoding.encode_ordinary(text[begin:])

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(ids)


def _pieces_of_json(path: str) -> list[bytes]:
    """Read the pieces of a list of {"rank": 0, "token_bytes": BASE64, ...}, ordered by rank."""
    entries = read_json(path)
    pieces = []
    for i, entry in enumerate(entries):
        if (
            not isinstance(entry, dict)
            or entry.get("rank") != i
            or not isinstance(entry.get("token_bytes"), str)
        ):
            raise InputError(
                f"{path}: entry {i} is {json.dumps(entry)[:80]}, not an object with rank {i} and token_bytes"
            )
        pieces.append(_bytes(entry["token_bytes"], f"{path}: entry {i}"))
    _check_once(pieces, path)
    return pieces


def _ranks_of_lines(path: str) -> dict[bytes, int]:
    """Read the rank of each piece from lines of a base64 piece, a space, and its rank."""
    pairs = list(_pairs_of_lines(path))
    _check_once([piece for piece, _ in pairs], path)
    _check_once([rank for _, rank in pairs], path)
    return dict(pairs)


def _pairs_of_lines(path: str) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line:
            continue
        piece, _, rank = line.partition(" ")
        if not (rank.isascii() and rank.isdecimal() and len(rank) < 10):
            raise InputError(f"{path}:{number}: {line[:80]!r} is not a base64 piece, a space and its rank")
        yield _bytes(piece, f"{path}:{number}"), int(rank)


def _bytes(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{place}: {text[:80]!r} is not base64") from None


def _check_once(values: Sequence[bytes] | Sequence[int], path: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise InputError(f"{path}: duplicate {value!r}")
        seen.add(value)
