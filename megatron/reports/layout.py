"""Describe the layout of processes in the log."""

from __future__ import annotations

import torch

from megatron.parallel.collectives import all_gather
from megatron.parallel.stages import Chunk, split_layers
from megatron.training.engine import Engine

# Words for the strategies of sharding over data-parallel ranks.
SHARDED = {
    "optim": "distributed optimizer",
    "optim_grads": "sharded optimizer and gradients",
    "optim_grads_params": "sharded optimizer, gradients and parameters",
}


def layout_line(engine: Engine) -> str:
    """Describe the number of processes and the kinds of parallelism in one line."""
    mesh, config = engine.mesh, engine.config.parallel
    sizes = {"tensor": mesh.tp.size, "context": mesh.cp.size, "data": mesh.dp.size, "pipeline": mesh.pp.size}
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "context" or size > 1)
    experts, parts = config.expert_model_parallel_size, config.expert_tp
    divided = f"experts: expert {experts} x tensor {parts} x data {mesh.expert_dp.size}"
    stages = config.pipeline_model_parallel_layout
    instances = config.num_distributed_optimizer_instances
    sharded = SHARDED.get(config.data_parallel_sharding_strategy, "")
    sizes_of = [[len(chunk.layers) for chunk in chunks] for chunks in _chunks(engine)]
    uneven = len({size for chunks in sizes_of for size in chunks}) > 1
    used = [
        name
        for name, on in (
            (divided, engine.config.model.num_experts is not None and mesh.expert.size > 1),
            ("sequence parallel", config.sequence_parallel),
            (f"{config.cp_comm_type} context parallelism", mesh.cp.size > 1),
            (f"{sharded}{f' in {instances} instances' if instances > 1 else ''}", mesh.dp_cp.size > 1),
            (f"{config.pipeline_schedule} schedule", mesh.pp.size > 1),
            (f"{len(sizes_of[0])} chunks per stage", len(sizes_of[0]) > 1),
            (f"stages {stages}", stages is not None),
            (f"stages of {_stage_sizes(sizes_of)} layers", stages is None and uneven),
            (f"{config.recompute_granularity} recomputation", config.recompute_granularity is not None),
            ("optimizer in host memory", engine.config.optimizer.cpu_offload_optimizer),
        )
        if name and on
    ]
    processes = f"{mesh.world.size} process{'es' if mesh.world.size > 1 else ''}"
    return "; ".join([f"{product} = {processes}" if mesh.world.size > 1 else processes, *used])


def describe_layout(engine: Engine) -> str:
    """Describe the layout as a table. Every process must call it."""
    mesh, buffer = engine.mesh, engine.buffer
    per_rank = all_gather(torch.tensor([buffer.local_elements]), mesh.world).tolist()
    rows = [("layout", layout_line(engine))]
    each = mesh.world.size // mesh.pp.size
    for stage, chunks in enumerate(_chunks(engine)):
        layers = ", ".join(_layers(chunk.layers) for chunk in chunks)
        count = per_rank[stage * each]
        ranks = f"ranks {stage * each}-{(stage + 1) * each - 1}" if each > 1 else f"rank {stage}"
        rows.append((f"stage {stage}", f"{ranks}; layers {layers}; {count:,} parameters on each rank"))
    rows.append(("parameters", f"{buffer.num_elements:,} unique, excluding vocabulary padding"))
    lengths = [bucket.end - bucket.start for bucket in buffer.buckets]
    rows.append(
        ("buckets", f"{len(lengths)} on rank 0, {min(lengths):,} to {max(lengths):,} elements of gradient")
    )
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _chunks(engine: Engine) -> list[list[Chunk]]:
    return split_layers(engine.config.parallel, engine.config.model.num_layers)


def _stage_sizes(sizes: list[list[int]]) -> str:
    """Layers of each stage, those of its chunks joined by +."""
    return ", ".join("+".join(map(str, chunks)) for chunks in sizes)


def _layers(layers: range) -> str:
    if not layers:
        return "none"
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
