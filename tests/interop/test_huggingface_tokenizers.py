"""The tokenizer of a Hugging Face folder is the one that transformers uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_models import save_hf
from tokenizers.pre_tokenizers import ByteLevel

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.write import write_huggingface
from megatron.tokenizer import build_tokenizer

TEXTS = ("the 2 hens, 12345", "  spaces\t\n\n", "ﬁ ① é 中文 🎉", "a<|im_start|>b", "<|endoftext|>")
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "h"), ("e", "n"), ("1", "2")]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A model with GPT-2's tokenizer of a few merges, and two rows more than it has ids."""
    pieces = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), "<|endoftext|>"]
    folder = save_hf(tmp_path / "theirs", "gpt2", vocab_size=len(pieces) + 2)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in MERGES))
    return folder


def write_fast(folder: Path, added: tuple[str, ...] = (), **fields: object) -> None:
    """Write the tokenizer.json of the folder's files by transformers, with added tokens and other fields."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    fast.add_special_tokens({"additional_special_tokens": list(added)})
    fast.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | fields))
    # transformers 5 replaces the pipeline of a GPT2Tokenizer by its own; this class takes that of the file.
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def check_ids(folder: Path, texts: tuple[str, ...] = TEXTS) -> str:
    """Compare ids with transformers; returns the type of our tokenizer."""
    transformers = pytest.importorskip("transformers")
    checkpoint = open_huggingface(folder)
    config = saved_tokenizer(checkpoint)
    ours, theirs = build_tokenizer(config), transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False), text
    assert checkpoint.state["vocab_size"] == ours.vocab_size
    assert config.tokenizer_type is not None
    return config.tokenizer_type


def test_plain_files_are_gpt2s_tokenizer(gpt2: Path) -> None:
    write_fast(gpt2)
    assert check_ids(gpt2, TEXTS[:-1]) == "GPT2BPETokenizer"


def test_rows_of_added_tokens_are_kept(gpt2: Path) -> None:
    write_fast(gpt2, ("<|im_start|>", "<|im_end|>"))
    assert check_ids(gpt2) == "HuggingFaceTokenizer"
    checkpoint = open_huggingface(gpt2)
    assert checkpoint.state["vocab_size"] == 264 and not any("padding" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": {"type": "NFKC"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                ],
            }
        },
    ],
    ids=["normalizer", "prefix space", "digits"],
)
def test_another_tokenizer_of_the_same_vocabulary(gpt2: Path, fields: dict) -> None:
    write_fast(gpt2, **fields)
    assert check_ids(gpt2) == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<|im_start|>": 262}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"262": {"content": "<|im_start|>"}}}),
    ],
)
def test_added_tokens_without_a_tokenizer_json_are_refused(gpt2: Path, name: str, content: dict) -> None:
    (gpt2 / name).write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"adds 1 tokens, such as '<\|im_start\|>', that its GPT2BPETokenizer lacks"
    ):
        open_huggingface(gpt2)


@pytest.mark.parametrize("content", [[], {"a": None}, {"added_tokens_decoder": {"x": 1}}])
def test_malformed_added_tokens(gpt2: Path, content: object) -> None:
    name = (
        "tokenizer_config.json" if isinstance(content, dict) and "a" not in content else "added_tokens.json"
    )
    (gpt2 / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{name}: "):
        open_huggingface(gpt2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exports_are_read_back(gpt2: Path, tmp_path: Path, kind: str) -> None:
    """Both shapes, with GPT-2's tokenizer."""
    folder = gpt2
    if kind == "llama":
        folder = save_hf(tmp_path / "llama", "llama", vocab_size=264)
        for name in ("vocab.json", "merges.txt"):
            (folder / name).write_bytes((gpt2 / name).read_bytes())
    write_native(open_huggingface(folder), tmp_path / "native", lambda n: None)
    native = find_checkpoint(str(tmp_path / "native"), None)
    write_huggingface(native, tmp_path / "written", lambda n: None)
    assert check_ids(tmp_path / "written", TEXTS[:-1]) == "GPT2BPETokenizer"
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert kind != "gpt2" or config["n_ctx"] == config["n_positions"]  # llama.cpp reads the former


def test_a_chat_template_is_exported(gpt2: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
    write_fast(gpt2, ("<|im_start|>",))
    (gpt2 / "chat_template.jinja").write_text(template)
    write_huggingface(open_huggingface(gpt2), tmp_path / "written", lambda n: None)
    assert check_ids(tmp_path / "written") == "HuggingFaceTokenizer"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "written").chat_template == template
