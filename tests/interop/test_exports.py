"""Exports are read by other versions of transformers, with the token ids and the logits of this program.

OTHER_PYTHON names the Python of an environment with torch, safetensors and another version of transformers. The tests
have passed with 4.46, 4.57 and 5.23.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from hf_models import save_hf

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.inference.conversion import LINES, TOLERANCE, fixed_tokens, largest_difference, our_logits
from megatron.interop.convert import write_native
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.write import write_huggingface
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.train import train_bpe, train_wordpiece

READER = Path(__file__).with_name("read_export.py")
CORPUS = [topics[name] for name in sorted(topics)[:20]]
NUM_PIECES = 600
EXPORTS = [
    ("gpt2", "bpe"),
    ("gpt2", "added tokens"),
    ("gpt2", "sentencepiece"),
    ("gpt2 untied", "bpe"),
    ("llama", "bpe"),
    ("llama", "added tokens"),
    ("llama", "sentencepiece"),
    ("llama", "sentencepiece unigram"),
    ("llama 3", "bpe"),
    ("llama tied", "bpe"),
    ("llama linear", "bpe"),
    ("llama yarn", "bpe"),
    ("mistral", "sentencepiece"),
    ("phi3", "sentencepiece"),
    ("qwen2", "bpe"),
    ("qwen3", "bpe"),
    ("mixtral", "sentencepiece"),
    ("olmoe", "bpe"),
    ("qwen2_moe of dense layers", "bpe"),
    ("qwen3_moe", "bpe"),
    ("deepseek_v2", "bpe"),
    ("deepseek_v3", "bpe"),
    ("deepseek_v3 of yarn", "bpe"),
    ("bert", "wordpiece"),
    ("bert of words", "wordpiece"),
]
# Older versions lack the model, or compute its RoPE from other settings.
OLDEST_VERSIONS = {"llama yarn": (4, 57), "phi3": (4, 57), "qwen3": (4, 57), "qwen3_moe": (4, 57)}
OLDEST_VERSIONS |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v3 of yarn"), (4, 57))
# AutoTokenizer of newer versions replaces the tokenizer by that of Qwen.
NEWEST_VERSIONS_OF_IDS = {"qwen2": (4, 57)}


def write_tokenizer(folder: Path, kind: str) -> tuple[str, ...]:
    """Write the files of a tokenizer. Returns the special tokens that it recognizes in text."""
    if kind.startswith("sentencepiece"):
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in CORPUS for line in text.splitlines()),
            model_prefix=str(folder / "m"),
            model_type="unigram" if kind.endswith("unigram") else "bpe",
            byte_fallback=True,
            vocab_size=NUM_PIECES,
            pad_id=3,
            minloglevel=2,
        )
        return ()
    if kind == "wordpiece":
        contents = train_wordpiece(lambda: iter(CORPUS), NUM_PIECES, lowercase=False)
    else:
        contents = train_bpe(CORPUS, NUM_PIECES)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    if kind == "added tokens":
        from transformers import GPT2TokenizerFast

        fast = GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
        fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        fast.save_pretrained(folder)
        # transformers 4.57 fails on this list, which transformers 5 writes; exports hold a copy of the file.
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("extra_special_tokens", None)
        path.write_text(json.dumps(config))
        return ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    # In the text of the other tokenizers, special tokens are ordinary text; conversions say so.
    return ()


def export(folder: Path, kind: str, tokenizer: str, dtype: torch.dtype) -> tuple[Checkpoint, Path, list[str]]:
    """Export a native checkpoint. Returns it, the export, and texts for its tokenizer."""
    theirs = folder / "theirs"
    theirs.mkdir(parents=True)
    special = write_tokenizer(theirs, tokenizer)
    length = "n_positions" if kind.startswith("gpt2") else "max_position_embeddings"
    # Two rows more than pieces, for the two ids that Megatron-LM adds to WordPiece, or for the added tokens.
    save_hf(theirs, kind, dtype, **{"vocab_size": NUM_PIECES + 2, length: 64})
    write_native(open_huggingface(theirs), folder / "native", lambda n: None)
    native = find_checkpoint(str(folder / "native"), None)
    write_huggingface(native, folder / "written", lambda n: None)
    return native, folder / "written", [*LINES, *CORPUS[:2], *(f"a{token}b {token}" for token in special)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "python", [sys.executable, os.environ.get("OTHER_PYTHON", "")], ids=["this version", "another version"]
)
def test_exports_are_read(tmp_path: Path, python: str) -> None:
    if not python:
        pytest.skip("needs OTHER_PYTHON, the Python of an environment with another version of transformers")
    exports, requests = {}, {}
    for i, (kind, tokenizer) in enumerate(EXPORTS):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        native, written, texts = export(tmp_path / f"{kind}, {tokenizer}", kind, tokenizer, dtype)
        exports[str(written)] = kind, dtype, native
        tokens, types = (x.tolist() for x in fixed_tokens(native))
        requests[str(written)] = {
            "texts": texts,
            "tokens": tokens,
            "types": types if "BERT" in native.state["task"] else None,
        }
    done = subprocess.run([python, READER], input=json.dumps(requests), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    version = tuple(int(part) for part in results.pop("version").split(".")[:2])
    problems: dict[str, list[str]] = {}
    for folder, found in results.items():
        kind, dtype, native = exports[folder]
        if version < OLDEST_VERSIONS.get(kind, (4, 0)):
            continue
        assert found is not None, f"transformers {version} lacks {kind}"
        ours, texts = build_tokenizer(saved_tokenizer(native)), requests[folder]["texts"]
        other_ids = [
            text for text, ids in zip(texts, found["ids"], strict=True) if ours.tokenize(text) != ids
        ]
        if version > NEWEST_VERSIONS_OF_IDS.get(kind, version):
            other_ids = []
        difference = largest_difference(our_logits(native), [torch.tensor(x) for x in found["logits"]])
        if other_ids or difference > TOLERANCE or found["dtype"] != str(dtype):
            problems[folder] = [f"logits differ by {difference:.2g}", found["dtype"], *other_ids]
    assert not problems
