"""Build the model of a run, with its operations, and the engine that trains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron.errors import InputError
from megatron.model.context import ModelContext
from megatron.model.flops import flops_per_sample
from megatron.model.language_model import LanguageModel
from megatron.ops.backend import Ops, choose_ops, find_compiler
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import param_groups
from megatron.optim.spec import OptimizerSpec
from megatron.parallel.collectives import all_equal, raise_on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.phases import Phases
from megatron.parallel.pipeline import WgradQueue
from megatron.parallel.random import stable_hash
from megatron.parallel.schedules import SPLIT
from megatron.parallel.stages import split_layers
from megatron.training.config import RunConfig
from megatron.training.engine import DTYPES, Engine
from megatron.training.stage import StageModel
from megatron.training.task import Task

# Check or change a model that has no memory yet, on its device; raise `InputError`. Filled by `megatron.plugins`.
MODEL_HOOKS: list[Callable[[RunConfig, StageModel, torch.device], None]] = []
# Make optimizers of parameters that --optimizer does not update. Filled by `megatron.plugins`.
FIRST_OPTIMIZERS: list[Callable[[RunConfig], OptimizerSpec]] = []
# Change an engine that is built. Filled by `megatron.plugins`.
ENGINE_HOOKS: list[Callable[[Engine], None]] = []
# Change the operations of a run for its mesh. Filled by `megatron.plugins`.
OPS_HOOKS: list[Callable[[RunConfig, Mesh, Ops], Ops]] = []


def build_engine(
    config: RunConfig, task: Task[Any], mesh: Mesh, *, vocab_size: int, padded_vocab_size: int
) -> Engine:
    """Build the engine of a run. Parameters have no values yet. Every process must call it.

    Raises:
        InputError: the device does not support what a flag asks for, or a plug-in's check fails.
    """
    ops = choose_run_ops(config, mesh, padded_vocab_size)
    model = build_model(config, task, mesh, ops, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size)
    for hook in MODEL_HOOKS:
        hook(config, model, mesh.device)
    engine = Engine(config, task, mesh, model, Phases())
    for extend in ENGINE_HOOKS:
        extend(engine)
    return engine


def choose_run_ops(config: RunConfig, mesh: Mesh, padded_vocab_size: int) -> Ops:
    """Choose the operations of a run, and check that every process chose the same."""
    one_graph = mesh.tp.size == mesh.cp.size == 1 and config.model.num_experts is None
    with raise_on_all_ranks(mesh.world, InputError):
        ops = choose_ops(
            config.ops,
            work=microbatch_flops(config, mesh, padded_vocab_size),
            dtype=DTYPES[config.training.precision],
            device=mesh.device,
            find=lambda device: find_compiler(device, one_graph=one_graph),
        )
    # Replicated values would drift apart if ranks computed them differently.
    if not all_equal(stable_hash(*ops.kinds, bits=32), mesh.world):
        raise InputError(
            f"rank {mesh.world.rank} computes with {', '.join(ops.kinds)} and other ranks with something else: "
            "their machines differ in torch, apex or the C++ compiler; make them alike, or use --ops-backend plain"
        )
    return ops


def microbatch_flops(config: RunConfig, mesh: Mesh, padded_vocab_size: int) -> float:
    """Floating-point operations of a microbatch on one rank."""
    length, vocab = config.data.seq_length, padded_vocab_size
    sample = flops_per_sample(config.model, seq_length=length, padded_vocab_size=vocab, num_logits=length)
    return sample * config.training.micro_batch_size / (mesh.tp.size * mesh.cp.size * mesh.pp.size)


def build_model(config: RunConfig, task: Task[Any], mesh: Mesh, ops: Ops, **vocab_sizes: int) -> StageModel:
    """Build this process's chunks of the model, without memory. Every process must call it.

    `vocab_sizes` are `vocab_size` and `padded_vocab_size`.
    """
    for change in OPS_HOOKS:
        ops = change(config, mesh, ops)
    parallel, chunks = config.parallel, split_layers(config.parallel, config.model.num_layers)[mesh.pp.rank]
    wgrads = WgradQueue()
    if parallel.pipeline_schedule in SPLIT:
        ops = dataclasses.replace(ops, accumulate_wgrad=wgrads.deferring(ops.accumulate_wgrad))
    context = ModelContext.on_mesh(mesh, config.model, parallel, ops=ops, **vocab_sizes)
    with torch.device("meta"):
        modules = [task.build_model(config, context, chunk) for chunk in chunks]
    models = [module for module in modules if isinstance(module, LanguageModel) and parallel.v_shaped]
    for model in models:
        model.first_chunk = (models[0],)
    first = [make(config) for make in FIRST_OPTIMIZERS]
    groups = param_groups(
        config.optimizer, mesh, sharding=parallel.data_parallel_sharding_strategy, first=first
    )
    dtype = DTYPES[config.training.precision]
    return StageModel(
        modules=modules,
        chunks=chunks,
        context=context,
        buckets=lay_out(modules, groups, bucket_size=parallel.ddp_bucket_size),
        hidden_size=config.model.hidden_size,
        hidden_dtype=torch.float32 if config.model.fp32_residual_connection else dtype,
        sequence_shards=mesh.tp.size if parallel.sequence_parallel else 1,
        wgrads=wgrads,
    )
