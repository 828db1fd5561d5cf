"""The examples run, learn, and are short."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from models import CPU, config_of, position_ids
from torch import Tensor

from megatron.data.gpt_dataset import GPTBatch
from megatron.parallel.mesh import init_mesh
from megatron.pretrain_gpt import GPT
from megatron.training.build import build_engine
from megatron.training.task import Task

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
QUICK = (
    "--train-iters 20 --log-interval 5 --device cpu --num-workers 0 --eval-iters 1 --seq-length 32".split()
)


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Callable
) -> Callable[..., str]:
    """Run an example with flags and return its stdout: in the test's process, which is faster, if that is possible."""

    def run(name: str, *flags: str) -> str:
        if name == "own_optimizer":  # registers an optimizer before megatron.api is imported
            return command("-m", f"examples.{name}", *flags).stdout
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program(path: Path, program: Callable[..., str]) -> None:
    words = ["--data-path", str(ROOT / "README.md")] if path.stem == "own_data" else []
    out = program(path.stem, *words, *QUICK, "--log-format", "megatron")
    losses = [float(text) for text in re.findall(r"iteration .*? \| (?:lm|smoothed) loss: (\S+)", out)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1
    assert " validation loss at the end of training for val data | lm loss value: " in out
    if path.stem == "own_schedule":
        # After iterations 5, 10, 15 and 20, the rate of the next step.
        rates = re.findall(r"learning rate: (\S+)", out)
        assert rates[-4:] == ["3.000E-03", "1.000E-03", "3.333E-04", "3.333E-04"]
    if path.stem == "own_loss":
        assert re.search(r"z loss: \d", out)


def gradients(
    task: Task, flags: str, tokens: Tensor, loss_mask: Tensor, **fields: Tensor
) -> dict[str, Tensor]:
    """Gradients of a batch of two samples of 16 tokens, by parameter."""
    config = config_of(f"--hidden-dropout 0 --attention-dropout 0 {flags}")
    positions = position_ids(0, 2, 16, CPU)
    batch = GPTBatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=loss_mask, position_ids=positions, **fields
    )
    with init_mesh(config.parallel, CPU) as mesh:
        engine = build_engine(config, task, mesh, vocab_size=60, padded_vocab_size=64)
        engine.buffer.initialize(1)
        engine.forward_backward(engine.next_global_batch(iter([batch]), 1, 0))
        engine.reduce_gradients()
        buffer = engine.buffer
        return {param.name: param.view(buffer.grads).clone() for param in buffer.flat_params}


def test_a_loss_of_ones_own_keeps_documents_apart() -> None:
    """The tokens of a sample's first document have no effect on the loss of its second one."""
    task = runpy.run_path(str(ROOT / "examples" / "own_loss.py"))["TASK"]
    tokens = torch.randint(59, (2, 17), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] + 1) % 59
    is_second = (torch.arange(16) >= 8).expand(2, 16)
    fields = {"loss_mask": is_second.float(), "document_ids": is_second.long()}
    found = [gradients(task, "--reset-attention-mask", text, **fields) for text in (tokens, other)]
    for name, grad in found[0].items():
        assert grad.norm() > 0 and (grad - found[1][name]).norm() <= 1e-6 * grad.norm(), name


def test_a_loss_of_ones_own_adds_the_auxiliary_losses() -> None:
    """The routers' gradients without a position that has a loss, those of the auxiliary losses, equal GPT's."""
    own_task = runpy.run_path(str(ROOT / "examples" / "own_loss.py"))["TASK"]
    tokens = torch.randint(59, (2, 17), generator=torch.Generator().manual_seed(0))
    flags = """
        --disable-bias-linear --init-method-std 0.1 --num-experts 8 --moe-ffn-hidden-size 16
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1
    """
    own, usual = (gradients(task, flags, tokens, torch.zeros(2, 16)) for task in (own_task, GPT))
    routers = [name for name in usual if name.endswith("router.weight")]
    assert len(routers) == 4
    for name in routers:
        assert usual[name].norm() > 0 and (own[name] - usual[name]).norm() <= 1e-6 * usual[name].norm(), name


@pytest.mark.parametrize(("flags", "iterations"), [("", 100), ("--train-samples 16", 2)])
def test_an_example_has_a_length(program: Callable[..., str], flags: str, iterations: int) -> None:
    """A given length replaces it, in another unit too."""
    quick = "--device cpu --num-workers 0 --eval-iters 1 --seq-length 32 --global-batch-size 8".split()
    out = program("own_data", "--data-path", str(ROOT / "README.md"), *quick, *flags.split())
    assert re.search(rf"\b{iterations}/{iterations}\b|iteration +{iterations}\b", out), out


def test_an_optimizer_of_ones_own_is_a_choice(command: Callable) -> None:
    done = command(
        "-m", "examples.own_optimizer", "--optimizer", "adam", "--signsgd-momentum", 2, *QUICK, status=2
    )
    assert done.stderr.splitlines()[-1].startswith("error: --signsgd-momentum: 2.0 is too large")


@pytest.mark.parametrize(
    "name, flags, error",
    [
        ("own_data", "--data-path a b", "--data-path: a b is not one file"),
        ("own_data", "--data-path nope", "--data-path: nope is not one file"),
        (
            "own_loss",
            "--tensor-model-parallel-size 2 --dry-run",
            "--tensor-model-parallel-size: this loss needs whole logits",
        ),
    ],
)
def test_wrong_flags_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, flags: str, error: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *QUICK, *flags.split()])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {error}")


@pytest.mark.slow
def test_a_data_set_on_two_replicas(command: Callable) -> None:
    """Worker processes find the data set's class, and two replicas train the same model as one."""
    words = ["-m", "examples.own_data", "--data-path", "README.md", *QUICK, "--global-batch-size", 16]
    words[words.index("--num-workers") + 1] = "1"
    plain = [*words, "--attention-dropout", 0, "--hidden-dropout", 0]
    losses = [
        re.findall(r"lm loss: (\S+)", command(*plain, "--log-format", "megatron", replicas=n).stdout)
        for n in (1, 2)
    ]
    assert [float(x) for x in losses[0]] == pytest.approx([float(x) for x in losses[1]], rel=1e-4)


def test_the_examples_are_short() -> None:
    assert len(PROGRAMS) >= 4
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PROGRAMS}
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lengths["notebook.ipynb"] = sum(len(source.splitlines()) for source in code)
    assert max(lengths.values()) < 60, lengths
