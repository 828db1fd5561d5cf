"""1,000 varied lines: each tokenizer gives the same ids as the library whose files it reads."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from megatron.errors import InputError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.gpt2 import piece_bytes, tiktoken_encoder
from megatron.tokenizer.train import train_bpe

# Blocks of Unicode: Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Bengali, Tamil, Thai, Myanmar,
# Georgian, Hangul, Ethiopic, Khmer; spaces, punctuation, currency, letterlike, numerals, arrows, mathematics,
# box drawing, dingbats; CJK; private use, presentation and full-width forms; Gothic, mathematical letters, rare CJK;
# emoji and flags; controls; combining marks, joiners and variation selectors.
BLOCKS = """
    20-7e a0-ff 100-24f 370-3ff 400-4ff 531-58a 591-5f4 600-6ff 900-97f 980-9fe b80-bff e01-e5b 1000-109f
    10a0-10ff 1100-11ff 1200-135a 1780-17e9 2000-206f 2010-205e 20a0-20c0 2100-214f 2150-218b 2190-21ff 2200-22ff
    2500-257f 2600-27bf 3000-303f 3041-3096 30a0-30ff 4e00-9fff a000-a48c ac00-d7a3 e000-f8ff fb00-fdff ff01-ffee
    10330-1034a 1d400-1d7ff 20000-2a6df 1f300-1f6fc 1f1e6-1f1ff 0-1f 7f-9f 300-36f 200b-200f fe00-fe0f
"""
WORDS = "don't I'LL O'Neill 1,234.56 0x1F snake_case CamelCase HTTPServer http://a.b/c?d=%20 ... ?! --- <s> </s> [MASK]"
WORDS += " <|endoftext|> 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ﷺ ½ İ ß ﬁ"


def varied_lines() -> list[str]:
    """Return long runs of one character and empty lines, then words and characters of random blocks in random order."""
    rng = random.Random(20261121)
    blocks = [[int(end, 16) for end in block.split("-")] for block in BLOCKS.split()]
    lines = ["", " ", "\n", "\r\n", "\x00", "\ufeff", "a" * 5000, "Ab" * 2500, " " * 3000, "\n" * 3000]
    lines += [
        "😀" * 1000,
        "!" * 3000,
        "漢" * 2000,
        "1" * 3000,
        "\u0301" * 1000,
        " a" * 2000,
        "\U0010ffff\ud7ff\ue000",
    ]
    while len(lines) < 1000:
        parts = []
        for _ in range(rng.randint(1, 12)):
            low, high = rng.choice(blocks)
            characters = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))
            parts.append(rng.choice([characters, characters, rng.choice(WORDS.split())]))
        lines.append(rng.choice(["", " ", "  ", "\t", "\n"]).join(parts))
    return lines


LINES = varied_lines()
# Training text of tokenizers: English and some of the lines, so that pieces of every script occur.
TEXTS = [topics[name] for name in sorted(topics)][:30] + [line for line in LINES[17:400] if "<" not in line]


def build(kind: str, path: Path, **settings: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), **settings))


def assert_same(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], lines: Sequence[str] = LINES
) -> None:
    for line, mine, other in zip(lines, ours, theirs, strict=True):
        assert list(mine) == list(other), repr(line[:200])


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of a byte-level BPE, as tools/train_tokenizer.py writes them."""
    folder = tmp_path_factory.mktemp("bpe")
    for name, content in train_bpe(TEXTS, 2000).items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pieces(bpe_files: Path) -> list[bytes]:
    """Pieces of that BPE without <|endoftext|>, the 256 bytes first and in order, as in tiktoken's files."""
    vocab = json.loads((bpe_files / "vocab.json").read_text(encoding="utf-8"))
    found = [piece_bytes(piece) for piece in sorted(vocab, key=vocab.get) if piece != "<|endoftext|>"]
    single = {piece for piece in found if len(piece) == 1}
    assert len(single) == 256
    return [*sorted(single), *(piece for piece in found if piece not in single)]


def test_the_lines_are_varied() -> None:
    text = "".join(LINES)
    assert len(LINES) == 1000 and len({ord(c) >> 8 for c in text}) > 150
    assert all(chr(c) in text for c in [*range(32), 0x7F, 0x200D, 0xFE0F, 0x1F469])


# ---- tokenizer.json


def hugging_face(kind: str) -> Any:
    """Train a tokenizer of the tokenizers library on TEXTS."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "wordpiece":
        tokenizer = HFTokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=["[UNK]"], show_progress=False)
    elif kind == "unigram":
        tokenizer = HFTokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=2000, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    else:
        # As in Llama 2, characters outside the vocabulary become bytes.
        tokenizer = HFTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=1000, special_tokens=special, limit_alphabet=300, show_progress=False
        )
    tokenizer.train_from_iterator(TEXTS[:60], trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte-fallback"])
def test_tokenizer_json(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hugging_face(kind).save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = build("HuggingFaceTokenizer", tmp_path)
    assert_same(ours.tokenize_batch(LINES), theirs(LINES, add_special_tokens=False)["input_ids"])


def test_byte_level_tokenizer_json(bpe_files: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(bpe_files, local_files_only=True)
    ours = build("HuggingFaceTokenizer", bpe_files)
    assert_same(ours.tokenize_batch(LINES), theirs(LINES, add_special_tokens=False)["input_ids"])
    assert [ours.detokenize(ids) for ids in ours.tokenize_batch(LINES)] == LINES


# ---- GPT-2 and BERT


def test_gpt2(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = {"vocab": shared / "data/gpt2-vocab.json", "merges": shared / "data/gpt2-merges.txt"}
    theirs = transformers.GPT2Tokenizer(**{name: str(file) for name, file in files.items()})
    ours = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(files["vocab"]), merge_file=str(files["merges"])
        )
    )
    # transformers reads <|endoftext|> in text as the special token.
    lines = [line for line in LINES if "<|endoftext|>" not in line]
    expected = theirs(lines)["input_ids"]
    assert_same(ours.tokenize_batch(lines), expected, lines)
    assert_same(tiktoken_encoder(ours)(lines), expected, lines)


def test_bert(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocab = str(shared / "data/bert-base-uncased-vocab.txt")
    ours = build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocab))
    theirs = transformers.BertTokenizer(vocab=vocab)
    # Excludes private-use characters, long words and special tokens, as explained in docs/data.md.
    lines = [
        line for line in LINES if "[MASK]" not in line and not any("\ue000" <= c <= "\uf8ff" for c in line)
    ]
    lines = [
        line for line in lines if max(map(len, line.split()), default=0) <= 100 and "\U0010ffff" not in line
    ]
    assert len(lines) > 500
    assert_same(ours.tokenize_batch(lines), theirs(lines, add_special_tokens=False)["input_ids"], lines)


# ---- SentencePiece


@pytest.mark.parametrize("kind", ["shared", "unigram", "bpe", "char"])
def test_sentencepiece_model(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    if kind == "shared":
        model = request.getfixturevalue("shared") / "data/sentencepiece-test_model.model"
    else:
        model = tmp_path / "m.model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for text in TEXTS for part in text.replace("\x00", "").split("\n")),
            model_prefix=str(tmp_path / "m"),
            model_type=kind,
            vocab_size=5000,
            hard_vocab_limit=False,
            byte_fallback=kind == "bpe",
            minloglevel=2,
        )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [theirs.encode(line) for line in LINES]
    for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        ours = build(name, model)
        assert_same(ours.tokenize_batch(LINES), expected)
        assert (ours.vocab_size, ours.eod) == (theirs.get_piece_size(), theirs.eos_id())


# ---- tiktoken


def encodings(monkeypatch: pytest.MonkeyPatch, ranks: dict[bytes, int]) -> dict[str, Any]:
    """OpenAI's encodings as tiktoken defines them, with these ranks instead of downloaded ones."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    definitions = {"gpt2": public.r50k_base(), "cl100k": public.cl100k_base(), "o200k": public.o200k_base()}
    return {
        name: tiktoken.Encoding(name, pat_str=d["pat_str"], mergeable_ranks=ranks, special_tokens={})
        for name, d in definitions.items()
    }


def lines_of(ranks: dict[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items())


def json_of(pieces: Sequence[bytes]) -> str:
    return json.dumps(
        [
            {
                "rank": i,
                "token_bytes": base64.b64encode(piece).decode(),
                "token_str": piece.decode(errors="replace"),
            }
            for i, piece in enumerate(pieces)
        ]
    )


def test_tiktoken_files(pieces: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = pytest.importorskip("tiktoken.load")
    ranks = {
        piece: rank + (rank > 1000) for rank, piece in enumerate(pieces)
    }  # with a gap, as in OpenAI's files
    path = tmp_path / "x.tiktoken"
    path.write_text(lines_of(ranks))
    assert load.load_tiktoken_bpe(str(path)) == ranks
    for pattern, theirs in encodings(monkeypatch, ranks).items():
        ours = build("TikTokenizer", path, tiktoken_pattern=pattern)
        ids = ours.tokenize_batch(LINES)
        assert_same(ids, theirs.encode_ordinary_batch(LINES, num_threads=1))
        assert [ours.detokenize(some) for some in ids] == LINES
    assert ours.eod == max(ranks.values()) + 1 == ours.vocab_size - 1
    assert ours.detokenize([ours.eod]) == "<|endoftext|>"


LIMIT = 999_998  # characters of whitespace; with one more, tiktoken's regular expressions panic


@pytest.mark.parametrize(
    "pattern", ["gpt2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("v1", "o200k"))]
)
def test_whitespace_too_long_for_tiktoken(pattern: str, pieces: list[bytes], tmp_path: Path) -> None:
    """The text is split where tiktoken cannot encode it, and only there."""
    pytest.importorskip("tiktoken")
    path = tmp_path / "x.tiktoken"
    path.write_text(lines_of({piece: rank for rank, piece in enumerate(pieces)}))
    ours = build("TikTokenizer", path, tiktoken_pattern=pattern)
    whole = ["x" + " " * LIMIT, "x" + "\n\t" * (LIMIT // 2) + "x"]
    if pattern != "gpt2":
        whole += ["\t" * (LIMIT + 2) + "\n\tx", "\n" * (LIMIT + 2) + "x"]
    for text in whole:
        assert ours.tokenize(text) == ours._encoding.encode_ordinary(text)
    text = f"the cat {' ' * (2 * LIMIT)} sat\n{' ' * (LIMIT + 1)}"
    ids = ours.tokenize(text)
    assert ours.detokenize(ids) == text
    assert ids[:3] == ours.tokenize("the cat")[:3]


def test_whitespace_too_long_for_the_tiktoken_engine(bpe_files: Path) -> None:
    pytest.importorskip("tiktoken")
    vocab, merges = str(bpe_files / "vocab.json"), str(bpe_files / "merges.txt")
    ours = build_tokenizer(
        TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    )
    texts = [f"the cat{' ' * LIMIT}x", f"the cat {chr(10) * LIMIT} sat"]
    assert_same(tiktoken_encoder(ours)(texts), ours.tokenize_batch(texts), texts)


# The patterns of Megatron-LM's two versions.
NVIDIA_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_json_vocabularies_of_megatron(pattern: str, pieces: list[bytes], tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    path = tmp_path / "vocab.json"
    path.write_text(json_of(pieces))
    size = 1500
    theirs = tiktoken.Encoding(
        "x",
        pat_str=NVIDIA_PATTERNS[pattern],
        mergeable_ranks={piece: 100 + rank for rank, piece in enumerate(pieces[: size - 100])},
        special_tokens={},
    )
    ours = build(
        "TikTokenizer", path, tiktoken_pattern=pattern, tiktoken_num_special_tokens=100, vocab_size=size
    )
    assert_same(ours.tokenize_batch(LINES), theirs.encode_ordinary_batch(LINES, num_threads=1))
    assert (ours.vocab_size, ours.bos, ours.eod, ours.mask, ours.pad, ours.cls, ours.sep) == (
        size,
        1,
        2,
        3,
        4,
        5,
        6,
    )
    assert ours.detokenize([2, 99]) == "</s><SPECIAL_99>"
    assert ours.tokenize("</s>")[0] >= 100, "text never becomes a special token"
    whole = build("TikTokenizer", path, tiktoken_pattern=pattern)
    assert whole.vocab_size == 1000 + len(pieces)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "x: lacks 256 of the 256 single bytes, such as 0x00"),
        ("IQ== 0\nIg==\n", r"x:2: 'Ig==' is not a base64 piece, a space and its rank"),
        ("IQ== 0\nIg== -1\n", "x:2: 'Ig== -1' is not a base64 piece"),
        ("I 0\n", "x:1: 'I' is not base64"),
        ("IQ== 0\nIQ== 1\n", r"x: duplicate b'!'"),
        ("IQ== 0\nIg== 0\n", "x: duplicate 0"),
        ("[", "x: is not JSON"),
        ("[]", "x: lacks 256 of the 256 single bytes"),
        (
            '[{"rank": 1, "token_bytes": "IQ=="}]',
            "x: entry 0 is .*, not an object with rank 0 and token_bytes",
        ),
        ("[3]", "x: entry 0 is 3, not an object"),
        ('[{"rank": 0, "token_bytes": "I"}]', "x: entry 0: 'I' is not base64"),
    ],
)
def test_invalid_tiktoken_vocabularies(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        build("TikTokenizer", path, tiktoken_pattern="v2")


def test_wrong_vocab_size_or_pattern(pieces: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json_of(pieces))
    with pytest.raises(
        InputError, match=rf"--vocab-size: 9000, but TikTokenizer .* has {1000 + len(pieces)} ids"
    ):
        build("TikTokenizer", path, tiktoken_pattern="v2", vocab_size=9000)
    with pytest.raises(InputError, match=r"--vocab-size: 1200 is too small for .*-tokens 1000 and"):
        build("TikTokenizer", path, tiktoken_pattern="v2", vocab_size=1200)
    with pytest.raises(
        InputError, match=r"--tiktoken-pattern is required: .*; one of v1, v2, gpt2, cl100k, o200k"
    ):
        build("TikTokenizer", path)


def test_without_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(InputError, match="TikTokenizer needs a library: pip install tiktoken"):
        build("TikTokenizer", tmp_path / "x", tiktoken_pattern="v2")
