"""This program, in which schedules that split backward passes need layers that are not compiled as a whole."""

from __future__ import annotations

import dataclasses

from megatron.model.config import ModelConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import Memory, fits, max_memory, stage_memory, stage_state
from megatron.planner.parameters import largest_stage
from megatron.planner.programs import OURS, Program
from megatron.planner.simulate import Simulator

UNCOMPILED = dataclasses.replace(OURS, residual=(15, 17), mlp=(2.0, 4.0), compiled=False)
GATED_UNCOMPILED = dataclasses.replace(UNCOMPILED, mlp=(5 / 1.5, 13 / 1.5))


def our_program(job: Job, layout: Layout, cluster: Cluster) -> Program:
    """Return the program that trains in a layout."""
    return uncompiled(job.model) if needs_uncompiled_layers(layout, cluster) else OURS


def needs_uncompiled_layers(layout: Layout, cluster: Cluster) -> bool:
    """Return True if a layout needs --no-torch-compile. On a CPU, in fp32, layers are not compiled as a whole."""
    return layout.splits_backward and cluster.device.precision != "fp32"


def fits_memory(job: Job, layout: Layout, cluster: Cluster) -> bool:
    """Return True if the memory of every stage fits: `fits(memory_of(...))`, but done at the first that does not."""
    program = our_program(job, layout, cluster)
    stages = layout.distinct_stages(job)
    return all(fits(stage_memory(job, layout, cluster, stage, program), cluster) for stage in stages)


def state_fits(job: Job, layout: Layout, cluster: Cluster) -> bool:
    """Return False if the largest stage does not fit even without activations."""
    program, stage = our_program(job, layout, cluster), largest_stage(job, layout)
    return fits(stage_state(job, layout, cluster.device.element, stage, program), cluster)


def uncompiled(model: ModelConfig) -> Program:
    """Return the program with layers of single operations.

    Accesses of an element, by (forward; backward). Residual stream, twice: norm (2; 3), dropout with a mask of half an
    element (2.5; 2.5), addition (3) and the sum of two gradients (3). MLP: GELU (2; 3) and the sum for a bias (1). With
    a gate, of two halves in units of one and a half: the activation and the product with the other half (2 and 3), in
    backward its two gradients, the activation's, and both in one matrix (6, 3 and 4).
    """
    return GATED_UNCOMPILED if model.gated else UNCOMPILED


def memory_of(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Return the memory of the stage that needs most."""
    return max_memory(job, layout, cluster, our_program(job, layout, cluster))


def simulator_of(job: Job, layout: Layout, cluster: Cluster) -> Simulator:
    """Return the simulator of a layout."""
    return Simulator(job, layout, cluster, our_program(job, layout, cluster))
