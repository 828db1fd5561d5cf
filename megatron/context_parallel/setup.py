"""Set up context parallelism: refuse what it cannot do before the start, and change the operations of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.context_parallel.attention import ContextAttention, split_axis
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.ops.backend import Ops
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Mesh, join
from megatron.training.config import RunConfig
from megatron.training.task import Task


def check_context_parallel(config: RunConfig, task: Task) -> None:
    """Check that context parallelism can run a task.

    Raises:
        InputError: it cannot.
    """
    if config.parallel.context_parallel_size == 1:
        return
    given = f"--context-parallel-size: {config.parallel.context_parallel_size}"
    for reason in _obstacles(config, task):
        raise InputError(f"{given} {reason}")


def _obstacles(config: RunConfig, task: Task) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    if task.name not in ("GPT", "BERT", "BERT --bert-no-binary-head"):
        yield f"is for the pretraining of GPT and BERT, not {task.name}; leave it out"
    yield from heads_obstacle(model, parallel)


def heads_obstacle(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield the reason if the ranks that exchange heads for positions do not divide the heads."""
    heads, tp = parallel.context_grid[0], parallel.tensor_model_parallel_size
    queries, groups = model.num_attention_heads // tp, model.kv_heads_per_rank(tp)
    if queries % heads or groups % heads:
        yield (
            f"with --cp-comm-type {parallel.cp_comm_type} divides the heads of a rank by {heads}, which has {queries} "
            f"query head{'s' * (queries > 1)} and {groups} query group{'s' * (groups > 1)}; use --cp-comm-type p2p, or "
            "smaller groups with a2a+p2p"
        )


def context_parallel_ops(config: RunConfig, mesh: Mesh, ops: Ops) -> Ops:
    """The operations of a run with the attention of context parallelism. Every process must take part."""
    return with_context_parallel(config.parallel, mesh, ops)


def with_context_parallel(parallel: ParallelConfig, mesh: Mesh, ops: Ops) -> Ops:
    """`ops` with the attention of context parallelism, if there is any. Every process must take part."""
    if mesh.cp.size == 1:
        return ops
    size, _ = parallel.context_grid
    heads, ring = (
        join(ranks, mesh.cp.name, mesh) if len(ranks) > 1 else ALONE for ranks in split_axis(mesh.cp, size)
    )
    gathers = parallel.cp_comm_type == "all_gather"
    attention = ContextAttention(mesh.cp, heads, ring, gathers=gathers, inner=ops)
    return dataclasses.replace(
        ops,
        attention=attention.attention,
        make_mask=attention.make_mask,
        # The ring saves no scores.
        recomputes_attention=ops.recomputes_attention and ring.size == 1,
    )
