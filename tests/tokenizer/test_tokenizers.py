"""Tokenizers against the libraries that define their ids, and against known ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megatron.errors import InputError
from megatron.preprocessing.encoder import choose_engine, encoder
from megatron.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.tokenizer.bert import SPECIAL_TOKENS
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.gpt2 import tiktoken_encoder
from megatron.tokenizer.train import train_bpe

ROOT = Path(__file__).resolve().parents[2]

LINES = [
    "Hello world",
    "",
    " ",
    "   leading, trailing   ",
    "I'll say: they've got 1,234.5 of 'em; don't they're it's O'Neill's?",
    "tabs\tand\nnew\r\nlines\n\n\n  indented\n",
    "naïve café Ångström İstanbul ΣΊΣΥΦΟΣ ﬁne Ⅷ ½ x²",
    "東京は日本の首都です。漢字、ひらがな！ 한국어 텍스트",
    "العربية والعبرية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀 \u200b\u00a0\u3000\ufeff",
    "snake_case CamelCase http://example.org/a?b=c&d=%20#e <|endoftext|> [MASK] ##ing",
    "\x00\x01\x7f control",
    "a" * 90 + " " * 50 + "!" * 50,
]


def config(kind: str, **files: str | Path | int) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type=kind, **{k: v if isinstance(v, int) else str(v) for k, v in files.items()}
    )


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of a small BPE trained on Python's documentation."""
    folder = tmp_path_factory.mktemp("bpe")
    for name, content in train_bpe([topics[name] for name in sorted(topics)], 1000).items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bpe(bpe_files: Path) -> Tokenizer:
    return build_tokenizer(
        config("GPT2BPETokenizer", vocab_file=bpe_files / "vocab.json", merge_file=bpe_files / "merges.txt")
    )


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> Tokenizer:
    files = {"vocab_file": shared / "data/gpt2-vocab.json", "merge_file": shared / "data/gpt2-merges.txt"}
    return build_tokenizer(config("GPT2BPETokenizer", **files))


@pytest.fixture
def bert_vocab(tmp_path: Path) -> Path:
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "Hello",
        "world",
        "##s",
        "##ly",
        "!",
        "cafe",
    ]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return path


def real_lines(shared: Path) -> list[str]:
    with open(shared / "vectors/owt60.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


# GPT-2


def test_gpt2_gives_known_ids(gpt2):
    assert gpt2.tokenize("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.detokenize([15496, 995, gpt2.eod]) == "Hello world<|endoftext|>"


def test_gpt2_gives_the_ids_of_transformers(gpt2, shared):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Tokenizer(
        vocab=str(shared / "data/gpt2-vocab.json"), merges=str(shared / "data/gpt2-merges.txt")
    )
    lines = [line for line in LINES if "<|endoftext|>" not in line] + real_lines(shared)[:20]
    assert gpt2.tokenize_batch(lines) == theirs(lines)["input_ids"]


def test_end_of_text_in_text_is_ordinary_text(gpt2):
    expected = [64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    assert gpt2.tokenize("a<|endoftext|>b") == expected
    assert tiktoken_encoder(gpt2)(["a<|endoftext|>b"])[0].tolist() == expected


def test_tiktoken_gives_the_ids_of_tokenizers_for_every_character(bpe):
    """Each has its own Unicode tables of letters and numbers."""
    characters = [chr(c) for c in [*range(0xD800), *range(0xE000, 0x20000), 0xE0001, 0xE0100, 0x10FFFD]]
    texts = [
        "".join(f"a{c}1 {c}{c}! {c}" for c in characters[i : i + 50]) for i in range(0, len(characters), 50)
    ]
    encoded = tiktoken_encoder(bpe)(texts)
    for text, ids, right in zip(texts, encoded, bpe.tokenize_batch(texts), strict=True):
        assert ids.tolist() == right, text


def test_tiktoken_gives_the_ids_of_tokenizers_on_text(gpt2, shared):
    rng = random.Random(0)
    texts = LINES + real_lines(shared)
    texts += ["".join(rng.choices("ab 'st\n\t1é漢!", k=rng.randint(0, 60))) for _ in range(3000)]
    texts += ["x" * 100_000, " " * 100_000 + "x", "\n" * 100_000]
    encoded = tiktoken_encoder(gpt2)(texts)
    for text, ids, right in zip(texts, encoded, gpt2.tokenize_batch(texts), strict=True):
        assert ids.tolist() == right, text[:100]


def test_bpe_round_trip(bpe):
    for line in LINES:
        assert bpe.detokenize(bpe.tokenize(line)) == line
    assert bpe.detokenize(bpe.tokenize("é")[:1]) == "\ufffd"


def test_engine_is_tiktoken_where_it_gives_the_same_ids(bpe):
    engine, reason = choose_engine(bpe, LINES)
    assert engine == "tiktoken" and "whose ids equal those of tokenizers" in reason
    ids = encoder(bpe, engine)(LINES)
    assert [i.tolist() for i in ids] == bpe.tokenize_batch(LINES)


def test_engine_falls_back_where_ids_do_not_follow_the_merges(bpe_files, tmp_path):
    """With permuted ids the tokenizer is equivalent, but tiktoken reads the order of the merges from the ids."""
    vocab = json.loads((bpe_files / "vocab.json").read_text())
    reversed_ids = {piece: len(vocab) - 1 - i for piece, i in vocab.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(reversed_ids))
    tokenizer = build_tokenizer(
        config("GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=bpe_files / "merges.txt")
    )
    engine, reason = choose_engine(tokenizer, ["the documentation of Python"])
    assert engine == "tokenize_batch" and "the ids of tiktoken differ" in reason


def test_engine_without_tiktoken(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    engine, reason = choose_engine(bpe, LINES)
    assert engine == "tokenize_batch" and "pip install tiktoken" in reason


# BERT


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_gives_the_ids_of_transformers(shared, lowercase):
    transformers = pytest.importorskip("transformers")
    vocab = shared / "data/bert-base-uncased-vocab.txt"
    kind = "BertWordPieceLowerCase" if lowercase else "BertWordPieceCase"
    ours = build_tokenizer(config(kind, vocab_file=vocab))
    theirs = transformers.BertTokenizer(vocab=str(vocab), do_lower_case=lowercase)
    lines = [line for line in LINES if "[MASK]" not in line]
    # transformers drops private-use characters, which are [UNK] to the original BERT.
    lines += [line for line in real_lines(shared) if "\uf122" not in line]
    assert ours.tokenize_batch(lines) == theirs(lines, add_special_tokens=False)["input_ids"]


def test_bert_counts_bos_and_eos_as_megatron_does(shared):
    bert = build_tokenizer(
        config("BertWordPieceLowerCase", vocab_file=shared / "data/bert-base-uncased-vocab.txt")
    )
    assert bert.tokenize("Hello world") == [7592, 2088]
    assert (bert.vocab_size, bert.bos, bert.eos) == (30524, 30522, 30523)
    assert (bert.pad, bert.cls, bert.sep, bert.mask) == (0, 101, 102, 103)
    assert bert.vocab[2088] == "world" and len(bert.vocab) == bert.vocab_size
    assert padded_vocab_size(bert.vocab_size, 128, 1) == 30592
    with pytest.raises(InputError, match=r"BertWordPieceLowerCase \(/.*\) has no end-of-document token"):
        _ = bert.eod


def test_bert_rules(bert_vocab):
    lower = build_tokenizer(config("BertWordPieceLowerCase", vocab_file=bert_vocab))
    cased = build_tokenizer(config("BertWordPieceCase", vocab_file=bert_vocab))
    pieces = lower.vocab

    def words(tokenizer: Tokenizer, text: str) -> str:
        return " ".join(pieces[i] for i in tokenizer.tokenize(text))

    assert words(lower, "Hello worlds!") == "hello world ##s !"
    assert words(cased, "Hello worlds!") == "Hello world ##s !"
    assert words(lower, "CAFÉ") == "cafe" and words(cased, "café") == "[UNK]"
    assert words(lower, "[MASK]") == "[UNK] [UNK] [UNK]", "a special token is never made from text"
    assert words(lower, "\ue000 hello\U0010fffd") == "[UNK] [UNK]", "private use"
    assert words(lower, "hello" + 97 * "ly" + "s") == "hello" + 97 * " ##ly" + " ##s", "200 characters"
    assert words(lower, "hello" + 98 * "ly") == "[UNK]", "201 characters"
    assert lower.detokenize(lower.tokenize("hello worlds!")) == "hello worlds!"


# Other tokenizers


def test_sentencepiece(shared):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = shared / "data/sentencepiece-test_model.model"
    ours = build_tokenizer(config("SentencePieceTokenizer", tokenizer_model=model))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert ours.tokenize_batch(LINES) == [theirs.encode(line) for line in LINES]
    assert ours.detokenize(ours.tokenize("Hello world")) == "Hello world"
    assert (ours.vocab_size, ours.bos, ours.eos, ours.eod) == (1000, 1, 2, 2)
    with pytest.raises(InputError, match="has no mask token"):
        _ = ours.mask


def test_huggingface_reads_a_folder_or_a_file(bpe_files, bpe):
    folder = build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=bpe_files))
    file = build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=bpe_files / "tokenizer.json"))
    lines = [line for line in LINES if "<|endoftext|>" not in line]
    assert folder.tokenize_batch(lines) == file.tokenize_batch(lines) == bpe.tokenize_batch(lines)
    assert folder.eod == folder.eos == file.eod == bpe.eod
    assert folder.vocab_size == bpe.vocab_size
    assert [path.name for path in folder.files] == ["tokenizer.json", "tokenizer_config.json"]
    assert folder.tokenize("a<|endoftext|>") == [*bpe.tokenize("a"), bpe.eod]
    assert folder.detokenize([*bpe.tokenize("a b"), bpe.eod]) == "a b<|endoftext|>"


def test_huggingface_gives_the_ids_of_transformers(bpe_files):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(bpe_files, local_files_only=True)
    ours = build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=bpe_files))
    assert ours.tokenize_batch(LINES) == theirs(LINES, add_special_tokens=False)["input_ids"]


def test_huggingface_ignores_truncation_in_the_file(bpe_files, tmp_path):
    settings = json.loads((bpe_files / "tokenizer.json").read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=tmp_path))
    text = "one two three four five six seven"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    with pytest.raises(InputError, match="has no end-of-document token"):
        _ = tokenizer.eod


def test_huggingface_pattern_that_backtracks_without_end(bpe_files, tmp_path):
    content = json.loads((bpe_files / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content | {"pre_tokenizer": split}))
    tokenizer = build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=tmp_path))
    with pytest.raises(
        InputError, match=r"tokenizer\.json: fails to tokenize a text \(.*retry-limit-in-match"
    ):
        tokenizer.tokenize("a" * 40 + "b")
    assert tokenizer.tokenize("b")

    class Interrupted:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    tokenizer._tokenizer = Interrupted()
    with pytest.raises(KeyboardInterrupt):  # and not an error in the file
        tokenizer.tokenize("b")


def test_null_tokenizer():
    tokenizer = build_tokenizer(config("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.files) == (101, 100, [])
    assert tokenizer.tokenize("3 1\n99\t0 100") == [3, 1, 99, 0, 100]
    assert tokenizer.detokenize([3, 1, 99]) == "3 1 99"
    for word in ("101", "-1", "1.5", "x", "٣", "9" * 5000):
        with pytest.raises(InputError, match=r"is not a token id; NullTokenizer accepts 0 to 100"):
            tokenizer.tokenize(f"1 {word}")


@pytest.mark.parametrize(
    ("vocab_size", "divisor", "shards", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (28996 + 2, 128, 1, 29056),
        (5000, 128, 1, 5120),
        (7, 1, 1, 7),
    ],
)
def test_padded_vocab_size(vocab_size, divisor, shards, padded):
    assert padded_vocab_size(vocab_size, divisor, shards) == padded


# Bad input


def test_missing_or_inconsistent_flags(bpe_files):
    for kind, flag in [
        ("GPT2BPETokenizer", "--vocab-file"),
        ("BertWordPieceCase", "--vocab-file"),
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("HuggingFaceTokenizer", "--tokenizer-model"),
        ("NullTokenizer", "--vocab-size"),
    ]:
        with pytest.raises(InputError, match=f"{flag} is required"):
            build_tokenizer(config(kind))
    with pytest.raises(InputError, match=r"--tokenizer-type is required: .*; one of GPT2BPETokenizer, "):
        build_tokenizer(TokenizerConfig())
    with pytest.raises(InputError, match=r"--vocab-size: 999, but HuggingFaceTokenizer .* has 1000 ids"):
        build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=bpe_files, vocab_size=999))


def gpt2_config(vocab: str | None, merges: str | None, folder: Path, good: Path) -> TokenizerConfig:
    """Config of the good files, with the given contents in place of theirs."""
    for name, content in (("vocab.json", vocab), ("merges.txt", merges)):
        text = (good / name).read_text(encoding="utf-8") if content is None else content
        (folder / name).write_text(text, encoding="utf-8")
    return config("GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", None, "vocab.json: is not JSON"),
        ("[" * 100_000, None, "vocab.json: is not JSON"),
        ('["a"]', None, "vocab.json: is not a vocab.json"),
        ('{"a": "b"}', None, "vocab.json: is not a vocab.json"),
        ('{"a": 1}', None, "vocab.json: the ids of its 1 pieces are not 0 to 0"),
        ('{"a": 0}', None, "vocab.json: lacks 255 of the 256 single bytes"),
        (None, "#version: 0.2\na b c\n", "merges.txt:2: 'a b c' is not two pieces"),
        (None, "#version: 0.2\n" + "a " * 9999, rf"merges.txt:2: '{'a ' * 30}' is not two pieces"),
        (None, "#version: 0.2\nĠ t\nq zz\n", r"merges.txt:3: 'zz' is not in \S+/vocab.json; the files do"),
        (
            None,
            "#version: 0.2\n",
            r"merges.txt: no merge produces \d+ pieces of \S+/vocab.json, such as 'Ġ\S+'",
        ),
    ],
)
def test_bad_bpe_files(vocab, merges, message, tmp_path, bpe_files):
    with pytest.raises(InputError, match=message):
        build_tokenizer(gpt2_config(vocab, merges, tmp_path, bpe_files))


def test_truncated_merges(tmp_path, bpe_files):
    merges = (bpe_files / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    with pytest.raises(InputError, match=r"no merge produces \d+ pieces of .* truncated"):
        build_tokenizer(gpt2_config(None, "".join(merges[:-10]), tmp_path, bpe_files))


def test_merges_of_a_larger_vocabulary(tmp_path, bpe_files, shared):
    merges = (shared / "data/gpt2-merges.txt").read_text(encoding="utf-8")
    with pytest.raises(InputError, match=r"merges.txt:\d+: '\S+' is not in \S+/vocab.json; the files do not"):
        build_tokenizer(gpt2_config(None, merges, tmp_path, bpe_files))


def test_a_vocabulary_may_have_more_special_tokens(tmp_path, bpe_files):
    vocab = json.loads((bpe_files / "vocab.json").read_text(encoding="utf-8"))
    vocab |= {"<pad>": len(vocab), "madeupword0000": len(vocab) + 1}
    assert build_tokenizer(gpt2_config(json.dumps(vocab), None, tmp_path, bpe_files)).vocab_size == 1002


def test_bpe_without_end_of_text(tmp_path, bpe_files):
    vocab = json.loads((bpe_files / "vocab.json").read_text())
    del vocab["<|endoftext|>"]
    with pytest.raises(InputError, match=r"vocab.json: has no <\|endoftext\|>"):
        build_tokenizer(gpt2_config(json.dumps(vocab), None, tmp_path, bpe_files))


@pytest.mark.parametrize("missing", [*SPECIAL_TOKENS.values(), "[UNK]"])
def test_bert_vocabulary_without_a_special_token(missing, bert_vocab):
    bert_vocab.write_text(bert_vocab.read_text().replace(missing, "x"))
    with pytest.raises(InputError, match="has no " + missing.replace("[", r"\[")):
        build_tokenizer(config("BertWordPieceCase", vocab_file=bert_vocab))


def test_bert_vocabulary_with_a_duplicate_piece(bert_vocab):
    bert_vocab.write_text(bert_vocab.read_text() + "hello\n")
    with pytest.raises(InputError, match=r"vocab.txt:13: 'hello' is already on line 6"):
        build_tokenizer(config("BertWordPieceCase", vocab_file=bert_vocab))


@pytest.mark.parametrize(
    "kind", ["GPT2BPETokenizer", "BertWordPieceCase", "SentencePieceTokenizer", "HuggingFaceTokenizer"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"text\n", b"{}"])
def test_missing_or_invalid_files(kind, content, tmp_path):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        build_tokenizer(config(kind, vocab_file=path, merge_file=path, tokenizer_model=path))


def test_tokenizer_config_of_another_tokenizer(bpe_files, tmp_path):
    (tmp_path / "tokenizer.json").write_text((bpe_files / "tokenizer.json").read_text())
    for content, message in [
        ('{"eos_token": "</s>"}', "eos_token is '</s>', which the tokenizer.json next to it lacks"),
        ('{"eos_token": {"content": 3}}', "eos_token is 3"),
        ("[]", "is not a JSON object"),
    ]:
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(InputError, match=f"tokenizer_config.json: {message}"):
            build_tokenizer(config("HuggingFaceTokenizer", tokenizer_model=tmp_path))


def test_does_not_import_torch(bpe_files):
    program = (
        "import sys; from megatron.tokenizer import build_tokenizer; "
        "from megatron.tokenizer.config import TokenizerConfig as C; import megatron.preprocessing.preprocess; "
        f"build_tokenizer(C(tokenizer_type='HuggingFaceTokenizer', tokenizer_model={str(bpe_files)!r})); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
