"""Memory of whole gradients and parameters that ranks which shard them hold at some moments of a step."""

from __future__ import annotations

import dataclasses

from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import end_parameters, largest_layer
from megatron.planner.programs import Program


@dataclasses.dataclass(frozen=True)
class UnitMemory:
    """Bytes of whole gradients and parameters that ranks which shard them need at some moments of a step.

    Attributes:
        first_backward: in backward of a stage's last layer, which comes first.
        backward: in that of another one, when the one before is freed.
        forward: in forward of the embedding, after the backward pass of another microbatch.
        end_of_forward: when that pass has run its last layer, on a stage that does not begin with an embedding.
        loss: in the loss.
        after_loss: when backward begins, and the logits are freed.
    """

    first_backward: float = 0.0
    backward: float = 0.0
    forward: float = 0.0
    end_of_forward: float = 0.0
    loss: float = 0.0
    after_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Units:
    """Parameters of the units of a stage, bytes of each parameter, and what overlaps.

    Attributes:
        layer: parameters of the largest layer.
        embedding: those of the embedding, if the stage has it.
        ends: those of the output layer, and of the embedding if both share a table.
        before: those of the unit whose gradients come last in backward.
        weight, gradient: bytes of a gathered parameter, and of a gradient.
        overlap: gradients are reduced beside backward of the next unit.
        shared: the embedding shares its table.
    """

    layer: float
    embedding: float
    ends: float
    before: float
    weight: int
    gradient: int
    overlap: bool
    shared: bool

    @property
    def in_use(self) -> float:
        """Bytes of the unit of the output layer."""
        return self.ends * (self.weight + self.gradient)

    @property
    def reduced(self) -> float:
        """Bytes of the last gradients of a backward pass, which are still being reduced."""
        return self.gradient * self.before * self.overlap


def sharded_units(
    job: Job,
    layout: Layout,
    stage: int,
    element: int,
    program: Program,
    at_a_time: tuple[int, int] = (1, 1),
) -> UnitMemory:
    """Whole gradients and parameters of ranks that shard them.

    The units are those of docs/parallelism.md. Backward has a layer's gradients and parameters, and where exchanges
    overlap the parameters of the next layer and the gradients of the one before, until they are reduced. The output
    layer is in use from the loss to its gradient, or to the end of backward if the embedding shares its table.

    Args:
        at_a_time: layers that are recomputed at a time, and so have their parameters: those with which backward begins,
            and the most of those that come later.
    """
    if layout.shards == 1 or not (layout.sharded_gradients or layout.sharded_parameters):
        return UnitMemory()
    units = _units(job, layout, stage, element, program)
    if not program.chunked_logits:  # the units of other programs are not known
        of_layer = units.layer * (units.gradient + 2 * units.weight)
        return UnitMemory(of_layer, of_layer, loss=of_layer)
    in_loss = units.in_use + units.reduced
    return UnitMemory(
        *_in_backward(job, layout, stage, units, at_a_time),
        *_in_forward(job, layout, stage, units),
        in_loss,
        in_loss + units.layer * units.weight * layout.overlap_param_gather,
    )


def _units(job: Job, layout: Layout, stage: int, element: int, program: Program) -> _Units:
    layer = largest_layer(job, layout, stage, replicated=True)
    shared = job.model.mtp_num_layers > 0 or not job.model.untie_embeddings_and_output_weights
    first, last = stage == 0, stage == layout.last_stage
    embedding = end_parameters(job, layout.tensor, first=True, last=False) if first else 0.0
    ends = end_parameters(job, layout.tensor, first=first, last=last)
    apart = first and not shared
    return _Units(
        layer=layer,
        embedding=embedding,
        ends=ends - embedding if apart else ends,
        before=embedding if apart else layer,
        weight=element if layout.sharded_parameters else 0,
        gradient=program.gradient,
        overlap=layout.overlap_grad_reduce,
        shared=shared,
    )


def _in_backward(
    job: Job, layout: Layout, stage: int, units: _Units, at_a_time: tuple[int, int]
) -> tuple[float, float]:
    """Bytes in backward of a stage's last layer, and of another one."""
    first, last = stage == 0, stage == layout.last_stage
    # The next layer's parameters are gathered ahead, if there is one in the chunk.
    layers, prefetch = _most_layers(job, layout, stage), layout.overlap_param_gather
    ahead, further_ahead = (prefetch and layers > n for n in (1, 2))
    gathered, gathered_later = (
        max(n, 1 + more) for n, more in zip(at_a_time, (ahead, further_ahead), strict=True)
    )
    of_layer = units.layer * (units.gradient + gathered * units.weight)
    of_another = units.layer * (units.gradient * (1 + units.overlap) + gathered_later * units.weight)
    # The output layer's gradient is complete before backward of the layers, and its parameters are freed; but layers of
    # multi-token prediction come first, and a table that both ends use is in use to the end.
    to_the_end = first and units.shared
    # The unit whose gradients came before is still being reduced: the output layer, or the last one of the backward
    # pass before, which is that of the ends if they are shared.
    if to_the_end or (last and job.model.mtp_num_layers > 0):
        before = units.in_use
    else:
        before = units.gradient * units.ends * units.overlap if last else units.reduced
    return of_layer + before, units.in_use * to_the_end + of_another


def _in_forward(job: Job, layout: Layout, stage: int, units: _Units) -> tuple[float, float]:
    """Bytes in forward of the embedding, and when forward has run its last layer, after another backward pass.

    The last two units of that backward pass are still being reduced.
    """
    if layout.microbatches(job) == 1:
        return 0.0, 0.0
    if stage == 0:
        both = units.embedding + units.layer
        return 0.0 if units.shared else both * (units.weight + units.gradient * units.overlap), 0.0
    if _most_layers(job, layout, stage) <= 1:
        return 0.0, 0.0
    return 0.0, units.layer * (units.weight + 2 * units.gradient * units.overlap)


def _most_layers(job: Job, layout: Layout, stage: int) -> int:
    """Layers of the largest chunk of a stage."""
    return max(sum(numbers) for numbers in layout.layers(job)[stage])
