"""SentencePiece tokenizer, from a .model file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.errors import InputError
from megatron.files import read_file
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

SPECIAL_PIECES = {"cls": ("[CLS]", "<cls>"), "sep": ("[SEP]", "<sep>"), "mask": ("[MASK]", "<mask>")}


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece model. Documents end with its end-of-sequence token."""

    def __init__(self, model_file: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise InputError("SentencePieceTokenizer needs a library: pip install sentencepiece") from None

        path = Path(model_file)
        if not path.is_file():
            raise InputError(f"--tokenizer-model: {model_file} is not a file; give a SentencePiece .model")
        try:
            self._processor = SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(read_file(path))
        except OSError as error:
            raise InputError(f"--tokenizer-model: {model_file} cannot be read: {error.strerror}") from None
        except RuntimeError:
            raise InputError(
                f"--tokenizer-model: {model_file} cannot be read as a SentencePiece model"
            ) from None
        processor = self._processor
        ids = {
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "eod": processor.eos_id(),
            "pad": processor.pad_id(),
        }
        special_ids = {role: i for role, i in ids.items() if i >= 0}
        for role, pieces in SPECIAL_PIECES.items():
            for piece in pieces:
                i = processor.piece_to_id(piece)
                if i != processor.unk_id():
                    special_ids[role] = i
        super().__init__(
            "SentencePieceTokenizer",
            files=[path],
            vocab_size=processor.get_piece_size(),
            special_ids=special_ids,
        )

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> SentencePieceTokenizer:
        return cls(*config.require("tokenizer_model"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))
