"""--pipeline-schedule auto: the list of passes that takes the least time in the simulator, within a limit of memory.

The search takes the named schedules and lists that a clock makes by several policies, as the automatic schedules of
arXiv 2401.10241, section 3, and 2405.15362 do. Then it changes the policies of some stages as long as that helps. It is
deterministic, since all ranks must find the same list. The times of passes are counted in floating-point operations.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping, Sequence

from megatron.errors import InputError
from megatron.flags import flag
from megatron.model.config import ModelConfig
from megatron.model.flops import attended_pairs, attention_flops, joining_flops, layer_flops, vocabulary_flops
from megatron.parallel.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Schedule,
    one_and_two,
    one_forward_one_backward,
    simulate,
)
from megatron.parallel.stages import split_layers
from megatron.training.config import PluginConfig, RunConfig
from megatron.variants.half_memory import v_half, v_min
from megatron.variants.zero_bubble import (
    Duration,
    Policy,
    dualpipe_v,
    lagging,
    list_schedule,
    policies,
    zb_h1,
    zb_v,
)

# The search changes the policies of some stages this many times, and fewer times where a step has many passes: there
# it takes long and gains less than 0.3%.
MAX_CHANGES, MAX_PASSES = 100, 15_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoScheduleConfig(PluginConfig):
    """Memory of the automatic pipeline schedule."""

    pipeline_microbatches_in_flight: int | None = flag(
        None,
        "with --pipeline-schedule auto: microbatches whose activations a stage may hold (default: the number of "
        "stages, as with 1f1b)",
        low=1,
    )

    def check(self, run: RunConfig) -> None:
        if self.pipeline_microbatches_in_flight is not None and run.parallel.pipeline_schedule != "auto":
            raise InputError(
                f"--pipeline-microbatches-in-flight: {self.pipeline_microbatches_in_flight} needs "
                "--pipeline-schedule auto"
            )


def best_schedule(
    stages: int,
    chunks: int,
    microbatches: int,
    *,
    duration: Duration = one_and_two,
    in_flight: int | None = None,
    transfer_time: float = 0.0,
) -> list[list[Compute]]:
    """The fastest list found for passes of given times.

    Args:
        chunks: 1, or 2 in the shape of a V.
        duration: seconds of a pass on a rank. A whole backward pass takes as long as its two parts.
        in_flight: microbatches that a stage may hold, at least 1; None for the number of stages.
        transfer_time: as in `simulate`.
    """
    limit = chunks * (in_flight or stages)

    def seconds(schedule: list[list[Compute]]) -> float:
        return makespan(schedule, stages, duration, transfer_time=transfer_time, v_shaped=chunks == 2)

    def by_policies(chosen: Sequence[Policy]) -> tuple[float, list[list[Compute]]]:
        time, schedule = list_schedule(chosen, chunks, microbatches, duration)
        return seconds(schedule) if transfer_time else time, schedule  # the clock leaves transfers out

    named = [
        (seconds(schedule), schedule)
        for schedule in _named(stages, chunks, microbatches, limit)
        if max(map(peak_chunks, schedule)) <= limit
    ]
    uniform = [
        [policy] * stages
        for room in range(limit, max(chunks, limit - 2 * chunks) - 1, -1)
        for policy in policies(chunks, room)
    ]
    found = [(by_policies(chosen), chosen) for chosen in uniform]
    (time, schedule), chosen = min(found, key=lambda one: one[0][0])
    rng = random.Random(0)
    for _ in range(min(MAX_CHANGES, MAX_PASSES // (stages * chunks * microbatches))):
        changed = _changed(chosen, limit, chunks, rng)
        other = by_policies(changed)
        if other[0] <= time:
            (time, schedule), chosen = other, changed
    return min([*named, (time, schedule)], key=lambda one: one[0])[1]


def _named(stages: int, chunks: int, microbatches: int, limit: int) -> Iterator[list[list[Compute]]]:
    """Schedules with a name, and others whose weight gradients lag. Some exceed the limit."""
    if chunks == 1:
        yield one_forward_one_backward(stages, chunks, microbatches)
        yield zb_h1(stages, chunks, microbatches)
        for more in range(1, min(limit, 2 * stages - 1)):
            # As many forwards ahead as there is room for, with the weight gradients as late as then fits.
            yield [
                lagging(microbatches, warmup, more - warmup)
                for warmup in (min(2 * (stages - rank - 1), more) for rank in range(stages))
            ]
        return
    yield zb_v(stages, chunks, microbatches)
    yield v_half(stages, chunks, microbatches)
    yield v_min(stages, chunks, microbatches)
    if microbatches >= 2 * stages:
        yield dualpipe_v(stages, chunks, microbatches)


def _changed(chosen: Sequence[Policy], limit: int, chunks: int, rng: random.Random) -> list[Policy]:
    """Policies that differ from the `chosen` ones on up to three stages."""
    changed = list(chosen)
    for rank in rng.sample(range(len(changed)), min(len(changed), rng.randint(1, 3))):
        policy = changed[rank]
        changed[rank] = dataclasses.replace(
            policy,
            **rng.choice(
                (
                    {"limit": min(limit, max(chunks, policy.limit + rng.choice((-2, -1, 1, 2))))},
                    {"backward_first": not policy.backward_first},
                    {"early_chunks": not policy.early_chunks},
                    {"patience": rng.choice((0.0, 0.25, 0.5, 0.75, 1.0, 1.5))},
                )
            ),
        )
    return changed


def peak_chunks(actions: Sequence[Compute]) -> int:
    """Most chunks of activations that a rank holds, from forward until backward or its weight gradients."""
    peak = held = 0
    for action in actions:
        held += 1 if isinstance(action, Forward) else 0 if isinstance(action, BackwardInput) else -1
        peak = max(peak, held)
    return peak


def makespan(
    schedule: Sequence[Sequence[Compute]],
    stages: int,
    duration: Duration,
    *,
    transfer_time: float = 0.0,
    v_shaped: bool,
) -> float:
    """Time from the first start to the last end."""
    timeline = simulate(schedule, stages, duration, transfer_time, v_shaped)
    return max(row[-1][2] for row in timeline)


def tuned(config: RunConfig, padded_vocab_size: int) -> Schedule:
    """The schedule of a run: `best_schedule` for the floating-point operations of its stages."""
    in_flight = config.plugin(AutoScheduleConfig).pipeline_microbatches_in_flight
    duration = counted_times(config, padded_vocab_size)
    return functools.partial(best_schedule, duration=duration, in_flight=in_flight)


def counted_times(config: RunConfig, padded_vocab_size: int) -> Duration:
    """Floating-point operations of each pass of a run's stages, for one sample."""
    parallel, model = config.parallel, config.model
    assert config.data.seq_length is not None
    costs = {
        (rank, number): part_flops(
            model,
            chunk.layers,
            config.data.seq_length,
            padded_vocab_size if chunk.last else None,
            recompute=parallel.recompute_granularity == "full",
        )
        for rank, chunks in enumerate(split_layers(parallel, model.num_layers))
        for number, chunk in enumerate(chunks)
    }

    return duration_of(costs)


def duration_of(costs: Mapping[tuple[int, int], tuple[float, float, float]]) -> Duration:
    """Times of passes from those of forward, gradients of inputs and gradients of weights, by rank and chunk."""
    times: dict[tuple[int, type[Compute], int], float] = {}
    for (rank, chunk), (forward, of_input, of_weights) in costs.items():
        times[rank, Forward, chunk] = forward
        times[rank, Backward, chunk] = of_input + of_weights
        times[rank, BackwardInput, chunk] = of_input
        times[rank, BackwardWeight, chunk] = of_weights

    def duration(rank: int, action: Compute) -> float:
        return times[rank, type(action), action.chunk]

    return duration


def part_flops(
    model: ModelConfig, layers: range, length: int, vocab_size: int | None, *, recompute: bool
) -> tuple[float, float, float]:
    """FLOPs of a part of the model for one sample: forward, gradients of inputs, gradients of weights.

    Args:
        vocab_size: padded, if the part ends in the output layer. Its loss computes the gradients in forward.
        recompute: backward runs forward again.
    """
    depths = range(model.num_layers, model.num_all_layers) if vocab_size is not None else ()
    here = [*layers, *depths]
    pairs = attended_pairs(model, length, causal=False)
    attention = sum(attention_flops(model, pairs=pairs[i]) for i in here)
    linear = sum(layer_flops(model, length, has_experts=model.all_expert_layers[i]) for i in here)
    head = 0.0
    if vocab_size is not None:
        linear += joining_flops(model, length)
        head = 3 * vocabulary_flops(model, vocab_size, length)
    again = linear + attention if recompute else 0.0
    least = 1.0  # a part without layers
    return linear + attention + head + least, linear + 2 * attention + again + least, linear + least
