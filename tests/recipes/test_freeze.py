"""Frozen parameters: they keep their values in every layout, and the others train the same."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from safetensors.torch import load_file

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.parallel.mesh import Mesh
from megatron.plugins import run
from megatron.pretrain_gpt import GPT
from megatron.recipes.config import FreezeConfig
from megatron.recipes.expert_balance import ExpertBias, LastLoad
from megatron.recipes.freeze import Frozen

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 32 --num-workers 0
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 2e-3 --clip-grad 0.5
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --device cpu --weight-decay 0.1
    --distributed-timeout-minutes 1
"""
FREEZE = "--freeze embedding.* --freeze *.layers.1.mlp.*"
MIXTURE = """
    --num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --disable-bias-linear
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1
"""
TP, PP, ZERO = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--use-distributed-optimizer"


def train(folder: str, flags: str) -> None:
    """Train on this rank, with results in `folder`."""
    words = f"{FLAGS} {flags} --save {folder}/run --metrics-path {folder}/metrics.jsonl".split()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert run(parse_run_config(words, description="", defaults={}), GPT) == 0


def metrics(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each iteration."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["lm loss"], row["grad norm"]) for row in rows if "grad norm" in row]


def test_frozen_parameters_keep_their_values(tmp_path: Path) -> None:
    train(str(tmp_path), f"{FREEZE} --train-iters 4 --save-interval 1")
    first, last = (load_file(tmp_path / "run" / f"iter_000000{i}" / "model.safetensors") for i in (1, 4))
    frozen = {name for name in first if name.startswith("embedding.") or ".layers.1.mlp." in name}
    assert 0 < len(frozen) < len(first)
    assert {name for name in first if torch.equal(first[name], last[name])} == frozen
    optimizer = load_file(tmp_path / "run" / "iter_0000004" / "optimizer.safetensors")
    assert {name.removeprefix("exp_avg/") for name in optimizer if name.startswith("exp_avg/")} == {
        *first
    } - frozen


def test_the_command_line_adds_to_the_patterns_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("freeze: ['embedding.*']\n")
    words = f"{FLAGS} --train-iters 1 --config {file} --freeze *.mlp.* --freeze *.bias".split()
    run_config = parse_run_config(words, description="", defaults={})
    assert run_config.plugin(FreezeConfig).freeze == ("embedding.*", "*.mlp.*", "*.bias")


def test_other_patterns_on_resume_need_a_new_optimizer_state(tmp_path: Path) -> None:
    load = f"--load {tmp_path}/run --train-iters 2"
    train(str(tmp_path), "--freeze embedding.* --train-iters 1")
    hint = r"; if --optimizer or --freeze changed, --no-load-optim begins with a new optimizer state$"
    with pytest.raises(InputError, match=r"lacks the tensor exp_avg/embedding\..*" + hint):
        train(str(tmp_path), load)
    with pytest.raises(InputError, match=r"that the model lacks: exp_avg/.*" + hint):
        train(str(tmp_path), f"--freeze decoder.* {load}")
    train(str(tmp_path), f"{load} --no-load-optim")


def test_frozen_gradients_do_not_count(tmp_path: Path) -> None:
    """The norm is that of the gradients of the others, so that clipping does not depend on frozen parameters."""
    train(str(tmp_path / "all"), "--train-iters 1")
    norms = []
    for name, pattern in (("a", "embedding.*"), ("b", "[!e]*")):
        train(str(tmp_path / name), f"--train-iters 1 --freeze {pattern}")
        norms.append(metrics(tmp_path / name)[0][1])
    (_, whole), *_ = metrics(tmp_path / "all")
    assert sum(norm**2 for norm in norms) == pytest.approx(whole**2, rel=1e-5)


def test_zeros_of_frozen_gradients_do_not_count() -> None:
    engine = engine_of(Mesh(device=CPU), config_of("--log-num-zeros-in-grad --freeze embedding.*"))
    for param in engine.buffer.flat_params:
        param.view(engine.buffer.grads).fill_(1.0)
    *_, last = (param for param in engine.buffer.flat_params if param.name.startswith("decoder."))
    last.view(engine.buffer.grads)[:3] = 0.0
    assert engine.optimizer.step(lr=0.0, weight_decay=0.0)["num zeros"].item() == 3


@pytest.mark.parametrize("pattern", ["*.router.*", "*.layers.1.mlp.router.*"])
def test_the_load_of_a_frozen_router_is_counted(tmp_path: Path, pattern: str) -> None:
    """The load of the last global batch is 4 · 16 tokens by 2 experts; frozen biases stay 0, in fp32."""
    train(str(tmp_path), f"{MIXTURE} --bf16 {ZERO} --freeze {pattern} --train-iters 2 --save-interval 1")
    first, last = (load_file(tmp_path / "run" / f"iter_000000{i}" / "model.safetensors") for i in (1, 2))
    for layer in "01":
        router = f"decoder.layers.{layer}.mlp.router"
        assert last[f"{router}.load"].sum() == 4 * 16 * 2
        bias = last[f"{router}.expert_bias"]
        frozen = pattern == "*.router.*" or layer == "1"
        assert bias.dtype == torch.float32 and bool(bias.any()) != frozen
        assert torch.equal(first[f"{router}.weight"], last[f"{router}.weight"]) == frozen


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_run_of_an_earlier_version_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Its frozen bias was updated by `Frozen`, which has no state."""
    flags = f"{MIXTURE} {precision} --freeze *.router.* --load {tmp_path}/run"
    monkeypatch.setattr("megatron.training.build.FIRST_OPTIMIZERS", [Frozen, ExpertBias, LastLoad])
    train(str(tmp_path), f"{flags} --train-iters 1")
    monkeypatch.undo()
    train(str(tmp_path), f"{flags} --train-iters 2")
    last = load_file(tmp_path / "run" / "iter_0000002" / "model.safetensors")
    router = "decoder.layers.0.mlp.router"
    assert not last[f"{router}.expert_bias"].any() and last[f"{router}.load"].sum() == 4 * 16 * 2


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(2, f"{TP} 2"), (2, f"{PP} 2"), (4, f"{PP} 2 {ZERO} --bf16")],
    ids=["T2", "P2", "P2D2+ZeRO"],
)
def test_same_as_one_process(tmp_path: Path, processes: int, flags: str) -> None:
    half = "--bf16" if "--bf16" in flags else ""
    run_distributed(train, 1, str(tmp_path / "one"), f"{FREEZE} --train-iters 6 {half}")
    run_distributed(train, processes, str(tmp_path / "many"), f"{FREEZE} --train-iters 6 {flags}")
    one, many = metrics(tmp_path / "one"), metrics(tmp_path / "many")
    assert len(one) == 6
    for mine, theirs in zip(one, many, strict=True):
        assert theirs == pytest.approx(mine, rel=2e-2 if half else 1e-5)


def errors(flags: str, folder: str = "") -> str:
    """Return the error of a run on this rank."""
    try:
        train(folder, f"{flags} --train-iters 2")
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_patterns(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of another stage's parameters is right; one of no stage's is an error on both."""
    monkeypatch.chdir(tmp_path)
    layout = f"{PP} {processes}"
    found = run_distributed(errors, processes, f"{layout} --freeze *.layers.1.* decoder.layers.7.*")
    assert all(
        error.startswith("--freeze: decoder.layers.7.* matches no parameter; names of this model are ")
        for error in found
    )
    found = run_distributed(errors, processes, f"{layout} --freeze *")
    assert found == ["--freeze: * leaves no parameter to train"] * processes
    found = run_distributed(errors, processes, f"{layout} --freeze * {MIXTURE}")
    assert found == ["--freeze: * leaves no parameter to train"] * processes


def test_state_that_one_stage_lacks_ends_all_ranks(tmp_path: Path) -> None:
    """The first stage finds all that it needs, and would wait for the second."""
    train(str(tmp_path), "--freeze *.layers.1.* --train-iters 1")
    first, second = run_distributed(errors, 2, f"{PP} 2 --load {tmp_path}/run", str(tmp_path))
    assert "lacks the tensor exp_avg/decoder.layers.1." in second
    assert first == f"rank 1: {second}"
