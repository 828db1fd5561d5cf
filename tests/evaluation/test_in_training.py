"""--eval-tasks: NVIDIA's zero-shot metrics during training, without an effect on training."""

from __future__ import annotations

import json
import math
import re
import types
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of

from megatron.arguments import parse_run_config
from megatron.commands import convert_checkpoint, evaluate
from megatron.errors import InputError
from megatron.evaluation.in_training import EvalTasks, read_eval_tasks
from megatron.parallel.mesh import init_mesh
from megatron.plugins import run
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.tokenizer.null import NullTokenizer
from megatron.training.build import build_engine
from megatron.training.report import EvalResult
from megatron.variants.multi_token_prediction import with_mtp

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-workers 0 --ops-backend plain
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 20 --micro-batch-size 2 --lr 1e-2
    --train-iters 5 --eval-interval 2 --eval-iters 1 --log-interval 1 --hidden-dropout 0.1 --attention-dropout 0.1
""".split()
KINDS = ("WIKITEXT103", "LAMBADA", "PPL")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A file of numbers for each of KINDS, with windows and lines that do not divide evenly into batches."""
    folder = tmp_path_factory.mktemp("data")
    numbers = torch.randint(59, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [str(n) for n in numbers]
    (folder / "wiki").write_text(" ".join(words[:333]))
    lines = [" ".join(words[i : i + 1 + i % 29 + 1]) for i in range(0, 1400, 30)]
    (folder / "lambada").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (folder / "text").write_text(" ".join(words[:177]))
    return [str(folder / name) for name in ("wiki", "lambada", "text")]


def test_evaluation_on_start(pretrain, tmp_path: Path) -> None:
    def rows(flags: list[object], name: str) -> list[dict[str, float]]:
        pretrain(*TINY, "--metrics-path", tmp_path / name, *flags)
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
        return [{name: x for name, x in line.items() if name not in timed} for line in lines]

    without, found = rows([], "without.jsonl"), rows(["--eval-on-start"], "with.jsonl")
    assert found[1:] == without
    assert found[0]["iteration"] == found[0]["consumed samples"] == 0
    assert found[0]["lm loss validation"] == pytest.approx(math.log(59), rel=0.05)


def test_eval_tasks_do_not_change_training(pretrain, files: list[str], tmp_path: Path) -> None:
    metrics = [tmp_path / "without.jsonl", tmp_path / "with.jsonl"]
    pretrain(*TINY, "--metrics-path", metrics[0])
    tasks = ["--eval-tasks", *KINDS, "--eval-tasks-data", *files, "--overlapping-eval", 7]
    outputs = ["--tensorboard-dir", tmp_path / "events", "--save", tmp_path / "run"]
    out = pretrain(*TINY, "--metrics-path", metrics[1], *tasks, *outputs, "--log-format", "megatron")
    without, found = ([json.loads(line) for line in path.read_text().splitlines()] for path in metrics)
    metric_rows = [row for row in found if any(name.startswith(KINDS) for name in row)]
    losses = [[row["lm loss"] for row in rows if "lm loss" in row] for rows in (without, found)]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert len(found) == len(without) + len(metric_rows)
    assert [row["iteration"] for row in metric_rows] == [2, 2, 2, 4, 4, 4, 5, 5, 5]
    wiki, lambada, ppl = metric_rows[-3:]
    assert math.exp(wiki["WIKITEXT103 avg loss"]) == pytest.approx(wiki["WIKITEXT103 ppl"])
    assert lambada["LAMBADA total examples"] == 47
    assert ppl["PPL ppl"] == pytest.approx(59, rel=0.2)  # random numbers cannot be learned
    assert "\n validation results on WIKITEXT103 at iteration 2 | avg loss: " in out
    assert "\n validation results on LAMBADA at the end of training | number correct: " in out
    for kind, file, row in zip(KINDS, files, metric_rows[-3:], strict=True):
        result = tmp_path / "result.json"
        words = ["--load", str(tmp_path / "run"), "--device", "cpu", "--task", kind, "--valid-data", file]
        overlapping = [] if kind == "LAMBADA" else ["--overlapping-eval", "7"]
        evaluate.main([*words, *overlapping, "--output-path", str(result)])
        standalone = {f"{kind} {name}": x for name, x in json.loads(result.read_text())["results"].items()}
        assert standalone == pytest.approx({name: row[name] for name in standalone}, rel=1e-6)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (configuration,) = events.Tensors("configuration/text_summary")
    assert b"    train-iters: 5\n" in configuration.tensor_proto.string_val[0]
    points = [(point.step, point.value) for point in events.Scalars("valid/WIKITEXT103 adjusted ppl")]
    assert points == [
        (step, pytest.approx(value))
        for step, value in ((row["iteration"], row["WIKITEXT103 adjusted ppl"]) for row in metric_rows[::3])
    ]


def task_results(flags: str, files: list[str]) -> list[float]:
    """Results of all tasks for a model at initialization."""
    tasks = f"--eval-tasks {' '.join(KINDS)} --eval-tasks-data {' '.join(files)} --overlapping-eval 5"
    config = config_of(f"{flags} {tasks} --init-method-std 0.3 --ops-backend plain")
    found: list[EvalResult] = []
    with init_mesh(config.parallel, CPU) as mesh:
        task = with_mtp(config, GPT)
        engine = build_engine(config, task, mesh, vocab_size=60, padded_vocab_size=64)
        engine.buffer.initialize(1)
        engine.buffer.sync_params()
        trainer = types.SimpleNamespace(
            config=config,
            task=task,
            mesh=mesh,
            engine=engine,
            tokenizer=NullTokenizer(59),
            log=print,
            report_evaluation=found.append,
        )
        hook = EvalTasks()
        with hook.during_run(trainer):
            hook.evaluate(trainer, "the start")
        assert not engine.transfers.sending and not engine.buffer.gather.pending
    assert [result.title for result in found] == list(KINDS)
    return [value for result in found for value in result.values.values()]


def test_layouts_agree(files: list[str]) -> None:
    """Parts of layers and of sequences; interleaved stages with replicas, the last of which gets fewer samples."""
    expected = task_results("", files)
    assert min(expected) > 0  # some last words are predicted
    for processes, flags in (
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (
            4,
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer "
            "--overlap-param-gather",
        ),
        (2, "--context-parallel-size 2 --attention-dropout 0"),
    ):
        for found in run_distributed(task_results, processes, f"{flags} --micro-batch-size 3", files):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_layouts_agree_with_multi_token_prediction(files: list[str]) -> None:
    """Context parallelism prepares batches for MTP, and the last stage has the tied table in its block."""
    model = "--mtp-num-layers 1 --position-embedding-type rope"
    expected = task_results(model, files)
    for flags in (
        "--context-parallel-size 2",
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather",
        "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params",
    ):
        processes = 4 if "pipeline" in flags else 2
        for found in run_distributed(task_results, processes, f"{model} {flags}", files):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.slow)])
def test_replicas_that_share_experts_agree(files: list[str], dispatcher: str) -> None:
    """The last replica gets fewer samples, and of other lengths, but takes part in all passes."""
    experts = f"--disable-bias-linear --num-experts 4 --moe-token-dispatcher-type {dispatcher}"
    expected, flags = task_results(experts, files), f"{experts} --expert-model-parallel-size 2"
    for found in run_distributed(task_results, 2, f"{flags} --micro-batch-size 3", files):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_equals_nvidia_metrics(shared: Path, tmp_path: Path, pretrain) -> None:
    """Metrics of NVIDIA's checkpoint as printed by its own evaluation, with --skip-train."""
    vectors, data = shared / "vectors" / "eval-v2.5", shared / "data"
    folder = tmp_path / "run"
    words = ["--from", "megatron", "--to", "native", "--load", vectors / "after200_tp1", "--save", folder]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", data / "gpt2-tiny-vocab.json"]
    convert_checkpoint.main([str(w) for w in [*words, "--merge-file", data / "gpt2-tiny-merges.txt"]])
    run = "--use-checkpoint-args --no-mask-padded-vocab --skip-train --train-iters 1 --micro-batch-size 12 --mock-data"
    run += " --eval-iters 0 --lr 1e-3 --device cpu --num-workers 0 --ops-backend plain"
    files = [vectors / "wiki300.test.tokens", vectors / "lambada400.jsonl"]
    tasks = ["--eval-tasks", "WIKITEXT103", "LAMBADA", "--eval-tasks-data", *files, "--overlapping-eval", 64]
    out = pretrain("--load", folder, *run.split(), *tasks, "--log-format", "megatron")
    assert (
        "WIKITEXT103 at iteration 200 | avg loss: 6.7403E+00 | ppl: 8.4583E+02 | adjusted ppl: 1.8280E+04 | "
        "token ratio: 1.455947625388371 |"
    ) in out
    assert "number correct: 2.0000E+00 | total examples: 4.0000E+02 | avg accuracy: 5.0000E-03\n" in out


def test_invalid_eval_tasks_are_one_line(files: list[str], tmp_path: Path) -> None:
    flags = [*TINY, "--eval-tasks", "PPL", "--eval-tasks-data"]
    config = parse_run_config([*flags, "nowhere"], description="", defaults={})
    message = "--eval-tasks-data: nowhere cannot be read (No such file or directory)"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        run(config, GPT)
    config = parse_run_config([*flags, files[2]], description="", defaults={})
    with pytest.raises(InputError, match=r"^--eval-tasks: PPL need a GPT, and this run trains BERT$"):
        read_eval_tasks(config, bert(binary_head=True), NullTokenizer(59), print)
