"""tools/generate_text.py, on a model that has hardly been trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import edit_state

from megatron.flags import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.generate import SamplingConfig, generate
from megatron.inference.load import load_gpt
from megatron.parallel.mesh import Mesh
from megatron.tokenizer.config import TokenizerConfig

CPU = torch.device("cpu")

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --train-iters 1 --lr 1e-2 --eval-iters 0
""".split()


@pytest.fixture
def run(pretrain, tmp_path: Path) -> Path:
    """The folder of a run's checkpoints."""
    pretrain(*TINY, "--save", tmp_path / "run")
    return tmp_path / "run"


def test_says_when_the_context_is_full(run: Path, command) -> None:
    words = ["tools/generate_text.py", "--load", run, "--prompt", "1 2 3", "--greedy"]
    full = command(*words, "--out-seq-length", 14)
    assert full.stderr == (
        "note: ended after 13 of 14 tokens: with the prompt's 3 they fill the 16 that the model sees\n"
    )
    assert len(full.stdout.split()) == 16
    asked = command(*words, "--out-seq-length", 13)
    assert asked.stderr == "" and asked.stdout == full.stdout


def damage(run: Path, **fields: object) -> Path:
    return edit_state(run / "iter_0000001", **fields)


@pytest.mark.parametrize("wrong", [None, "384", True, 3.5, -1, 10**30])
@pytest.mark.parametrize("name", ["vocab_size", "padded_vocab_size"])
def test_a_damaged_vocabulary_size_is_one_line(run: Path, name: str, wrong: object) -> None:
    path = damage(run, **{name: wrong})
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {name!r} is missing or wrong: {wrong}')}$"):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": None}, "--num-layers is required"),
        ({"hidden_size": "16"}, "--hidden-size: '16' is not a"),
    ],
)
def test_a_damaged_architecture_is_one_line(run: Path, fields: dict, message: str) -> None:
    path = run / "iter_0000001" / "state.json"
    saved = json.loads(path.read_text())["config"]
    damage(run, config=saved | {"model": saved["model"] | fields})
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))


def test_sizes_are_held_against_the_files_before_memory_is_taken(run: Path) -> None:
    greedy = SamplingConfig(greedy=True, out_seq_length=5)
    model, _ = load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))
    expected = list(generate(model, [1, 2], greedy, eod=None))
    # The files hold no rows that pad the vocabulary, and this model needs none.
    path = damage(run, padded_vocab_size=10**15)
    model, _ = load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))
    assert list(generate(model, [1, 2], greedy, eod=None)) == expected

    saved = json.loads(path.read_text())["config"]
    damage(run, config=saved | {"model": saved["model"] | {"hidden_size": 10**6}})
    with pytest.raises(InputError, match=r"word_embeddings\.weight has shape \(301, 16\), but the model has"):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))
