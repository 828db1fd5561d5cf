"""BERT's WordPiece tokenizer, from vocab.txt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from megatron.errors import InputError
from megatron.tokenizer.base import Tokenizer, read_text
from megatron.tokenizer.config import TokenizerConfig

SPECIAL_TOKENS = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ADDED = {"bos": "[BOS]", "eos": "[EOS]"}  # unused in pretraining; Megatron-LM adds them
UNKNOWN = "[UNK]"
LONGEST_WORD = 200  # characters; a longer word becomes [UNK]
# Private-use characters, which icon fonts leave in web text. BertNormalizer drops them; for the original BERT tokenizer
# and Megatron-LM's they are letters outside every vocabulary. A cuneiform sign, which is such a letter, replaces them.
PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
UNKNOWN_LETTER = "\U00012000"


class BertWordPieceTokenizer(Tokenizer):
    """BERT tokenizer: `BertWordPieceLowerCase` or `BertWordPieceCase`.

    Attributes:
        vocab: piece of each id. As in Megatron-LM, [BOS] and [EOS] are added if the file lacks them, unless
            `vocab_size` equals the number of lines in the file.
    """

    def __init__(self, vocab_file: str, *, lowercase: bool, vocab_size: int | None = None) -> None:
        self.vocab = read_vocab(vocab_file)
        if vocab_size != len(self.vocab):
            self.vocab += [piece for piece in ADDED.values() if piece not in self.vocab]
        ids = {piece: i for i, piece in enumerate(self.vocab)}
        roles = SPECIAL_TOKENS | ADDED
        super().__init__(
            "BertWordPieceLowerCase" if lowercase else "BertWordPieceCase",
            files=[Path(vocab_file)],
            vocab_size=len(self.vocab),
            special_ids={role: ids[piece] for role, piece in roles.items() if piece in ids},
        )
        self._wordpiece = HFTokenizer(
            WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD)
        )
        self._wordpiece.normalizer = BertNormalizer(lowercase=lowercase)
        self._wordpiece.pre_tokenizer = BertPreTokenizer()
        self._wordpiece.decoder = WordPieceDecoder()

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> BertWordPieceTokenizer:
        (vocab_file,) = config.require("vocab_file")
        lowercase = config.tokenizer_type == "BertWordPieceLowerCase"
        return cls(vocab_file, lowercase=lowercase, vocab_size=config.vocab_size)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = [text if text.isascii() else PRIVATE_USE.sub(UNKNOWN_LETTER, text) for text in texts]
        return [encoding.ids for encoding in self._wordpiece.encode_batch_fast(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._wordpiece.decode(ids)


def read_vocab(path: str) -> list[str]:
    """Read vocab.txt: one piece per line, whose id is the line number, counted from 0.

    Raises:
        InputError: a piece is duplicated, or a special token is missing.
    """
    pieces = [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    first: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if piece in first:
            raise InputError(f"{path}:{number}: {piece!r} is already on line {first[piece]}")
        first[piece] = number
    for piece in (*SPECIAL_TOKENS.values(), UNKNOWN):
        if piece not in first:
            raise InputError(
                f"{path}: has no {piece}, so it is not the vocabulary of a BERT WordPiece tokenizer"
            )
    return pieces
