"""Lower bounds of the time of a step, by which a search orders layouts."""

from __future__ import annotations

import dataclasses

from megatron.planner.cluster import Cluster
from megatron.planner.job import Job
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Layout
from megatron.planner.our_program import our_program
from megatron.planner.simulate import Simulator
from megatron.planner.space import can_sequence_parallel

# Times of the operations of a microbatch, and of all of it in the whole model, by `kernels_key`.
KernelsOfLayouts = dict[tuple[object, ...], tuple[Kernels, float]]


class Bounds:
    """Lower bounds of the layouts of a job on a cluster, each closer than the one before.

    Times of operations and of pipelines are kept, since many layouts have the same.

    Args:
        kernels: times that are known of clusters with the same nodes and links.
    """

    def __init__(self, job: Job, cluster: Cluster, kernels: KernelsOfLayouts | None = None) -> None:
        self.job, self.cluster = job, cluster
        self.kernels: KernelsOfLayouts = {} if kernels is None else kernels
        self.pipelines: dict[tuple[object, ...], float] = {}

    def simulator(self, layout: Layout) -> Simulator:
        kernels, _ = self._kernels(layout)
        return Simulator(self.job, layout, self.cluster, kernels.program, kernels)

    def of_shape(self, shape: Layout) -> float:
        """Seconds of the mean work of the stages, which no variant of a shape is below.

        No schedule has less of it: layers are fastest where they are compiled as a whole.
        """
        layouts = [shape]
        if can_sequence_parallel(self.job, shape):
            layouts.append(dataclasses.replace(shape, sequence_parallel=True))
        microbatch = min(self._kernels(layout)[1] for layout in layouts)
        return shape.microbatches(self.job) * microbatch / shape.pipeline

    def of_pipeline(self, layout: Layout) -> float:
        """Seconds of the passes, which are the same for all ways to shard and for similar schedules."""
        axes = (
            layout.data,
            layout.pipeline,
            layout.chunks,
            layout.v_shaped,
            layout.balanced,
            layout.post_validation,
        )
        key = (*axes, *kernels_key(layout))
        if key not in self.pipelines:
            self.pipelines[key] = self.simulator(layout).pipeline_bound(exchanges=False)
        return self.pipelines[key]

    def of_step(self, layout: Layout) -> float:
        """Seconds with what replicas exchange and the optimizer."""
        return self.simulator(layout).lower_bound()

    def _kernels(self, layout: Layout) -> tuple[Kernels, float]:
        """The times of a layout's operations, and of a microbatch in the whole model."""
        key = kernels_key(layout)
        if key not in self.kernels:
            kernels = Kernels(self.job, layout, self.cluster, our_program(self.job, layout, self.cluster))
            experts = sum(self.job.model.all_expert_layers)
            dense = len(self.job.model.all_expert_layers) - experts
            forward, backward, _ = kernels.chunk_seconds(dense, experts, first=True, last=True)
            self.kernels[key] = kernels, forward + backward
        return self.kernels[key]


def kernels_key(layout: Layout) -> tuple[object, ...]:
    """The fields of a layout on which `Kernels` depends."""
    return (
        layout.tensor,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.micro_batch_size,
        layout.sequence_parallel,
        layout.recompute,
        layout.splits_backward,
    )
