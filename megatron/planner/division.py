"""Division of a model's layers among pipeline stages and chunks, and the automatic schedule for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex

from megatron.model.config import ModelConfig
from megatron.parallel.schedules import Compute, Schedule, part_of
from megatron.planner.job import Job
from megatron.variants.auto_schedule import best_schedule, duration_of, part_flops
from megatron.variants.auto_stages import layout_text, stage_sizes

# Dense layers and those with experts of each chunk, by stage.
StageLayers = tuple[tuple[tuple[int, int], ...], ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Consecutive parts of a model, `chunks` of them on each stage.

    Attributes:
        v_shaped: the second chunks are in the reverse order of the stages.
        sizes: layers of each part, first to last; None for equal numbers.
    """

    stages: int
    chunks: int = 1
    v_shaped: bool = False
    sizes: tuple[int, ...] | None = None

    def of(self, stage: int, chunk: int) -> int:
        """Index of a stage's chunk in the model."""
        return part_of(stage, chunk, self.stages, self.v_shaped)

    @property
    def number(self) -> int:
        return self.stages * self.chunks


@functools.lru_cache(maxsize=4096)
def make_parts(stages: int, chunks: int, v_shaped: bool, sizes: tuple[int, ...] | None) -> Parts:
    """Parts that are one object if they are equal, so that caches find them by identity."""
    return Parts(stages, chunks, v_shaped, sizes)


def even_sizes(job: Job, parts: Parts) -> tuple[int, ...] | None:
    """`nearly_even`, or None if that is no division that this program trains.

    With one chunk the last stage needs a layer. Of several chunks the first and the last lack one layer at most, which
    may leave the embedding or the output layer alone (2407.21783 section 3.3.2); layers of multi-token prediction are
    not divided so, and the parts of a V are all equal.
    """
    missing = -job.model.num_layers % parts.number
    if parts.v_shaped and missing:
        return None
    if parts.chunks > 1 and missing and (missing > 2 or job.model.mtp_num_layers):
        return None
    sizes = nearly_even(job, parts)
    return None if parts.chunks == 1 and sizes[-1] <= 0 else sizes


def nearly_even(job: Job, parts: Parts) -> tuple[int, ...]:
    """Layers of each part, all equal but for the first and the last.

    Where the parts do not divide the layers, the last one has fewer, and then the first: they also have the output
    layer and the embedding.
    """
    longest = -(-job.model.num_layers // parts.number)
    missing = parts.number * longest - job.model.num_layers
    if parts.number == 1:
        return (longest,)
    first, last = longest - missing // 2, longest - (missing + 1) // 2
    return (first, *(longest,) * (parts.number - 2), last)


@functools.lru_cache(maxsize=4096)
def stage_layers(job: Job, parts: Parts) -> StageLayers:
    """Layers of each chunk, by stage; the model's last part also has those of multi-token prediction."""
    sizes = parts.sizes or nearly_even(job, parts)
    ends = list(itertools.accumulate(sizes, initial=0))
    layers = [list(job.has_experts[begin:end]) for begin, end in itertools.pairwise(ends)]
    layers[-1] += [job.model.all_expert_layers[-1]] * job.model.mtp_num_layers
    return tuple(
        tuple(
            (len(here) - sum(here), sum(here))
            for here in (layers[parts.of(stage, chunk)] for chunk in range(parts.chunks))
        )
        for stage in range(parts.stages)
    )


@functools.lru_cache(maxsize=4096)
def distinct_stages(job: Job, parts: Parts) -> tuple[int, ...]:
    """The first stage, the last, and of the others the first with each number of layers with experts."""
    layers = stage_layers(job, parts)
    first = {sum(n for _, n in layers[stage]): stage for stage in reversed(range(1, parts.stages - 1))}
    return tuple(sorted({0, parts.stages - 1, *first.values()}))


@functools.lru_cache(maxsize=4096)
def equal_work(job: Job, parts: Parts, tensor: int, recompute: bool) -> Parts:
    """Parts whose stages have equal work, as --pipeline-model-parallel-layout auto divides the layers."""
    return _equal_work(job.model, job.seq_length, job.padded_vocab_size(tensor), parts, recompute)


# Jobs that differ in their batch only have one division and one automatic schedule.
@functools.lru_cache(maxsize=4096)
def _equal_work(model: ModelConfig, length: int, vocab_size: int, parts: Parts, recompute: bool) -> Parts:
    sizes = stage_sizes(
        model, length, vocab_size, parts.stages, parts.chunks, v_shaped=parts.v_shaped, recompute=recompute
    )
    return dataclasses.replace(parts, sizes=tuple(sizes))


@functools.lru_cache(maxsize=256)
def automatic(job: Job, parts: Parts, tensor: int, recompute: bool, in_flight: int | None) -> Schedule:
    """The schedule auto of a run: the best list for the counted operations of its stages."""
    whole = dataclasses.replace(parts, sizes=parts.sizes or nearly_even(job, parts))
    return _automatic(job.model, job.seq_length, job.padded_vocab_size(tensor), whole, recompute, in_flight)


@functools.lru_cache(maxsize=256)
def _automatic(
    model: ModelConfig, length: int, vocab_size: int, parts: Parts, recompute: bool, in_flight: int | None
) -> Schedule:
    assert parts.sizes is not None
    ends = list(itertools.accumulate(parts.sizes, initial=0))
    costs = [
        part_flops(
            model,
            range(begin, end),
            length,
            vocab_size if part == parts.number - 1 else None,
            recompute=recompute,
        )
        for part, (begin, end) in enumerate(itertools.pairwise(ends))
    ]

    places = itertools.product(range(parts.stages), range(parts.chunks))
    duration = duration_of({place: costs[parts.of(*place)] for place in places})

    @functools.cache
    def schedule(stages: int, chunks: int, microbatches: int) -> list[list[Compute]]:
        return best_schedule(stages, chunks, microbatches, duration=duration, in_flight=in_flight)

    return schedule


def division_flags(job: Job, parts: Parts) -> list[str]:
    """Flags that divide the layers among stages and chunks."""
    sizes = parts.sizes or nearly_even(job, parts)
    if parts.stages == 1:
        return []
    longest = max(sizes)
    inner = set(sizes[1:-1]) <= {longest}
    if parts.chunks == 1 and inner:
        ends = {"first": sizes[0], "last": sizes[-1]}
        return [
            f"--decoder-{name}-pipeline-num-layers {layers}"
            for name, layers in ends.items()
            if layers < longest
        ]
    if parts.chunks > 1 and set(sizes) == {longest}:
        return [f"--num-layers-per-virtual-pipeline-stage {longest}"]
    return [f"--pipeline-model-parallel-layout {shlex.quote(layout_text(sizes, job.model.mtp_num_layers))}"]
