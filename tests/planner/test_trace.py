"""Traces of a predicted step."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from published import cluster, job

from megatron.model.config import ModelConfig
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import stage_memory
from megatron.planner.mixtures import MIXTURES
from megatron.planner.programs import MEGATRON_CORE, NVIDIA_2021, OURS, Program
from megatron.planner.simulate import Simulator
from megatron.planner.trace import COMPUTATION, DATA, PIPELINE, STREAMS, trace_events

GPT = job(24, 2048, 16, 64)
LAYOUTS = [
    Layout(tensor=2, pipeline=4, data=2, sequence_parallel=True, overlap_grad_reduce=True),
    Layout(tensor=2, pipeline=2, chunks=3, data=2, distributed_optimizer=True, overlap_grad_reduce=True),
    Layout(tensor=4, data=2, recompute="full", distributed_optimizer=True, sharded_parameters=True),
]


def small_mixture() -> Job:
    preset = MIXTURES["mixtral-8x7b"]
    model = ModelConfig(**{**preset.fields, "num_layers": 8, "max_position_embeddings": 4096})
    return Job(model, 4096, preset.vocab_size, 32)


def slices(simulator: Simulator) -> list[dict[str, Any]]:
    return [event for event in trace_events(simulator) if event["ph"] == "X"]


@pytest.mark.parametrize("program", [OURS, NVIDIA_2021, MEGATRON_CORE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_ends_when_the_step_does(program: Program, layout: Layout) -> None:
    simulator = Simulator(GPT, layout, cluster(layout.processes), program)
    events = slices(simulator)
    end = max(event["ts"] + event["dur"] for event in events) / 1e6
    assert end == pytest.approx(simulator.step().seconds, rel=1e-3)
    kinds = Counter(event["cat"] for event in events)
    passes = simulator.microbatches * layout.chunks * layout.pipeline
    assert kinds["forward"] == kinds["backward"] == passes
    assert kinds["optimizer"] == layout.pipeline
    assert kinds["transfer"] == 2 * simulator.microbatches * (layout.pipeline * layout.chunks - 1)


def test_the_parts_of_a_pass_fill_it() -> None:
    """Layers, ends, communication and accumulation of each pass sum to its duration, one after another."""
    gpt, layout = small_mixture(), Layout(tensor=2, data=4, expert=4, pipeline=2, sequence_parallel=True)
    events = slices(Simulator(gpt, layout, cluster(16, "h100-80gb"), OURS))
    for stage in range(2):
        passes = [
            event for event in events if event["pid"] == stage and event["cat"] in ("forward", "backward")
        ]
        parts = [
            event for event in events if event["pid"] == stage and event["cat"] in ("layer", "communication")
        ]
        for whole in passes:
            # Times are rounded to a nanosecond, so the next pass may seem to begin before this one ends.
            inside = [e for e in parts if whole["ts"] <= e["ts"] + 0.01 < whole["ts"] + whole["dur"]]
            assert sum(e["dur"] for e in inside) == pytest.approx(whole["dur"], rel=1e-3)
    streams = {STREAMS[event["tid"]] for event in events}
    assert streams == {
        "computation",
        "tensor parallelism",
        "expert parallelism",
        "pipeline transfers",
        "data parallelism",
    }


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_streams_do_one_thing_at_a_time(layout: Layout) -> None:
    events = slices(Simulator(GPT, layout, cluster(layout.processes), OURS))
    for stage in range(layout.pipeline):
        for stream in range(len(STREAMS)):
            if stream == COMPUTATION:
                mine = [e for e in events if e["cat"] in ("forward", "backward", "optimizer")]
            else:
                mine = events
            row = sorted((e["ts"], e["dur"]) for e in mine if (e["pid"], e["tid"]) == (stage, stream))
            if stream in (
                PIPELINE,
                DATA,
            ):  # both directions have links; an exchange may begin beside another's end
                continue
            assert all(a + d <= b + 0.01 for (a, d), (b, _) in itertools.pairwise(row))


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, dataclasses.replace(LAYOUTS[0], tensor=1, sequence_parallel=False)]
)
def test_the_counter_of_memory_peaks_at_the_predicted_memory(layout: Layout) -> None:
    simulator = Simulator(GPT, layout, cluster(layout.processes), OURS)
    events = [event for event in trace_events(simulator) if event["ph"] == "C"]
    for stage in range(layout.pipeline):
        levels = [sum(event["args"].values()) for event in events if event["pid"] == stage]
        memory = stage_memory(GPT, layout, simulator.cluster, stage, OURS)
        assert max(levels) == pytest.approx(memory.total / 1e9, rel=1e-3)
        states = memory.total - memory.activations
        assert levels[0] == levels[-1] == pytest.approx(states / 1e9, rel=1e-3)


def test_large_steps_are_drawn_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator(GPT, LAYOUTS[0], cluster(16), OURS)
    many = len(trace_events(simulator))
    monkeypatch.setattr("megatron.planner.trace.MAX_LAYERS", 10)
    assert len(trace_events(simulator)) < many / 2
