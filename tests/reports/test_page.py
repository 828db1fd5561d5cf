"""The page of `tools/report.py`, and the one that a run leaves in --save."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.commands.report import main
from megatron.errors import InputError
from megatron.reports import at_end, page
from megatron.reports.page import report_page, thin_out
from megatron.reports.record import METRICS, RunRecord, events_file, read_record


def write_run(folder: Path, iterations: int, *, seq_length: int = 100, lr: float = 1e-3) -> Path:
    """Write the record of a run that evaluated every 5 iterations, skipped iteration 7 and resumed after 10."""
    rows = []
    for i in range(1, iterations + 1):
        rows.append(
            {
                "iteration": i,
                "consumed samples": 4 * i,
                "lm loss": 6 - i / 100,
                "grad norm": None if i == 7 else 1.5,
            }
            | {"skipped iterations": int(i == 7), "learning rate": lr, "seconds per iteration": 36.0}
            | {"tokens per second": 1000.0, "mfu": 0.4}
        )
        if i % 5 == 0:
            rows.append({"iteration": i, "consumed samples": 4 * i, "lm loss validation": 6.5 - i / 100})
            rows.append({"iteration": i, "text": {"sample 1": f"one & <two> at {i}"}})
    folder.mkdir()
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "data": {"seq_length": seq_length},
        "optimizer": {"lr": lr},
        "plugins": {"spikes": {"spike_skip": 2.0}},
        "iteration": 3,
    }
    events = [{"iteration": i, "time": 0.0, "config": config} for i in (0, 10)]
    events += [{"iteration": 10, "checkpoint": True}]
    for seconds in (9.0, 0.5):
        events += [{"iteration": 10, "by rank": {"phases": {"optimizer": {"0": seconds, "1": 0.7}}}}]
    events_file(folder / METRICS).write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_record(tmp_path: Path) -> None:
    run = read_record(write_run(tmp_path / "run", 20))
    assert [len(run.training), len(run.evaluations), len(run.starts)] == [20, 4, 2]
    assert [row["iteration"] for row in run.samples] == [5, 10, 15, 20]
    assert [row["iteration"] for row in run.checkpoints] == [10]
    assert run.by_rank == {"phases": {"optimizer": {"0": 0.5, "1": 0.7}}}  # the newest
    assert run.training[9]["hours"] == pytest.approx(0.1)
    assert run.evaluations[1]["hours"] == pytest.approx(0.1)
    assert run.evaluations[1]["tokens"] == pytest.approx(10 * 4 * 100 / 1e6)
    assert run.flags == {"seq_length": 100, "lr": 1e-3, "spike_skip": 2.0}


def test_evaluations_between_log_lines(tmp_path: Path) -> None:
    file = tmp_path / "lr0.1"
    rows = [{"iteration": 30, "learning rate": 1.0, "seconds per iteration": 3600.0}]
    rows += [{"iteration": 20, "lm loss validation": 1.0}, {"iteration": 50, "lm loss validation": 1.0}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["hours"] for row in read_record(file).evaluations] == [0.0, 30.0]
    assert events_file(file) != events_file(tmp_path / "lr0.2")


def test_record_of_a_metrics_file_alone(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run", 20) / METRICS
    events_file(file).unlink()
    with open(file, "a") as opened:
        opened.write('{"iteration": 21, "lm lo')  # killed while it wrote
    run = read_record(file)
    assert run.training[-1]["iteration"] == 20 and run.flags == {}
    assert "tokens" not in run.training[0]


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", "no JSON\n", "[" * 100_000 + "\n", '{"iteration": "x"}\n'])
def test_damaged_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"iteration": 1}\n' + text)
    with pytest.raises(InputError, match=r"m\.jsonl:2 is not a JSON object with an iteration"):
        read_record(file)


def test_missing_record(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl; name the folder of --save"):
        read_record(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_record(tmp_path / "none")


def test_page_of_two_runs(tmp_path: Path) -> None:
    runs = [read_record(write_run(tmp_path / name, 20, lr=lr)) for name, lr in (("a", 1e-3), ("<b>", 2e-3))]
    text = report_page(runs)
    assert len(text) < 2_000_000
    assert "<b>" not in text.split("<script")[0] and "&lt;b&gt;" in text  # names are escaped
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text) == []  # nothing is fetched
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        *("lm loss", "learning rate", "grad norm", "tokens per second", "MFU", "phases by rank", "samples")
    ]
    for label in ("training", "validation", "skipped iterations", "resumed", "evaluation", "checkpoint"):
        assert label in text
    differing = text.split("flags that differ")[1].split("</table>")[0]
    assert "--lr" in differing and "0.002" in differing and "--seq-length" not in differing
    for axis in ("iteration", "tokens", "hours"):
        assert f'data-field="{axis}"' in text
    samples = text.split("<h2>samples</h2>")[1].split("</section>")[0]
    assert samples.count("one &amp; &lt;two&gt; at 20") == 2 and samples.count("<summary>") == 1


def test_curves_suit_a_light_and_a_dark_page() -> None:
    """No background, and everything beside the curves in a gray that shows on white and on black."""
    rows = [{"iteration": i, "lm loss": 1.0} for i in (1, 2)]
    none = {"evaluations": [], "samples": [], "starts": [], "checkpoints": [], "by_rank": {}}
    runs = [RunRecord(name=name, training=rows, **none) for name in "abcd"]
    ((title, figure),) = page._figures(runs)
    assert title == "lm loss"
    fills = (figure.background_fill_color, figure.border_fill_color, figure.outline_line_color)
    (legend,) = figure.legend
    assert {*fills, legend.background_fill_color, legend.border_line_color} == {None}
    colors = {legend.label_text_color, figure.xgrid.grid_line_color, figure.ygrid.grid_line_color}
    for axis in figure.axis:
        colors |= {axis.major_label_text_color, axis.axis_label_text_color, axis.axis_line_color}
        colors |= {axis.major_tick_line_color, axis.minor_tick_line_color}
    assert colors == {page.GRAY}
    # The legend is below the curves in rows of two, and the figure is higher by its second row.
    assert legend in figure.below and (legend.orientation, legend.ncols) == ("horizontal", 2)
    assert figure.height >= page.HEIGHT + 20 and legend.click_policy == "hide"


def test_page_of_a_run_without_iterations() -> None:
    run = RunRecord(
        name="empty", training=[], evaluations=[], samples=[], starts=[], checkpoints=[], by_rank={}
    )
    text = report_page([run])
    assert "No iteration has been reported yet." in text


def test_thinned_samples() -> None:
    rows = [{"iteration": i, "text": {f"sample {n}": f"text {n}.{i}." for n in range(15)}} for i in range(50)]
    run = RunRecord(
        name="run", training=[], evaluations=[], samples=rows, starts=[], checkpoints=[], by_rank={}
    )
    text = report_page([run])
    assert text.count("text 0.") == page.TEXTS and "text 0.0." in text and "text 0.49." in text
    assert "text 9." in text and "text 10." not in text
    assert "5 more prompts are in the file of metrics." in text


def test_thinned_curves() -> None:
    rows = [
        {"iteration": i, "lm loss": float(i), "grad norm": 100.0 if i == 3 else 1.0}
        for i in range(1, 4 * page.POINTS + 1)
    ]
    losses = thin_out(rows, "lm loss")
    assert len(losses) == page.POINTS
    assert losses[0] == {"iteration": 4, "lm loss": 2.5, "grad norm": 1.0}
    assert thin_out(rows, "grad norm")[0]["grad norm"] == 100.0
    rows[1]["lm loss"] = None  # not finite
    assert thin_out(rows, "lm loss")[0]["lm loss"] is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, output = write_run(tmp_path / "run", 12), tmp_path / "page.html"
    main([str(run), "--output", str(output)])
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert "lm loss" in output.read_text()
    with pytest.raises(InputError, match=r"--output: .* cannot be written"):
        main([str(run), "--output", str(tmp_path / "none" / "page.html")])


TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 10 --eval-interval 5 --eval-iters 1 --log-interval 1 --device cpu"
).split()


def test_a_run_leaves_a_report(tmp_path: Path, pretrain: Callable[..., str]) -> None:
    save = ("--save", tmp_path, "--load", tmp_path)
    out = pretrain(*TINY, "--train-iters", 12, "--exit-interval", 6, *save)
    assert (
        f"no report: {tmp_path / 'metrics.jsonl'} has fewer than 10 log lines; lower --log-interval\n" in out
    )
    assert not (tmp_path / "report.html").exists()
    out = pretrain(*TINY, "--train-iters", 12, *save, "--timing-log-level", 1)
    assert f"report: {tmp_path / 'report.html'}\n" in out
    run = read_record(tmp_path)
    assert [start["iteration"] for start in run.starts] == [0, 6]
    assert [row["iteration"] for row in run.training] == list(range(1, 13))
    assert [row["iteration"] for row in run.checkpoints] == [6, 12]
    phases, memory = (
        run.by_rank["phases, seconds per iteration"],
        run.by_rank["memory after the first iteration, bytes"],
    )
    assert phases["optimizer"].keys() == memory["allocated"].keys() == {"0"}
    page = (tmp_path / "report.html").read_text()
    for label in (
        "resumed",
        "checkpoint",
        "phases, seconds per iteration<",
        "memory after the first iteration, bytes<",
    ):
        assert label in page


def test_a_report_cannot_end_a_run(
    tmp_path: Path, pretrain: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_end, "report_page", lambda runs: 1 / 0)
    out = pretrain(*TINY, "--train-iters", 10, "--save", tmp_path)
    assert f"warning: no report was written to {tmp_path / 'report.html'}: division by zero\n" in out
