"""Convert a SentencePiece model to a tokenizer.json."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from megatron.errors import InputError
from megatron.files import read_file
from megatron.tokenizer.sentence_piece import SPECIAL_PIECES

logger = logging.getLogger("megatron")

SPACE = "▁"
# Types of models and of pieces in sentencepiece_model.proto.
UNIGRAM, BPE_MODEL, WORD = 1, 2, 3
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# The score of an unknown character, relative to the lowest score of a piece.
UNKNOWN_PENALTY = 10.0


def to_tokenizer_json(file: Path) -> str | None:
    """Convert a SentencePiece model to the content of a tokenizer.json; None for a model that has no equivalent.

    Control pieces become special tokens. User-defined pieces of a BPE model become added tokens; the ids of a text that
    begins with one lack the dummy prefix.

    Raises:
        InputError: protobuf is not installed.
    """
    proto = read_proto(file)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type == WORD or trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        logger.warning(
            f"{file}: has no equivalent tokenizer.json (only models of unigram, bpe or char, with "
            "escape_whitespaces and without treat_whitespace_as_suffix, have one); it is copied, and AutoTokenizer "
            "of transformers cannot load it"
        )
        return None
    tokenizer = Tokenizer(_unigram(proto) if trainer.model_type == UNIGRAM else _bpe(proto))

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r" +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    splits: list[Any] = []
    if rules.add_dummy_prefix:
        # The first step adds a space to text that does not begin with one, and the second replaces spaces. A space at
        # the beginning serves as the prefix if extra spaces are removed; otherwise it must not be mistaken for it.
        splits += [
            pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False),
        ]
    elif rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
    if not (rules.add_dummy_prefix and rules.remove_extra_whitespaces):
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if trainer.model_type == UNIGRAM:
        splits += _split_lookalikes(proto)
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoding)

    # The unknown piece is not among them: text may contain it, as WikiText contains <unk>.
    special = [piece.piece for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    # The score of a user-defined piece suffices in a unigram model, unless AutoTokenizer adds it as a token of a role.
    user = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    if trainer.model_type == UNIGRAM:
        user = [text for text in user if any(text in texts for texts in SPECIAL_PIECES.values())]
    # Added tokens are found after normalization, which concerns the whole text.
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in user])
    return tokenizer.to_str(pretty=True)


def read_proto(file: Path) -> Any:
    """Read the `ModelProto` of a SentencePiece model."""
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError as error:
        raise InputError(
            f"{file}: converting a SentencePiece model needs libraries ({error}); pip install sentencepiece protobuf"
        ) from None
    return ModelProto.FromString(read_file(file))


def _unigram(proto: Any) -> Unigram:
    scores = [piece.score for piece in proto.pieces if piece.type == NORMAL]
    lowest, highest = min(scores), max(scores)

    def score(piece: Any) -> float:
        if piece.type == NORMAL:
            return piece.score
        if piece.type == USER_DEFINED:  # SentencePiece's score, which prefers them to any other pieces
            return len(piece.piece.encode()) * highest - 0.1
        # Text that looks like another piece, such as <0x0A>, is worth less than its characters.
        return (lowest - UNKNOWN_PENALTY) * (len(piece.piece) + 1)

    return Unigram(
        [(piece.piece, score(piece)) for piece in proto.pieces],
        unk_id=proto.trainer_spec.unk_id,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _split_lookalikes(proto: Any) -> list[Any]:
    """Split text such as <unk> after its first character, so that it is not taken for the piece of that name.

    The score of the piece prevents this only where all characters are known, because an unknown character is worth even
    less. Where they are not, no piece crosses the split.
    """
    known = {piece.piece for piece in proto.pieces if piece.type == NORMAL}
    texts = [p.piece for p in proto.pieces if p.type not in (NORMAL, CONTROL, USER_DEFINED)]
    rest: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > 1 and not known.issuperset(text):
            rest.setdefault(re.escape(text[0]), []).append(re.escape(text[1:]))
    return [
        pre_tokenizers.Split(Regex(f"{first}(?={'|'.join(ends)})"), "merged_with_previous")
        for first, ends in rest.items()
    ]


def _bpe(proto: Any) -> BPE:
    """A BPE model; that of characters has no merges."""
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges: list[tuple[str, str]] = []
    if proto.trainer_spec.model_type == BPE_MODEL:
        normal = {piece.piece for piece in proto.pieces if piece.type == NORMAL}
        # SentencePiece merges any two neighbors that make a piece, those of the highest score first.
        for piece in sorted(proto.pieces, key=lambda piece: -piece.score):
            text = piece.piece
            if piece.type == NORMAL:
                pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
                merges += sorted(
                    (pair for pair in pairs if normal.issuperset(pair)),
                    key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
                )
    return BPE(
        vocab,
        merges,
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )
