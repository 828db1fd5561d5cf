"""The predicted step of a layout in Chrome's trace event format, for Perfetto.

Every stage is a process of the trace, since all tensor-parallel ranks and replicas of a stage behave alike. Its threads
are the streams of a GPU: computation, and each kind of communication. A counter shows its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.parallel.schedules import Backward, BackwardInput, BackwardWeight, Compute, Forward
from megatron.planner.activations import chunk_activations, waiting_bytes
from megatron.planner.costs import Cost
from megatron.planner.memory import stage_memory
from megatron.planner.simulate import Simulator

Event = dict[str, Any]
STREAMS = (
    "computation",
    "tensor parallelism",
    "expert parallelism",
    "context parallelism",
    "pipeline transfers",
    "data parallelism",
)
COMPUTATION, TENSOR, EXPERT, CONTEXT, PIPELINE, DATA = range(len(STREAMS))
# Above so many layers of all passes together a pass is drawn as one layer.
MAX_LAYERS = 50_000
MICROSECONDS = 1e6


def trace_events(simulator: Simulator) -> list[Event]:
    """The events of a step. Times are in microseconds, memory in GB."""
    timeline = simulator.timeline(simulator.microbatches)
    passes = sum(map(len, timeline))
    layers = max(dense + experts for stage in simulator.chunk_layers for dense, experts in stage)
    by_layer = passes * layers <= MAX_LAYERS
    events: list[Event] = []
    for stage, row in enumerate(timeline):
        events += _names(simulator, stage)
        for action, start, end in row:
            events += _pass(simulator, stage, action, start, end, by_layer=by_layer)
        events += _end_of_step(simulator, stage, row[-1][2], max(other[-1][2] for other in timeline))
        events += _memory(simulator, stage, row)
    return events


def _names(simulator: Simulator, stage: int) -> Iterator[Event]:
    each = simulator.layout.processes // simulator.layout.pipeline
    name = f"stage {stage}: ranks {stage * each}-{(stage + 1) * each - 1}"
    yield {"name": "process_name", "ph": "M", "pid": stage, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": stage, "args": {"sort_index": stage}}
    for number, stream in enumerate(STREAMS):
        yield {"name": "thread_name", "ph": "M", "pid": stage, "tid": number, "args": {"name": stream}}


def _slice(
    name: str, kind: str, stage: int, stream: int, start: float, seconds: float, **arguments: object
) -> Event:
    times = {"ts": round(MICROSECONDS * start, 3), "dur": round(MICROSECONDS * seconds, 3)}
    return {"name": name, "cat": kind, "ph": "X", "pid": stage, "tid": stream, **times, "args": arguments}


def _pass(
    simulator: Simulator, stage: int, action: Compute, start: float, end: float, *, by_layer: bool
) -> Iterator[Event]:
    """A pass of a chunk: a slice of the whole, in it those of its layers and ends, and its communication."""
    arguments = {"microbatch": action.microbatch, "chunk": action.chunk}
    if isinstance(action, BackwardWeight):
        name = f"weight gradients {action.microbatch}"
        yield _slice(name, "weight gradients", stage, COMPUTATION, start, end - start, **arguments)
        return
    kind = "forward" if isinstance(action, Forward) else "backward"
    yield _slice(f"{kind} {action.microbatch}", kind, stage, COMPUTATION, start, end - start, **arguments)
    now = start
    for name, cost, late in _parts(simulator, stage, action, by_layer=by_layer):
        seconds = cost.matmul + cost.elementwise + cost.host - late
        yield _slice(name, "layer", stage, COMPUTATION, now, seconds)
        now += seconds
        for stream, exposed in (
            (TENSOR, cost.tensor_parallel),
            (EXPERT, cost.expert_parallel),
            (CONTEXT, cost.context_parallel),
        ):
            if exposed:
                yield _slice(name, "communication", stage, stream, now, exposed)
                now += exposed
    wait = simulator.copy_wait(type(action), stage, action.chunk)
    if wait:
        yield _slice("waiting for copies of activations", "layer", stage, COMPUTATION, now, wait)
        now += wait
    if isinstance(action, Backward):
        yield _slice("accumulation of gradients", "layer", stage, COMPUTATION, now, simulator.accumulation)
    if simulator.transfer and _sends(simulator, stage, action):
        # A program whose transfers block sends before the pass ends.
        begin = end - simulator.transfer if simulator.program.blocking_transfers else end
        yield _slice(f"{kind} {action.microbatch}", "transfer", stage, PIPELINE, begin, simulator.transfer)
    for exchange in simulator.exchanges():
        if exchange.beside == kind:
            passes = simulator.microbatches * simulator.layout.chunks
            seconds = min(end - start, (exchange.hidden + exchange.exposed) / passes)
            yield _slice(exchange.name, "exchange", stage, DATA, start, seconds)


def _parts(
    simulator: Simulator, stage: int, action: Compute, *, by_layer: bool
) -> Iterator[tuple[str, Cost, float]]:
    """Names and costs of the parts of a pass, in the order in which it runs them, and seconds that it leaves for later.

    A split backward pass leaves weight gradients.
    """
    kernels, layout = simulator.kernels, simulator.layout
    dense, experts = simulator.chunk_layers[stage][action.chunk]
    forward, split = isinstance(action, Forward), isinstance(action, BackwardInput)
    parts = []
    if layout.is_first(stage, action.chunk):
        parts.append(("embedding", kernels.embedding, 1))
    kinds = (("layer", dense, 0), ("layer of experts", experts, 1))
    for name, number, has_experts in kinds:
        if number:
            one = kernels.layers(1 - has_experts, has_experts)
            parts.append((name, one, number) if by_layer else (f"{number} times {name}", one * number, 1))
    if layout.is_last(stage, action.chunk):
        parts.append(("output layer and loss", kernels.end, 1))
    for name, both, number in parts if forward else reversed(parts):
        for _ in range(number):
            yield name, both.forward if forward else both.backward, both.weights if split else 0.0


def _sends(simulator: Simulator, stage: int, action: Compute) -> bool:
    """Return True if the result of a pass goes to another stage."""
    layout, forward = simulator.layout, isinstance(action, Forward)
    if layout.v_shaped and stage == layout.pipeline - 1 and action.chunk == (0 if forward else 1):
        return False  # to the other chunk of this stage
    part = layout.parts.of(stage, action.chunk) + (1 if forward else -1)
    return layout.pipeline > 1 and 0 <= part < layout.parts.number


def _end_of_step(simulator: Simulator, stage: int, end: float, last: float) -> Iterator[Event]:
    """Communication among replicas after the last backward pass of a stage, and the optimizer.

    A stage that ends before the `last` one is drawn as waiting for it: all take the optimizer step together, but with
    post-validation.
    """
    now = last = end if simulator.layout.post_validation else last
    for exchange in simulator.exchanges():
        if exchange.beside is not None:
            continue
        hidden = min(exchange.hidden, last)
        yield _slice(exchange.name, "exchange", stage, DATA, now - hidden, hidden + exchange.exposed)
        now += exchange.exposed
    yield _slice("optimizer", "optimizer", stage, COMPUTATION, now, simulator.optimizer())


def _memory(simulator: Simulator, stage: int, row: list[tuple[Compute, float, float]]) -> Iterator[Event]:
    """A counter of a stage's memory: what a step keeps all along, and activations from forward to backward."""
    job, layout, program = simulator.job, simulator.layout, simulator.program
    element = simulator.cluster.device.element
    memory = stage_memory(job, layout, simulator.cluster, stage, program)
    chunks = range(layout.chunks)
    each = [chunk_activations(job, layout, element, stage, chunk, program) for chunk in chunks]
    waiting = [waiting_bytes(job, layout, element, stage, chunk) for chunk in chunks]
    held = peak = 0.0
    levels = [(0.0, 0.0)]
    for action, start, end in row:
        kept, late, forward = each[action.chunk], waiting[action.chunk], isinstance(action, Forward)
        if forward:
            held += kept
        elif isinstance(action, BackwardWeight):
            held -= late
        else:
            held -= kept - (late if isinstance(action, BackwardInput) else 0.0)
        peak = max(peak, held)
        levels.append((start if forward else end, held))
    # The rest of the activations at their peak: what a layer that runs needs, the logits, dropout masks.
    rest = max(0.0, memory.activations - peak)
    states = memory.weights + memory.gradients + memory.master + memory.moments + memory.backup
    for time, kept in levels:
        values = {"states": states, "kept activations": kept, "working": rest if kept > 0 else 0.0}
        yield {
            "name": "memory (GB)",
            "ph": "C",
            "pid": stage,
            "ts": round(MICROSECONDS * time, 3),
            "args": {name: round(value / 1e9, 4) for name, value in values.items()},
        }
