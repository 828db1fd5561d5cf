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
    model, layer = job.model, largest_layer(job, layout, stage, replicated=True)
    shared = model.mtp_num_layers > 0 or not model.untie_embeddings_and_output_weights
    first, last = stage == 0, stage == layout.last_stage
    embedding = end_parameters(job, layout.tensor, first=True, last=False) if first else 0.0
    ends = end_parameters(job, layout.tensor, first=first, last=last)
    before = layer
    if first and not shared:
        ends, before = ends - embedding, embedding
    weight = element if layout.sharded_parameters else 0
    if not program.chunked_logits:  # the units of other programs are not known
        of_layer = layer * (program.gradient + 2 * weight)
        return UnitMemory(of_layer, of_layer, loss=of_layer)
    overlap, prefetch = layout.overlap_grad_reduce, layout.overlap_param_gather
    # The next layer's parameters are gathered ahead, if there is one in the chunk.
    layers = max(sum(numbers) for numbers in layout.layers(job)[stage])
    ahead, further_ahead = (prefetch and layers > n for n in (1, 2))
    gathered, gathered_later = (
        max(n, 1 + more) for n, more in zip(at_a_time, (ahead, further_ahead), strict=True)
    )
    of_layer = layer * (program.gradient + gathered * weight)
    of_another = layer * (program.gradient * (1 + overlap) + gathered_later * weight)
    reduced = program.gradient * before * overlap
    in_loss = ends * (weight + program.gradient) + reduced
    # The output layer's gradient is complete before backward of the layers, and its parameters are freed; but layers of
    # multi-token prediction come first, and a table that both ends use is in use to the end.
    in_use = ends * (weight + program.gradient)
    to_the_end = first and shared
    from_the_loss = to_the_end or (last and model.mtp_num_layers > 0)
    in_backward = in_use * to_the_end + of_another
    in_forward = at_its_end = 0.0
    if layout.microbatches(job) > 1:
        # The last two units of the backward pass before are still being reduced.
        if first and not shared:
            in_forward = (embedding + layer) * (weight + program.gradient * overlap)
        elif not first and layers > 1:
            at_its_end = layer * (weight + 2 * program.gradient * overlap)
    # The unit whose gradients came before is still being reduced: the output layer, or the last one of the backward
    # pass before, which is that of the ends if they are shared.
    if from_the_loss:
        before_backward = in_use
    else:
        before_backward = program.gradient * ends * overlap if last else reduced
    first_backward, after_loss = of_layer + before_backward, in_loss + layer * weight * prefetch
    return UnitMemory(first_backward, in_backward, in_forward, at_its_end, in_loss, after_loss)
