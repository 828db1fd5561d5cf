"""The planner's prediction of a published run."""

from __future__ import annotations

import dataclasses
import itertools

from published_rows import Row

from megatron.planner.layout import Layout
from megatron.planner.memory import fits, max_memory
from megatron.planner.simulate import Simulator


def predict(row: Row) -> tuple[Layout, float, bool]:
    """The layout of a row, the predicted seconds of its step, and whether it fits the memory.

    Of the choices that a row leaves open it is the fastest that fits, or the one that needs the least memory.
    """
    program = row.profile.program
    choices = []
    for layout, recomputed in itertools.product(row.layouts, (False, True)):
        job = dataclasses.replace(row.job, global_batch_size=row.job.global_batch_size // row.passes)
        mixture = job.model.num_experts is not None and row.recomputes_experts
        if recomputed and (not mixture or layout.recompute == "full"):
            continue
        if recomputed:
            job = dataclasses.replace(job, model=dataclasses.replace(job.model, moe_layer_recompute=True))
        memory = max_memory(job, layout, row.cluster, program)
        if row.offload:
            memory = dataclasses.replace(memory, activations=0.0)
        choices.append((not fits(memory, row.cluster), memory.total, job, layout))
    fitting = [choice for choice in choices if not choice[0]]
    if not fitting:
        fitting = [min(choices, key=lambda choice: choice[1])]
    timed = (
        (row.passes * Simulator(job, layout, row.cluster, program).step().seconds, number, layout, too_large)
        for number, (too_large, _, job, layout) in enumerate(fitting)
    )
    seconds, _, layout, too_large = min(timed, key=lambda choice: choice[:2])
    return layout, seconds, not too_large
