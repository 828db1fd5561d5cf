"""This program, in which schedules that split backward passes need layers that are not compiled as a whole."""

from __future__ import annotations

import dataclasses

from megatron.model.config import ModelConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import Memory, max_memory
from megatron.planner.programs import OURS, Program
from megatron.planner.simulate import Simulator


def our_program(job: Job, layout: Layout, cluster: Cluster) -> Program:
    """Return the program that trains in a layout."""
    return uncompiled(job.model) if needs_uncompiled_layers(layout, cluster) else OURS


def needs_uncompiled_layers(layout: Layout, cluster: Cluster) -> bool:
    """Return True if a layout needs --no-torch-compile. On a CPU, in fp32, layers are not compiled as a whole."""
    return layout.splits_backward and cluster.device.precision != "fp32"


def uncompiled(model: ModelConfig) -> Program:
    """Return the program with layers of single operations.

    Accesses of an element, by (forward; backward). Residual stream, twice: norm (2; 3), dropout with a mask of half an
    element (2.5; 2.5), addition (3) and the sum of two gradients (3). MLP: GELU (2; 3) and the sum for a bias (1). With
    a gate, of two halves in units of one and a half: the activation and the product with the other half (2 and 3), in
    backward its two gradients, the activation's, and both in one matrix (6, 3 and 4).
    """
    mlp = (5 / 1.5, 13 / 1.5) if model.gated else (2.0, 4.0)
    return dataclasses.replace(OURS, residual=(15, 17), mlp=mlp, compiled=False)


def memory_of(job: Job, layout: Layout, cluster: Cluster) -> Memory:
    """Return the memory of the stage that needs most."""
    return max_memory(job, layout, cluster, our_program(job, layout, cluster))


def simulator_of(job: Job, layout: Layout, cluster: Cluster) -> Simulator:
    """Return the simulator of a layout."""
    return Simulator(job, layout, cluster, our_program(job, layout, cluster))
