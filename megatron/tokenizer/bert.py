"""BERT's WordPiece, from vocab.txt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from megatron.flags import InputError
from megatron.tokenizer.base import Tokenizer, read_text

SPECIAL_TOKENS = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ADDED = {"bos": "[BOS]", "eos": "[EOS]"}  # which nothing in BERT's training uses
UNKNOWN = "[UNK]"
LONGEST_WORD = 200  # characters; a longer word is [UNK]
# Icon fonts put these into web text. BertNormalizer drops them; for the original BERT tokenizer, and Megatron-LM's,
# they are letters that no vocabulary has. Such a letter takes their place: a cuneiform sign.
PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
UNKNOWN_LETTER = "\U00012000"


class BertWordPieceTokenizer(Tokenizer):
    """The tokenizer of BERT: `BertWordPieceLowerCase` or `BertWordPieceCase`.

    Attributes:
        vocab: the piece of each id. As in Megatron-LM, [BOS] and [EOS] are added where the file lacks them, unless
            `vocab_size` is that of the file.
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

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = [text if text.isascii() else PRIVATE_USE.sub(UNKNOWN_LETTER, text) for text in texts]
        return [encoding.ids for encoding in self._wordpiece.encode_batch_fast(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._wordpiece.decode(ids)


def read_vocab(path: str) -> list[str]:
    """Read vocab.txt: one piece a line, its id the number of the line, counted from 0.

    Raises:
        InputError: a piece is there twice, or a special token is not there.
    """
    pieces = [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    first: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if piece in first:
            raise InputError(f"{path}:{number}: {piece!r} is there already, on line {first[piece]}")
        first[piece] = number
    for piece in (*SPECIAL_TOKENS.values(), UNKNOWN):
        if piece not in first:
            raise InputError(
                f"{path}: holds no {piece}; it is not the vocabulary of a BERT WordPiece tokenizer"
            )
    return pieces
