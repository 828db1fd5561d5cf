"""tools/generate_text.py, on a model that has hardly been trained."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    generate = ["tools/generate_text.py", "--load", run, "--prompt", "1 2 3", "--greedy"]
    full = command(*generate, "--out-seq-length", 14)
    assert full.stderr == (
        "note: ended after 13 of 14 tokens: with the prompt's 3 they fill the 16 that the model sees\n"
    )
    assert len(full.stdout.split()) == 16
    asked = command(*generate, "--out-seq-length", 13)
    assert asked.stderr == "" and asked.stdout == full.stdout
