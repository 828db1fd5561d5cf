"""tools/inspect_checkpoint.py on the checkpoints of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.commands.inspect_checkpoint import main
from megatron.errors import InputError

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 2 --hidden-size 16
    --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --train-iters 3 --lr 1e-3 --device cpu
    --eval-iters 0 --num-workers 0 --save-interval 1
""".split()


@pytest.fixture
def run(pretrain, tmp_path: Path) -> Path:
    pretrain(*FLAGS, "--save", tmp_path / "run")
    return tmp_path / "run"


def test_list_describe_and_compare(run: Path, capsys) -> None:
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert lines[2].endswith("(newest)") and "6 samples" in lines[2]
    assert main([str(run / "iter_0000002")]) == 0
    out = capsys.readouterr().out
    assert "iteration 2, checksums verified" in out
    assert "  embedding.word_embeddings.weight (51, 16) float32\n" in out
    assert main([str(run / "iter_0000002"), str(run / "iter_0000002")]) == 0
    assert main([str(run / "iter_0000002"), str(run)]) == 1
    out = capsys.readouterr().out
    assert "model decoder.final_layernorm.bias: 16 of 16 elements differ, by up to 0.00" in out
    assert "consumed_samples: 4 and 6" in out


def test_damage_is_reported(run: Path, capsys) -> None:
    path = run / "iter_0000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main([str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "DAMAGED" in lines[1] and "model.safetensors: has " in lines[1]
    assert "DAMAGED" not in lines[0] + lines[2]
    with pytest.raises(InputError, match=r"model\.safetensors: has "):
        main([str(run / "iter_0000002")])
    with pytest.raises(InputError, match=r"index\.json: is missing"):
        main([str(run.parent)])


def test_a_newest_checkpoint_that_is_gone_is_reported(run: Path, capsys) -> None:
    shutil.rmtree(run / "iter_0000003")
    assert main([str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert "DAMAGED: missing; there is no folder of the iteration" in lines[2]
    assert "DAMAGED" not in lines[0] + lines[1]
