"""The host does not wait for the device between two log lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.arguments import parse_run_config
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.training.log_hook import Logging
from megatron.training.loop import Hook, Trainer
from megatron.training.pretrain import pretrain
from megatron.training.stop import StopRequests

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 99 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 40 --micro-batch-size 2 --global-batch-size 4 --lr 2e-3 --num-workers 0 --eval-iters 0
    --train-iters 9 --log-interval 3
"""
SCALED = "--fp16 --initial-loss-scale 65536"
SAFE = "--clip-grad 1 --spike-skip 3 --log-num-zeros-in-grad --log-params-norm"
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2
    --untie-embeddings-and-output-weights --reset-attention-mask --reset-position-ids --eod-mask-loss
"""
RUNS = {
    "fp16": ("GPT", f"{SCALED} {SAFE}"),
    "bf16": ("GPT", f"--bf16 --bf16-optimizer-states --recompute-granularity full {SAFE}"),
    # On a CPU --ops-backend auto attends to one document at a time, and reads their lengths.
    "Llama": ("GPT", f"{LLAMA} --ops-backend plain --recompute-granularity selective --on-non-finite stop"),
    "plain": ("GPT", "--ops-backend plain --optimizer sgd"),
    "BERT": ("BERT", f"{SCALED} {SAFE}"),
    "mixture": (
        "GPT",
        "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm "
        "--moe-aux-loss-coeff 1e-2",
    ),
}
# The graph is captured in the second iteration.
ON_GPUS = {"CUDA graph": ("GPT", "--cuda-graph --bf16 --hidden-dropout 0 --attention-dropout 0")}

# Operations whose value or output size only the device knows.
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# On a CPU these bypass the operations that `HostWaits` sees. An upload from pageable memory also blocks the host.
CALLS = {Tensor.cpu, Tensor.cuda, Tensor.numpy, Tensor.tolist}
UPLOADS = {torch.tensor, torch.as_tensor}
DEVICES = (str, torch.device)


class HostWaits(TorchDispatchMode):
    """Records operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Indexing has the second tag because a boolean mask's size depends on its values; other indices do not wait.
        indexes = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_)
        if indexes and not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            return func(*args, **(kwargs or {}))
        if TAGS & set(func.tags) or indexes:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class HostCalls(TorchFunctionMode):
    """Records functions of torch that wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        uploads = func in UPLOADS and "device" in named
        if func is Tensor.to and not named.get("non_blocking"):
            # torch's optimizers do this with tensors that are on the device.
            is_ours = not sys._getframe(1).f_globals["__name__"].startswith("torch.")
            uploads = is_ours and ("device" in named or any(isinstance(x, DEVICES) for x in args[1:]))
        if func in CALLS or uploads:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Waits(Logging):
    """Counts the waits of a run on a CPU, and those in reports separately."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.reports: list[str] = []

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        with HostWaits() as seen, HostCalls(seen.found):
            self.found = seen.found
            yield

    def after_step(self, trainer: Trainer) -> None:
        if trainer.state.iteration <= 2:
            # Starting the data loader and reporting memory read tensors of the host.
            self.found.clear()
        before = len(self.found)
        super().after_step(trainer)
        self.reports.extend(self.found[before:])
        del self.found[before:]


def train(run: str, hooks: list[Hook], more: str) -> None:
    task, flags = (RUNS | ON_GPUS)[run]
    config = parse_run_config(f"{FLAGS} {flags} {more}".split(), description="", defaults={})
    with pytest.MonkeyPatch.context() as patch:
        # Ranks agree on stopping with CPU tensors, which does not count.
        patch.setattr(StopRequests, "reason", lambda *_: None)
        assert pretrain(config, GPT if task == "GPT" else bert(binary_head=True), hooks) == 0


@pytest.mark.parametrize("run", RUNS)
def test_nothing_waits_between_reports(run: str) -> None:
    waits = Waits()
    train(run, [waits], "--device cpu")
    assert waits.found == []
    assert len(waits.reports) >= 3  # the counter works


@pytest.mark.parametrize(
    "wait",
    [
        Tensor.item,
        bool,
        float,
        Tensor.tolist,
        Tensor.cpu,
        Tensor.nonzero,
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.tensor(1.0, device=x.device),
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.float64).to(device=x.device),
    ],
)
def test_operations_that_count_as_a_wait(wait: Any) -> None:
    x = torch.ones(1)
    with HostWaits() as seen, HostCalls(seen.found):
        x[torch.tensor([0])] + x.sum().to(torch.float64).to(x.device, non_blocking=True)
        assert seen.found == []
        wait(x)
    assert len(seen.found) == 1


class WaitsOnGPU(Logging):
    """Makes a step fail if the host waits for the GPU, once everything is compiled."""

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def after_step(self, trainer: Trainer) -> None:
        torch.cuda.set_sync_debug_mode("default")
        super().after_step(trainer)
        if trainer.state.iteration >= trainer.config.logging.log_interval:
            torch.cuda.set_sync_debug_mode("error")


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS | ON_GPUS)
def test_nothing_waits_on_a_gpu(run: str) -> None:
    train(run, [WaitsOnGPU()], "--device cuda")
