"""The examples run, learn, and are short."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

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
