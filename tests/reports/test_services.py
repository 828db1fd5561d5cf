"""Weights & Biases offline and MLflow with a local SQLite database."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from intervals import interval

import megatron.plugins  # noqa: F401 (registers the flags)
from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.parallel.mesh import Mesh
from megatron.reports.reports import Writers
from megatron.reports.services import RUN_IDS
from megatron.training.config import RunConfig

MESH = Mesh(device=torch.device("cpu"))


def config_of(save: Path, *flags: object) -> RunConfig:
    """Configuration of a run that saves to a folder and resumes from it."""
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1"
    words = [*shape.split(), "--train-iters", "5", "--lr", "1", "--save", save, "--load", save, *flags]
    return parse_run_config([str(word) for word in words], description="a test", defaults={})


def report(config: RunConfig, start: int, log: Callable[[str], None] = print) -> None:
    """Report two iterations after `start`, an evaluation and a text."""
    with Writers(config, MESH, log) as writers:
        writers.start(start, 8 * start)
        writers.text("samples/a", "once <upon>\n", start)
        writers.training(interval([(start + 1, 4.0, 1.0), (start + 2, 3.0, 1.0)]))
        writers.evaluation({"lm loss validation": 2.0}, start + 2, 16)


def test_git_ignores_the_folders_of_the_services() -> None:
    folders = ["wandb/run", "mlruns/0", "mlflow.db"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(["git", "check-ignore", *folders], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == folders


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # files of runs go to mlruns/ here
    return mlflow.MlflowClient()


def test_a_resumed_run_continues_in_mlflow(mlflow_client: Any, tmp_path: Path) -> None:
    save = tmp_path / "save"
    save.mkdir()
    config = config_of(save, "--mlflow-experiment", "small models", "--mlflow-run-name", "first")
    report(config, 0)
    report(config, 2)
    experiment = mlflow_client.get_experiment_by_name("small models")
    (run,) = mlflow_client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    losses = mlflow_client.get_metric_history(run.info.run_id, "train/lm loss")
    assert [(point.step, point.value) for point in losses] == [(1, 4.0), (2, 3.0), (3, 4.0), (4, 3.0)]
    names = {"valid/lm loss", "optimizer/grad-norm", "speed/tokens-per-second"}
    assert names <= run.data.metrics.keys()
    assert len(mlflow_client.list_artifacts(run.info.run_id, "samples/a")) == 2
    # A run from the beginning, though to the same folder, is another one.
    report(config, 0)
    assert len(mlflow_client.search_runs([experiment.experiment_id])) == 2


def test_a_run_that_fails_is_marked_in_mlflow(mlflow_client: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, "--mlflow-experiment", "a")
    with pytest.raises(MemoryError), Writers(config, MESH, print) as writers:
        writers.start(0, 0)
        raise MemoryError
    (run_id,) = json.loads((tmp_path / RUN_IDS).read_text()).values()
    assert mlflow_client.get_run(run_id).info.status == "FAILED"
    report(config, 2)
    assert mlflow_client.get_run(run_id).info.status == "FINISHED"


def test_mlflow_that_fails_does_not_end_the_run(
    mlflow_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    def fail(*_: object, **__: object) -> None:
        raise mlflow.exceptions.MlflowException("the server is gone\nand more")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
    (tmp_path / "save").mkdir()
    config, lines = config_of(tmp_path / "save", "--mlflow-experiment", "a"), []
    report(config, 0, lines.append)
    assert lines == ["warning: --mlflow-experiment: the server is gone; the run continues without it"]
    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", fail)
    with pytest.raises(InputError, match=r"^--mlflow-experiment: a: the server is gone$"):
        report(config, 0)


@pytest.mark.parametrize(
    ("address", "packages"), [("sqlite:///a.db", " sqlalchemy alembic"), ("http://host:5000", "")]
)
def test_mlflow_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, packages: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = config_of(tmp_path, "--mlflow-experiment", "a", "--mlflow-tracking-uri", address)
    with pytest.raises(InputError, match=f"needs MLflow: pip install mlflow-skinny{packages}$"):
        report(config, 0)


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, which writes to files in `tmp_path` and asks no server."""
    package = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return package


def test_a_resumed_run_continues_in_weights_and_biases(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    begin = wandb.init

    def init(**given: Any) -> Any:
        seen.append(given)
        return begin(**given)

    monkeypatch.setattr(wandb, "init", init)
    save = tmp_path / "save"
    save.mkdir()
    flags = "--wandb-project gpt --wandb-entity team --wandb-group sweep --wandb-exp-name first".split()
    report(config_of(save, *flags), 0)
    run_id = json.loads((save / RUN_IDS).read_text())["wandb"]
    report(config_of(save, *flags), 2)
    assert [(g["project"], g["entity"], g["group"], g["name"]) for g in seen] == [
        ("gpt", "team", "sweep", "first")
    ] * 2
    assert [g["id"] for g in seen] == [None, run_id] and [g["resume"] for g in seen] == [None, "allow"]
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(run_id) for folder in folders)
    assert any(b"train/lm loss" in file.read_bytes() for file in (tmp_path / "wandb").rglob("*.wandb"))


def test_weights_and_biases_keeps_iterations_before_an_evaluation(wandb: Any, tmp_path: Path) -> None:
    """With --log-interval 2 and --eval-interval 1 iteration 1 is logged after the evaluation at it."""
    with Writers(config_of(tmp_path, "--wandb-project", "gpt"), MESH, print) as writers:
        writers.start(0, 0)
        writers.evaluation({"lm loss validation": 2.0}, 3, 24)
        writers.training(interval([(1, 4.0, 1.0), (2, 3.0, 1.0)]))
        summary = wandb.run.summary
        assert (summary["valid/lm loss"], summary["train/lm loss"], summary["iteration"]) == (2.0, 3.0, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_fails_is_marked_in_weights_and_biases(wandb: Any, tmp_path: Path, fails: bool) -> None:
    """The exit status that the service gets."""
    with (
        suppress(MemoryError),
        Writers(config_of(tmp_path, "--wandb-project", "gpt"), MESH, print) as writers,
    ):
        writers.start(0, 0)
        run = wandb.run
        if fails:
            raise MemoryError
    assert run._exit_code == int(fails)


def test_weights_and_biases_that_fails_does_not_end_the_run(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object, **__: object) -> None:
        raise wandb.Error("the service is gone")

    lines: list[str] = []
    writers = Writers(config_of(tmp_path, "--wandb-project", "gpt"), MESH, lines.append)
    writers.start(0, 0)
    monkeypatch.setattr(wandb.run, "log", fail)
    writers.evaluation({"lm loss validation": 2.0}, 3, 24)
    assert lines == ["warning: --wandb-project: the service is gone; the run continues without it"]
    wandb.run.finish()


@pytest.mark.parametrize("content", ["[]", "{", '{"wandb": 1}'])
def test_a_damaged_file_of_run_ids(mlflow_client: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / RUN_IDS).write_text(content)
    with pytest.raises(InputError, match=f"{RUN_IDS}: is not a file of run ids; delete it"):
        report(config_of(tmp_path, "--mlflow-experiment", "a"), 2)
