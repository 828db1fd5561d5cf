"""TensorBoard and the file of metrics."""

from __future__ import annotations

import base64
import json
import math
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from intervals import interval

import megatron.plugins  # noqa: F401 (registers the flags)
from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.parallel.mesh import Mesh
from megatron.reports.config import ReportConfig
from megatron.reports.reports import Writers, config_text
from megatron.reports.writers import evaluation_tag
from megatron.training.config import RunConfig

MESH = Mesh(device=torch.device("cpu"))


def config_of(*flags: object) -> RunConfig:
    """Configuration of a run with the given flags."""
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1"
    words = [*shape.split(), "--train-iters", "5", "--lr", "1", *map(str, flags)]
    return parse_run_config(words, description="a test", defaults={})


def report(config: RunConfig, start: int, iterations: range) -> None:
    path = config.plugin(ReportConfig).metrics_path
    with Writers(config, MESH, print) as writers:
        writers.start(start, 8 * start)
        for i in iterations:
            writers.training(interval([(i, 1.0 / i, float(i))]))
            if path is not None:  # each line can be read at once, and survives a kill
                assert json.loads(Path(path).read_text().splitlines()[-1])["iteration"] == i
        writers.evaluation({"lm loss validation": 2.0, "lm loss validation ppl": math.exp(2.0)}, i, 8 * i)


def test_metrics_of_a_resumed_run_are_contiguous(tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    config = config_of("--metrics-path", path)
    report(config, 0, range(1, 6))
    with path.open("a") as file:
        file.write('{"iteration": 6, "lm lo')  # killed while writing a line
    report(config, 3, range(4, 7))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    training = [r for r in records if "lm loss" in r]
    assert [r["iteration"] for r in training] == [1, 2, 3, 4, 5, 6]
    assert training[2]["lm loss"] == 1 / 3
    assert records[-1]["lm loss validation ppl"] == pytest.approx(7.389056)
    report(config, 0, range(1, 3))  # from the beginning: nothing of the old run remains
    assert len(path.read_text().splitlines()) == 3


def test_nan_in_metrics_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Writers(config_of("--metrics-path", path), MESH, print) as writers:
        writers.start(0, 0)
        writers.training(interval([(1, float("nan"), float("inf"))]))
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["lm loss"] is None and record["grad norm"] is None


@pytest.mark.parametrize("content", ["my thesis\n", '{"a": 1}\n', "[1]\n", "\xff\n"])
def test_an_unrelated_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match="--metrics-path"):
        Writers(config_of("--metrics-path", path), MESH, print).start(0, 0)
    assert path.read_text(encoding="latin-1") == content


def test_tensorboard_tags_are_grouped(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report(config_of("--tensorboard-dir", tmp_path), 0, range(1, 4))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "train/lm loss",
        "optimizer/grad-norm",
        "optimizer/learning-rate",
        "optimizer/batch-size",
        "speed/iteration-time",
        "speed/tokens-per-second",
        "speed/throughput",
        "speed/mfu",
        "valid/lm loss",
        "valid/lm loss ppl",
    } <= tags
    assert {tag.split("/")[0] for tag in tags} == {"train", "optimizer", "speed", "valid"}
    assert [e.step for e in events.Scalars("train/lm loss")] == [1, 2, 3]
    assert [e.value for e in events.Scalars("train/lm loss")] == pytest.approx([1.0, 0.5, 1 / 3])
    events = event_accumulator.EventAccumulator(str(tmp_path / "vs-samples"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/lm loss vs samples", "valid/lm loss vs samples"} <= tags
    assert all(tag.endswith(" vs samples") and "ppl" not in tag for tag in tags)
    assert [e.step for e in events.Scalars("train/lm loss vs samples")] == [8, 16, 24]


def test_tensorboard_of_a_resumed_run_has_every_iteration_once(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of("--tensorboard-dir", tmp_path)
    report(config, 0, range(1, 6))
    time.sleep(1.1)  # the names of event files have a resolution of one second
    report(config, 3, range(4, 9))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("train/lm loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    events = event_accumulator.EventAccumulator(str(tmp_path / "vs-samples"))
    events.Reload()
    steps = [e.step for e in events.Scalars("train/lm loss vs samples")]
    assert steps == [8, 16, 24, 32, 40, 48, 56, 64]


def test_tensorboard_log_interval(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of("--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 2)
    with Writers(config, MESH, print) as writers:
        writers.start(0, 0)
        writers.training(interval([(i, float(i), 1.0) for i in range(1, 6)]))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    # The last iteration of the report is written, too.
    assert [e.step for e in events.Scalars("train/lm loss")] == [2, 4, 5]


def test_metrics_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    report(config_of("--metrics-path", tmp_path / "link.jsonl"), 0, range(1, 4))
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "real.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("lm loss validation ppl", "valid/lm loss ppl"),
        ("sop loss test", "test/sop loss"),
        ("WIKITEXT103 adjusted ppl", "valid/WIKITEXT103 adjusted ppl"),
        ("accuracy dev.tsv", "valid/accuracy dev.tsv"),
    ],
)
def test_tags_of_evaluations(name: str, tag: str) -> None:
    assert evaluation_tag(name) == tag


def test_texts_in_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Writers(
        config_of("--tensorboard-dir", tmp_path, "--metrics-path", tmp_path / "m.jsonl"), MESH, print
    ) as writers:
        writers.start(0, 0)
        writers.text("samples/a prompt", "# one\n  two\n", 5)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("samples/a prompt/text_summary")
    # TensorBoard shows Markdown, in which indented lines are literal.
    assert (event.step, event.tensor_proto.string_val[0]) == (5, b"    # one\n      two")
    row = {"iteration": 5, "text": {"samples/a prompt": "# one\n  two\n"}}
    assert json.loads((tmp_path / "m.jsonl").read_text()) == row


def test_the_configuration_as_text_is_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    given = config_of(
        "--no-progress", "--swiglu", "--min-lr", "1e-05", "--data-path", "0.5", "a", "0.5", "b c"
    )
    file.write_text(config_text(given))
    assert "no-progress: true\n" in file.read_text() and "lr: 1.0\n" in file.read_text()
    assert parse_run_config(["--config", str(file)], description="a test", defaults={}) == given


@pytest.mark.parametrize("length", ["--train-tokens 1007", "--train-epochs 1.5"])
def test_the_configuration_as_text_has_no_derived_flags(tmp_path: Path, length: str) -> None:
    """--train-samples excludes the other lengths, and --tokenizer the type and files that it stands for."""
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "a.tiktoken").write_text(ranks)
    shape = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1"
    )
    words = [*shape.split(), *length.split(), "--data-path", "a", "--tokenizer", str(tmp_path / "a.tiktoken")]
    words += ["--tiktoken-pattern", "gpt2"]
    given = parse_run_config(words, description="a test", defaults={})
    assert given.training.train_samples is not None and given.tokenizer.tokenizer_type == "TikTokenizer"
    file = tmp_path / "config.yaml"
    file.write_text(config_text(given))
    assert parse_run_config(["--config", str(file)], description="a test", defaults={}) == given


def test_missing_packages_are_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match="pip install mlflow-skinny"):
        Writers(config_of("--mlflow-experiment", "p"), MESH, print)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        Writers(config_of("--wandb-project", "p"), MESH, print)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="pip install tensorboard"):
        Writers(config_of("--tensorboard-dir", "p"), MESH, print).start(0, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_metrics_not_the_run(capsys) -> None:
    with Writers(config_of("--metrics-path", "/dev/full"), MESH, print) as writers:
        writers.start(0, 0)
        for i in (1, 2):
            writers.training(interval([(i, 1.0, 1.0)]))
        writers.evaluation({"lm loss validation": 2.0}, 2, 16)
    out = capsys.readouterr().out
    assert out.count("warning: --metrics-path: No space left on device; the run continues without it") == 1


def test_tensorboard_on_a_full_disk_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files stands for the full disk: nothing can be written."""
    pytest.importorskip("torch.utils.tensorboard")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writers = Writers(config_of("--tensorboard-dir", tmp_path / "events"), MESH, print)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(InputError, match=r"^--tensorboard-dir: .*events: File too large$"):
            writers.start(0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capfd.readouterr().err == ""
    with writers:
        writers.start(0, 0)
        writers.training(interval([(1, 1.0, 1.0)]))
    assert sorted(path.name[:6] for path in (tmp_path / "events").iterdir()) == ["events", "vs-sam"]
