"""All ranks of every layout ask for the same communications in the same order, and none waits forever.

Each rank runs a whole step in this process, one after the other, with groups that only record.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest
from gpu_path.order import Streams, disagreements
from gpu_path.recorded_step import Call, Wait, record_steps
from training.test_layouts import DENSE_LAYOUTS, FEW_CONTEXT_LAYOUTS, FEW_LAYOUTS, FLAGS, LAYOUTS, RUNS

from megatron.arguments import parse_run_config
from megatron.optim.grad_reducer import GradReducer
from megatron.optim.param_gather import ParamGather
from megatron.parallel import pipeline
from megatron.parallel.schedules import Receive, Send
from megatron.planner.fakes import BALANCED
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT

# By default those that have the most kinds of communication.
FAST = {("gpt2", "T2P2"), ("gpt2", "P4V2"), ("llama", "T2D2+ZeRO")}
CASES = [
    pytest.param(shape, layout, marks=() if (shape, layout) in FAST else pytest.mark.slow)
    for shape in ("gpt2", "bert", "llama", "muon", "mixture")
    for layout in (*FEW_LAYOUTS.get(shape, DENSE_LAYOUTS), *FEW_CONTEXT_LAYOUTS[shape])
    if LAYOUTS[layout][0] > 1
]


# Puts a fault into the program of one rank.
Fault = Callable[[pytest.MonkeyPatch], None]


def record(shape: str, layout: str, more: str = "", fault: Fault | None = None) -> list[list[Call | Wait]]:
    """Events of every rank of a layout in one step; a `fault` is in rank 1 only."""
    processes, flags = LAYOUTS[layout]
    config = parse_run_config(f"{FLAGS} {RUNS[shape]} {flags} {more}".split(), description="", defaults={})
    task = bert(binary_head=True) if shape == "bert" else GPT
    ranks = []
    for rank in range(processes):
        with pytest.MonkeyPatch.context() as patch:
            for (module, name), function in BALANCED.items():  # ranks exchange no values to route by
                patch.setattr(module, name, function)
            if fault is not None and rank == 1:
                fault(patch)
            ranks.append(record_steps(config, task, rank=rank, processes=processes).events)
    return ranks


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_every_rank_communicates_in_the_same_order(shape: str, layout: str) -> None:
    ranks = record(shape, layout)
    assert any(isinstance(event, Call) for events in ranks for event in events)
    assert disagreements(ranks) == []
    assert Streams(ranks).run() == []


def gathers_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamGather, "start", lambda *_: None)


def reduces_in_another_order(patch: pytest.MonkeyPatch) -> None:
    finish = GradReducer.finish

    def reverse(self: GradReducer) -> None:
        for index in reversed(range(len(self.buckets))):
            self._start_reduce(index)
        finish(self)

    patch.setattr(GradReducer, "finish", reverse)


def sums_in_bf16(patch: pytest.MonkeyPatch) -> None:
    begin = GradReducer._start_reduce

    def reduce(self: GradReducer, index: int) -> None:
        self.in_bf16 = True
        begin(self, index)

    patch.setattr(GradReducer, "_start_reduce", reduce)


# How many of the two ranks wait forever.
@pytest.mark.parametrize(
    ("fault", "stuck"), [(gathers_nothing, 1), (reduces_in_another_order, 2), (sums_in_bf16, 2)]
)
def test_a_rank_that_communicates_something_else_is_found(fault: Fault, stuck: int) -> None:
    ranks = record("gpt2", "D2+ZeRO", "--ddp-bucket-size 5000", fault)
    assert len(disagreements(ranks)) == 1
    assert len(Streams(ranks).run()) == stuck


def receives_before_it_sends(patch: pytest.MonkeyPatch) -> None:
    def post(self: pipeline._Executor) -> None:
        sends = [action for action in self.transfers_left if isinstance(action, Send)]
        receives = [action for action in self.transfers_left if isinstance(action, Receive)]
        self.transfers_left = collections.deque([*receives, *sends])
        while isinstance(next(iter(self.transfers_left), None), Receive):
            self._post_receive()

    patch.setattr(pipeline._Executor, "_post_receives", post)


def test_a_deadlock_of_transfers_is_found() -> None:
    """Every transfer has its partner, but on one stream each of two ranks waits for the other's send."""
    ranks = record("gpt2", "P2", fault=receives_before_it_sends)
    assert disagreements(ranks) == []
    assert Streams(ranks).run() == ["rank 0 waits for receive of 512", "rank 1 waits for receive of 512"]


def test_a_transfer_to_nobody_is_found() -> None:
    ranks = record("gpt2", "P2")
    last = max(i for i, event in enumerate(ranks[0]) if isinstance(event, Call) and event.kind == "send")
    ranks[0].insert(last, ranks[0][last])
    assert disagreements(ranks) == ["transfers from rank 0 to rank 1 do not pair up"]
