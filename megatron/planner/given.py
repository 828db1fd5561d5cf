"""The planner's job and layout of a training run's configuration."""

from __future__ import annotations

import dataclasses

from megatron.parallel.stages import split_layers
from megatron.performance.config import Fp8Config, OffloadConfig, PerformanceConfig
from megatron.planner.division import even_sizes
from megatron.planner.dry_run import vocabulary
from megatron.planner.layout import Job, Layout
from megatron.planner.unplanned import check_flags
from megatron.training.config import RunConfig
from megatron.training.layout import check_layout
from megatron.variants.auto_schedule import AutoScheduleConfig
from megatron.variants.auto_stages import AUTO, with_auto_layout


def given_run(config: RunConfig, devices: int) -> tuple[Job, Layout]:
    """Return the job and the layout of a run on so many devices.

    Raises:
        InputError: the run does not divide the devices, or has a flag that is not planned.
    """
    balanced = config.parallel.pipeline_model_parallel_layout == AUTO
    config = with_auto_layout(config)
    check_layout(config, devices)
    model, parallel, training = config.model, config.parallel, config.training
    schedule = parallel.pipeline_schedule if parallel.pipeline_model_parallel_size > 1 else None
    sharding = parallel.data_parallel_sharding_strategy
    offload = config.plugin(OffloadConfig)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    data = devices // (tensor * pipeline * context)
    check_flags(config, data * context)
    layout = Layout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=(parallel.expert_tensor_parallel_size or tensor) if model.num_experts else 1,
        chunks=len(split_layers(parallel, model.num_layers)[0]),
        pipeline_schedule=None if schedule in ("1f1b", "interleaved") else schedule,
        in_flight=config.plugin(AutoScheduleConfig).pipeline_microbatches_in_flight,
        balanced=balanced,
        division=None if balanced else _division(config),
        micro_batch_size=training.micro_batch_size,
        recompute=parallel.recompute_granularity or "none",
        recompute_layers=parallel.recompute_num_layers or 1,
        sequence_parallel=parallel.sequence_parallel,
        distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        # Without shards there is no gather, and the flag is refused.
        overlap_param_gather=parallel.overlap_param_gather or not parallel.use_distributed_optimizer,
        scatter_gather=parallel.scatter_gather_tensors_in_pipeline,
        sharded_gradients=sharding == "optim_grads",
        sharded_parameters=sharding == "optim_grads_params",
        instances=parallel.num_distributed_optimizer_instances,
        context_exchange=parallel.cp_comm_type if parallel.context_parallel_size > 1 else "p2p",
        post_validation=config.plugin(PerformanceConfig).enable_optimizer_post_validation,
        offload_optimizer=config.optimizer.cpu_offload_optimizer,
        offload_layers=offload.cpu_offload_activations_num_layers if offload.cpu_offload_activations else 0,
    )
    job = Job(
        model,
        config.data.seq_length,
        vocabulary(config.tokenizer),
        training.global_batch_size or training.micro_batch_size * data,
        config.plugin(Fp8Config).fp8_format,
        config.tokenizer.make_vocab_size_divisible_by,
    )
    if layout.division == even_sizes(job, dataclasses.replace(layout.parts, sizes=None)):
        layout = dataclasses.replace(layout, division=None)
    return job, layout


def _division(config: RunConfig) -> tuple[int, ...] | None:
    """Layers of each part of the model, first to last; None if they are those of an even division."""
    parallel, num_layers = config.parallel, config.model.num_layers
    if parallel.pipeline_model_parallel_size == 1 or parallel.layer_split == "even":
        return None
    chunks = [chunk.layers for stage in split_layers(parallel, num_layers) for chunk in stage]
    sizes = tuple(len(layers) for layers in sorted(chunks, key=lambda layers: (layers.start, layers.stop)))
    return None if len(set(sizes)) == 1 else sizes
