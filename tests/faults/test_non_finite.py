"""An injected NaN is found where it was injected."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed import run_distributed

from megatron.arguments import parse_run_config
from megatron.checkpoint import save as save_module
from megatron.errors import TrainingFault
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training import build
from megatron.training.config import RunConfig
from megatron.training.stage import StageModel

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr 2e-3
    --eval-iters 0 --num-workers 0 --device cpu --distributed-timeout-minutes 1
"""
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"


@dataclasses.dataclass(frozen=True)
class Injection:
    """NaN in the output of a module, or in its gradient.

    Attributes:
        rank: rank that computes the NaN.
        module: path of the module.
        calls: numbers of the affected calls of the module.
        backward: put the NaN into the gradient of the output.
    """

    rank: int
    module: str
    calls: tuple[int, ...]
    backward: bool = False

    def attach(self, config: RunConfig, model: StageModel, device: torch.device) -> None:
        """As a function of `MODEL_HOOKS`."""
        count = 0

        def inject(_: object, __: object, out: torch.Tensor | tuple) -> torch.Tensor | tuple:
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

        for chunk in model.modules:
            for path, module in chunk.named_modules():
                if int(os.environ["RANK"]) == self.rank and path == self.module:
                    module.register_forward_hook(inject)


def train(flags: str, injection: Injection) -> tuple[str, str]:
    """Train; return the error that ended the run, and this rank's output."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    hooks = [*build.MODEL_HOOKS, injection.attach]
    with contextlib.redirect_stdout(io.StringIO()) as output, mock.patch.object(build, "MODEL_HOOKS", hooks):
        try:
            run(config, GPT)
        except TrainingFault as fault:
            return f"{type(fault).__name__}: {fault}", output.getvalue()
    return "", output.getvalue()


def calls(iteration: int, microbatch: int, microbatches: int, again: int) -> tuple[int, int]:
    """Call numbers of a microbatch in `iteration` (from 1), and in its recomputation after `again` iterations."""
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
        # Later calls of the next stage, the second chunk of rank 0, are not finite either.
        Injection(1, "decoder.layers.1.mlp.linear_fc2", calls(2, 3, 8, 4)),
        "rank 1, microbatch 3",
    ),
    "T2 fp16": (
        2,
        f"{TP} 2 --fp16 --loss-scale 1024",
        Injection(1, "decoder.layers.2.mlp.linear_fc1", calls(3, 5, 8, 4)),
        "rank 1, microbatch 5",
    ),
    # No backward case: with NaN in the loss itself, all gradients are finite.
    "loss": (2, f"{PP} 2", Injection(1, "", calls(2, 2, 8, 4)), "rank 1, microbatch 2"),
    "D2+ZeRO3": (
        2,
        "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --bf16",
        Injection(1, "decoder.layers.3.mlp.linear_fc1", calls(2, 1, 4, 4)),
        "rank 1, microbatch 1",
    ),
    "P2 MTP": (
        2,
        f"{PP} 2 --mtp-num-layers 1 --position-embedding-type rope",
        Injection(1, "mtp.layers.0.eh_proj", calls(2, 5, 8, 4)),
        "rank 1, microbatch 5",
    ),
    "D2+ZeRO": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000 --bf16",
        Injection(1, "decoder.layers.3.mlp.linear_fc1", calls(2, 1, 4, 4)),
        "rank 1, microbatch 1",
    ),
}


@pytest.mark.parametrize(
    ("case", "backward"),
    # By default one case has the NaN in backward, and the others in forward.
    [
        pytest.param(case, back, marks=() if back == (case == "T2 row") else pytest.mark.slow)
        for case in CASES
        for back in (False, True)
        if not back or case != "loss"
    ],
)
def test_rank_microbatch_and_layer_are_named(case: str, backward: bool, tmp_path: Path) -> None:
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


def test_checkpoint_holds_the_weights_before_the_nan(tmp_path: Path) -> None:
    clean = Injection(1, "", ())
    run_distributed(train, 2, f"--log-interval 2 --save {tmp_path / 'a'} --exit-interval 6", clean)
    injection = Injection(1, "decoder.layers.0.mlp.linear_fc1", calls(7, 2, 4, 12))
    ((fault, _), *_) = run_distributed(train, 2, f"--log-interval 12 --save {tmp_path / 'b'}", injection)
    assert f"no weights were changed, and {tmp_path / 'b'} holds them as of iteration 6" in fault
    folders = [tmp_path / name / "iter_0000006" for name in "ab"]
    for path in folders[0].glob("*.safetensors"):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
    one, other = (json.loads((folder / "state.json").read_text()) for folder in folders)
    assert one["consumed_samples"] == other["consumed_samples"] == 48
    assert [row["iteration"] for row in other["history"]] == [1, 2, 3, 4, 5, 6]
    # Resumed without the injection, the run completes.
    again = f"--log-interval 1 --save {tmp_path / 'b'} --load {tmp_path / 'b'}"
    assert run_distributed(train, 2, again, clean)[0][0] == ""


def test_a_checkpoint_that_cannot_be_written_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save in the background fails after the message has been composed, unless it is waited for."""

    def full_disk(*_: object) -> None:
        time.sleep(0.5)
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(save_module, "write_pieces", full_disk)
    injection = Injection(0, "decoder.layers.0.mlp.linear_fc1", calls(2, 3, 8, 12))
    fault, _ = train(f"--log-interval 12 --async-save --save {tmp_path}", injection)
    assert "cannot be written" in fault and "holds them" not in fault


def test_nan_that_does_not_repeat_is_a_passing_fault(tmp_path: Path) -> None:
    once = Injection(1, "decoder.layers.0.mlp.linear_fc1", (9,))
    ((fault, _), *_) = run_distributed(train, 2, f"--log-interval 1 --save {tmp_path / 'a'}", once)
    assert fault.startswith("TransientFault: iteration 3: ")
    assert "Recomputed, it is finite: a machine computes wrongly. The loss was not finite on rank 1" in fault
    assert "holds them as of iteration 2" in fault


def test_run_continues_after_a_skipped_iteration(tmp_path: Path) -> None:
    injection = Injection(0, "decoder.layers.0.mlp.linear_fc1", (8, 9))
    flags = f"--on-non-finite skip --log-interval 1 --metrics-path {tmp_path / 'a.jsonl'}"
    fault, output = run_distributed(train, 2, flags, injection)[0]
    assert fault == "" and "  skipped 1 of 1  not finite 1\n" in output
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["skipped iterations"] for row in rows] == [0, 0, 1] + [0] * 9
    assert rows[2]["grad norm"] is None and rows[3]["grad norm"] > 0


def test_ten_skipped_iterations_in_a_row_end_the_run() -> None:
    """Run 21 iterations with 4 calls per rank, of which only the tenth is finite."""
    injection = Injection(0, "decoder.layers.0.mlp.linear_fc1", (*range(36), *range(40, 84)))
    flags = "--on-non-finite skip --log-interval 1 --train-iters 21"
    fault, _ = run_distributed(train, 2, flags, injection)[0]
    assert fault.startswith("TrainingFault: iteration 20: no finite gradient for 10 iterations in a row")
