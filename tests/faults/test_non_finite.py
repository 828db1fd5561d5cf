"""A value that is not finite, put in at a known place, is found there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from pathlib import Path

import pytest
import torch
from distributed import run_distributed

from megatron.arguments import parse_run_config
from megatron.errors import TrainingFault
from megatron.plugins import run
from pretrain_gpt import DEFAULTS, GPT

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr 2e-3
    --eval-iters 0 --num-workers 0 --device cpu --distributed-timeout-minutes 1
"""
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"


@dataclasses.dataclass(frozen=True)
class Injection:
    """NaN in one place: of `rank`, at the calls of `module` whose numbers are `calls`."""

    rank: int
    module: str
    calls: tuple[int, ...]
    backward: bool = False

    def task(self, rank: int):
        count = 0

        def spoil(_: object, __: object, out: torch.Tensor | tuple) -> torch.Tensor | tuple:
            nonlocal count
            count += 1
            if count - 1 not in self.calls:
                return out
            x, *rest = out if isinstance(out, tuple) else (out,)
            if self.backward:
                x.register_hook(lambda grad: grad * torch.nan)
            else:
                x = x + torch.where(torch.arange(x.shape[-1]) == 3, torch.nan, 0.0).to(x.dtype)
            return (x, *rest) if isinstance(out, tuple) else x

        def build_model(*arguments: object) -> torch.nn.Module:
            model = GPT.build_model(*arguments)
            for path, module in model.named_modules():
                if rank == self.rank and path == self.module:
                    module.register_forward_hook(spoil)
            return model

        return dataclasses.replace(GPT, build_model=build_model)


def train(flags: str, injection: Injection) -> tuple[str, str]:
    """What ended the run, and what it printed, as rank 0 has it."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            run(config, injection.task(int(os.environ["RANK"])))
        except TrainingFault as fault:
            return f"{type(fault).__name__}: {fault}", output.getvalue()
    return "", output.getvalue()


def calls(iteration: int, microbatch: int, microbatches: int, again: int) -> tuple[int, int]:
    """Of a microbatch in an iteration (the first is 1) and when that is computed again after `again` iterations."""
    return (iteration - 1) * microbatches + microbatch, again * microbatches + microbatch


CASES = {
    "T2": (
        2,
        f"{TP} 2",
        Injection(1, "decoder.layers.2.mlp.linear_fc1", calls(3, 5, 8, 4)),
        "rank 1, microbatch 5",
    ),
    "T2 row": (
        2,
        f"{TP} 2 --sequence-parallel",
        Injection(0, "decoder.layers.1.self_attention.linear_qkv", calls(4, 0, 8, 4)),
        "rank 0, microbatch 0",
    ),
    "P2": (
        2,
        f"{PP} 2",
        Injection(1, "decoder.layers.2.input_layernorm", calls(1, 7, 8, 4)),
        "rank 1, microbatch 7",
    ),
    "P2V2": (
        2,
        f"{PP} 2 {CHUNKS} 1",
        Injection(0, "decoder.layers.2.mlp.linear_fc2", calls(2, 3, 8, 4)),
        "rank 0, microbatch 3",
    ),
    "T2 fp16": (
        2,
        f"{TP} 2 --fp16 --loss-scale 1024",
        Injection(1, "decoder.layers.2.mlp.linear_fc1", calls(3, 5, 8, 4)),
        "rank 1, microbatch 5",
    ),
    # Of the loss itself all gradients would be finite.
    "loss": (2, f"{PP} 2", Injection(1, "", calls(2, 2, 8, 4)), "rank 1, microbatch 2"),
    "D2+ZeRO": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000 --bf16",
        Injection(1, "decoder.layers.3.mlp.linear_fc1", calls(2, 1, 4, 4)),
        "rank 1, microbatch 1",
    ),
}


@pytest.mark.parametrize(
    ("case", "backward"),
    [
        pytest.param(case, back, marks=pytest.mark.slow if back and case != "T2 row" else ())
        for case in CASES
        for back in (False, True)
        if not back or case != "loss"
    ],
)
def test_the_rank_microbatch_and_layer_are_named(case: str, backward: bool, tmp_path: Path) -> None:
    processes, flags, injection, where = CASES[case]
    injection = dataclasses.replace(injection, backward=backward)
    flags = f"{flags} --log-interval 4 --save {tmp_path / 'a'}"
    ((fault, _), *_) = run_distributed(train, processes, flags, injection)
    bad = injection.calls[0] // (8 if "D2" not in case else 4) + 1
    assert fault.startswith(f"TrainingFault: iteration {bad}: the loss or its gradient is not finite"), fault
    assert "Recomputed, it is not finite again" in fault
    if backward:
        assert (
            f"all outputs are finite, and the first gradient that is not is that of {injection.module}"
            in fault
        )
    else:
        what = f"output of {injection.module}" if injection.module else "loss"
        assert f"first the {what} ({where})" in fault
    assert f"({where})" in fault


def test_the_weights_are_those_before_it(tmp_path: Path) -> None:
    clean = Injection(1, "", ())
    run_distributed(train, 2, f"--log-interval 2 --save {tmp_path / 'a'} --exit-interval 6", clean)
    spoiled = Injection(1, "decoder.layers.0.mlp.linear_fc1", calls(7, 2, 4, 12))
    ((fault, _), *_) = run_distributed(train, 2, f"--log-interval 12 --save {tmp_path / 'b'}", spoiled)
    assert f"no weights were changed, and {tmp_path / 'b'} holds them as of iteration 6" in fault
    folders = [tmp_path / name / "iter_0000006" for name in "ab"]
    for path in folders[0].glob("*.safetensors"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
    one, other = (json.loads((folder / "state.json").read_text()) for folder in folders)
    assert one["consumed_samples"] == other["consumed_samples"] == 48
    assert [row["iteration"] for row in other["history"]] == [1, 2, 3, 4, 5, 6]
    # Gone on with, it ends as if nothing had happened.
    again = f"--log-interval 1 --save {tmp_path / 'b'} --load {tmp_path / 'b'}"
    assert run_distributed(train, 2, again, clean)[0][0] == ""


def test_what_does_not_repeat_is_told_to_be_passing(tmp_path: Path) -> None:
    once = Injection(1, "decoder.layers.0.mlp.linear_fc1", (9,))
    ((fault, _), *_) = run_distributed(train, 2, f"--log-interval 1 --save {tmp_path / 'a'}", once)
    assert fault.startswith("PassingFault: iteration 3: ")
    assert "Recomputed, it is finite: a machine computes wrongly. The loss was not finite on rank 1" in fault
    assert "holds them as of iteration 2" in fault


def test_skipped_iterations_change_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    spoiled = Injection(0, "decoder.layers.0.mlp.linear_fc1", (8, 9))
    flags = f"--on-non-finite skip --log-interval 1 --metrics-path {tmp_path / 'a.jsonl'}"
    fault, output = run_distributed(train, 2, flags, spoiled)[0]
    assert fault == "" and "number of skipped iterations:   1 | number of nan iterations:   1" in output
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["skipped iterations"] for row in rows] == [0, 0, 1] + [0] * 9
    assert rows[2]["grad norm"] is None and rows[3]["grad norm"] > 0


def test_ten_in_a_row_end_a_run_that_skips() -> None:
    """The tenth of 21 iterations, each with 4 calls on a rank, is good."""
    spoiled = Injection(0, "decoder.layers.0.mlp.linear_fc1", (*range(36), *range(40, 84)))
    flags = "--on-non-finite skip --log-interval 1 --train-iters 21"
    fault, _ = run_distributed(train, 2, flags, spoiled)[0]
    assert fault.startswith("TrainingFault: iteration 20: no finite gradient for 10 iterations in a row")
