"""Verification with real processes: clean layouts pass, and a fault in one of them is located."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.commands import verify as command
from megatron.commands.verify import convert, left_out, main, not_read, parse, parse_command, train_rank
from megatron.data.config import DataConfig
from megatron.errors import InputError, TrainingFault
from megatron.optim.grad_reducer import GradReducer
from megatron.parallel.collectives import local_shard
from megatron.training.engine import Engine, GlobalBatch
from megatron.training.stage import MeanLoss
from megatron.variants import latent_attention
from megatron.verify.format import CaptureWriter, Record
from megatron.verify.launch import Failure, launch
from megatron.verify.layouts import Layout
from megatron.verify.runner import STEPS, Check, Runs, Verification
from megatron.verify.shrink import LATENT_WIDTHS, command_words, shrink

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 2 --lr 2e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 250
    --hidden-dropout 0 --attention-dropout 0
"""
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"


def without_partial_sums() -> None:
    GradReducer._sum_partial = lambda self: None


def with_doubled_losses() -> None:
    add, next_global_batch = MeanLoss.add, Engine.next_global_batch

    def with_doubled_gradients(self: Engine, *arguments: Any) -> GlobalBatch:
        batch = next_global_batch(self, *arguments)
        doubled = [dataclasses.replace(x, loss_grad=2 * x.loss_grad) for x in batch.microbatches]
        return dataclasses.replace(batch, microbatches=doubled)

    MeanLoss.add = lambda self, sums: 2 * add(self, sums)
    Engine.next_global_batch = with_doubled_gradients


def without_sum_of_the_shared_key() -> None:
    """torchtitan #1373: the gradient of latent attention's rotary key stays that of a rank's heads."""
    backward = latent_attention._ToHeads.backward

    def faulty(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed, *others = backward(ctx, grad)
        own = local_shard(grad, ctx.tp) if ctx.sequence_parallel else grad
        key = LATENT_WIDTHS["qk_pos_emb_head_dim"]
        summed[..., -key:] = own[..., -key:]
        return summed, *others

    latent_attention._ToHeads.backward = staticmethod(faulty)


FAULTS: dict[str, Callable[[], None]] = {
    "partial": without_partial_sums,
    "loss": with_doubled_losses,
    "key": without_sum_of_the_shared_key,
}


def train_with_fault(fault: str, *arguments: Any) -> None:
    FAULTS[fault]()
    train_rank(*arguments)


def start(fault: str, run: Any, processes: int, spread: Any, log: Path) -> Failure | None:
    """Put a fault into the runs of several processes."""
    arguments = ("pretrain_gpt", command_words(run), spread)
    if processes == 1:
        return launch(train_rank, 1, arguments, log, timeout=120)
    return launch(train_with_fault, processes, (fault, *arguments), log, timeout=120)


def find(fault: str, folder: Path, flags: str = SP) -> Check:
    small = shrink(parse("pretrain_gpt", f"{FLAGS} {flags}".split()), 2, 2, STEPS)
    runs = Runs(small, [small.layout], folder, functools.partial(start, fault))
    (check,) = Verification(runs, [small.layout], print).run(quick=True)
    return check


def test_a_missing_sum_is_located(tmp_path: Path) -> None:
    check = find("partial", tmp_path)
    assert check.finding is not None and not check.passed
    assert (check.finding.step, check.finding.what, check.finding.ranks) == (1, "gradient", (0, 1))
    assert check.finding.pattern == "missing sum over the tp axis"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP, SP], ids=["", "SP"])
def test_a_missing_sum_of_the_shared_key_is_located(layout: str, tmp_path: Path) -> None:
    flags = "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm"
    check = find("key", tmp_path, f"{flags} {layout}")
    assert check.finding is not None
    module = "decoder.layers.1.self_attention.linear_kv_down_proj"
    found = check.finding.step, check.finding.what, check.finding.module, check.finding.ranks
    assert found == (1, "activation gradient", module, (0, 1))
    # The channels of the key follow those of the latent.
    assert f"wrong in 20% of the elements, from {LATENT_WIDTHS['kv_lora_rank']} " in check.finding.pattern


@pytest.mark.slow
def test_a_scaled_loss_is_located(tmp_path: Path) -> None:
    check = find("loss", tmp_path)
    assert check.finding is not None
    assert check.finding.what == "activation gradient" and check.finding.module == "the model"
    assert check.finding.pattern.startswith("summed twice")
    assert check.finding.look_at.startswith("the scale of the loss")


@pytest.mark.slow
def test_the_command_verifies_layouts_and_resumes(tmp_path: Path) -> None:
    flags = f"{FLAGS} {SP} --use-distributed-optimizer --hidden-dropout 0.1".split()
    words = ["--output", str(tmp_path / "out"), "--layouts", "p2", "--processes", "4", "--keep"]
    assert main([*words, "--", "pretrain_gpt.py", *flags]) == 0
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert [check["name"] for check in found["checks"]] == [
        "the run's layout, t2d2",
        "resume of t2d2 in t2d2",
        "resume of t2d2 in one process",
        "layout p2",
        "conversion to Hugging Face and back",
    ]
    assert found["passed"] and found["checks"][3]["kinds"]["mask"]["compared"] > 0
    gradients = found["checks"][0]["kinds"]["gradient"]
    assert 0 < gradients["difference"] == pytest.approx(gradients["largest"] * gradients["bound"])
    assert str(tmp_path) not in json.dumps([check["command"] for check in found["checks"]])
    assert found["compared"] > 4000
    assert "Verification: <span" in (tmp_path / "out" / "certificate.html").read_text()
    # Two captures can be compared by themselves, and a changed value is seen.
    captures = [tmp_path / "out" / "runs" / f"capture-{name}" for name in ("one", "train")]
    assert main(["--output", str(tmp_path / "again"), "--compare", *map(str, captures)]) == 0
    path = captures[1] / "step_0000001" / "rank_00001.safetensors"
    tensors = load_file(path)
    records = json.loads(path.with_suffix(".json").read_text())["records"]
    key = next(row["key"] for row in records if row["kind"] == "gradient")
    save_file({**tensors, key: tensors[key] * (1 + 1e-4)}, path)
    assert main(["--output", str(tmp_path / "again"), "--compare", *map(str, captures)]) == 1


@pytest.mark.slow
def test_bert_with_as_many_positions_on_a_rank_as_channels(tmp_path: Path) -> None:
    """Its pooled output [b, h] is no loss at positions [b, s], which ranks divide."""
    flags = f"{FLAGS} --seq-length 64 --micro-batch-size 4 --global-batch-size 16".split()
    words = ["--quick", "--max-processes", "2", "--output", str(tmp_path / "out"), "--"]
    assert main([*words, "pretrain_bert.py", *flags, "--context-parallel-size", "2"]) == 0


@pytest.mark.slow
def test_bert_whose_orders_of_segments_cancel(tmp_path: Path) -> None:
    """Half of the samples in each order: the gradient of the order's bias is a hundredth of its terms."""
    flags = f"{FLAGS} --seq-length 64 --micro-batch-size 4 --global-batch-size 16 --seed 1".split()
    words = ["--quick", "--max-processes", "4", "--processes", "4", "--output", str(tmp_path / "out"), "--"]
    assert main([*words, "pretrain_bert.py", *flags, "--context-parallel-size", "2"]) == 0


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    failure = launch(
        command.train_rank, 2, ("pretrain_gpt", ["--no-such-flag"], None), tmp_path / "log", timeout=60
    )
    assert failure is not None and "--no-such-flag is not a flag of this command" in failure.message


def test_a_wrong_conversion_is_part_of_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(words: list[str]) -> None:
        raise TrainingFault("logits differ")

    monkeypatch.setattr("megatron.commands.convert_checkpoint.main", main)
    check = convert(tmp_path, tmp_path / "converted")
    assert check.error == "logits differ" and not check.passed


def test_flags_that_the_runs_leave_out_are_not_covered() -> None:
    small = f"{FLAGS} {TP} --tp-comm-overlap --cpu-offload-activations".split()
    assert left_out(parse("pretrain_gpt", small)) == [
        "--tp-comm-overlap, which the runs leave out",
        "--cpu-offload-activations, which the runs leave out",
    ]
    split = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h2 --untie-embeddings-and-output-weights"
    validated = f"{FLAGS} {split} --enable-optimizer-post-validation".split()
    assert left_out(parse("pretrain_gpt", validated)) == [
        "--enable-optimizer-post-validation, which the runs leave out"
    ]
    assert left_out(parse("pretrain_gpt", FLAGS.split())) == []


def test_commands_are_split() -> None:
    torchrun = "torchrun --nnodes 2 --nproc-per-node=4 pretrain_gpt.py --lr 1".split()
    assert parse_command(torchrun) == ("pretrain_gpt", 8, ["--lr", "1"])
    assert parse_command(["python", "-m", "megatron", "pretrain-bert"]) == ("pretrain_bert", None, [])
    with pytest.raises(
        InputError, match=r"names neither pretrain_gpt\.py nor pretrain_bert\.py; for a launch script"
    ):
        parse_command(["bash", "train.sh"])
    with pytest.raises(InputError, match="--nproc-per-node gpu does not tell the number of processes"):
        parse_command("torchrun --nproc_per_node gpu pretrain_gpt.py".split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the command to verify is required after --"),
        (["torchrun", "pretrain_gpt.py", "--lr", "1"], "the command to verify is required after --"),
        (["--compare", "a"], "--compare: a must be two captures or more"),
        (["--layouts", "x2", "--", "pretrain_gpt.py", *FLAGS.split()], "--layouts: x2 is not a layout"),
        (["--layouts", "t9", "--", "pretrain_gpt.py", *FLAGS.split()], "needs more than --max-processes 8"),
    ],
)
def test_wrong_input(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        main(words)


def test_a_command_that_would_be_refused_is_refused(tmp_path: Path) -> None:
    """Shrinking would give the model heads that three ranks can split."""
    words = [
        "--output",
        str(tmp_path),
        "--",
        "pretrain_gpt.py",
        *FLAGS.split(),
        "--tensor-model-parallel-size",
        "3",
    ]
    with pytest.raises(InputError, match="3 does not divide --num-attention-heads 4"):
        main(words)


def test_fp8_is_refused() -> None:
    flags = "--bf16 --fp8-format hybrid --num-attention-heads 2"
    with pytest.raises(InputError, match=r"--fp8-format: hybrid rounds differently in each layout"):
        main(["--", "pretrain_gpt.py", *FLAGS.split(), *flags.split()])


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--output", str(tmp_path / "file" / "out"), "--", "pretrain_gpt.py", *FLAGS.split()]
    with pytest.raises(InputError, match=r"--output: .* cannot be written"):
        main(words)


def test_a_capture_without_a_rank_is_refused(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, coordinates={"dp": 0}, sizes={"dp": 2})
    writer.add(Record(kind="loss", name="lm loss", step=1), torch.ones(()))
    writer.flush()
    with pytest.raises(InputError, match="step 1 lacks rank 1 of 2"):
        main(["--output", str(tmp_path / "out"), "--compare", str(tmp_path), str(tmp_path)])


def test_layouts_have_names() -> None:
    layouts = Layout(), Layout(2), Layout(2, 1, 4), Layout(2, 1, 2, 4, 1)
    assert [str(layout) for layout in layouts] == ["one process", "t2", "t2d4", "t2d2e4et1"]


def test_the_default_processes_include_context_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas of a model whose sequences two ranks divide, in as many processes as are allowed."""

    class Started(Exception):
        pass

    def start(*arguments: object) -> None:
        raise Started

    monkeypatch.setattr("megatron.verify.runner.Runs", start)
    words = ["--output", str(tmp_path), "--quick", "--max-processes", "2", "--"]
    with pytest.raises(Started):
        main([*words, "pretrain_gpt.py", *FLAGS.split(), "--context-parallel-size", "2"])
    assert "verifying pretrain_gpt in c2, of 2 processes" in capsys.readouterr().out


def test_data_that_is_not_read_is_not_covered() -> None:
    assert not_read(DataConfig(seq_length=8)).endswith("files: all runs read the same synthetic data")
    assert " and --packing best-fit: " in not_read(DataConfig(seq_length=8, packing="best-fit"))
