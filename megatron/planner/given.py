"""The planner's job and layout of a training run's configuration."""

from __future__ import annotations

from megatron.errors import InputError
from megatron.parallel.stages import split_layers
from megatron.performance.config import Fp8Config
from megatron.planner.dry_run import vocabulary
from megatron.planner.layout import Job, Layout
from megatron.training.config import RunConfig
from megatron.training.layout import check_layout
from megatron.variants.auto_stages import with_auto_layout


def given_run(config: RunConfig, devices: int) -> tuple[Job, Layout]:
    """Return the job and the layout of a run on so many devices.

    Raises:
        InputError: the run does not divide the devices, or has a layout that is not planned.
    """
    config = with_auto_layout(config)
    check_layout(config, devices)
    model, parallel, training = config.model, config.parallel, config.training
    if parallel.pipeline_schedule not in ("1f1b", "interleaved"):
        raise InputError(
            f"--pipeline-schedule: {parallel.pipeline_schedule} is not planned; a dry run counts it"
        )
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type != "p2p":
        raise InputError(f"--cp-comm-type: {parallel.cp_comm_type} is not planned; a dry run counts it")
    sharding = parallel.data_parallel_sharding_strategy
    if sharding == "optim_grads" or (
        sharding == "optim_grads_params" and parallel.pipeline_model_parallel_size > 1
    ):
        raise InputError(f"--data-parallel-sharding-strategy: {sharding} is not planned; a dry run counts it")
    if (instances := parallel.num_distributed_optimizer_instances) > 1:
        raise InputError(
            f"--num-distributed-optimizer-instances: {instances} is not planned; a dry run counts it"
        )
    if parallel.recompute_method == "block":
        raise InputError("--recompute-method: block is not planned; a dry run counts it")
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    data = devices // (tensor * pipeline * context)
    layout = Layout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=(parallel.expert_tensor_parallel_size or tensor) if model.num_experts else 1,
        chunks=len(split_layers(parallel, model.num_layers)[0]),
        micro_batch_size=training.micro_batch_size,
        recompute=parallel.recompute_granularity or "none",
        sequence_parallel=parallel.sequence_parallel,
        distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        scatter_gather=parallel.scatter_gather_tensors_in_pipeline,
        sharded_parameters=sharding == "optim_grads_params",
    )
    job = Job(
        model,
        config.data.seq_length,
        vocabulary(config.tokenizer),
        training.global_batch_size or training.micro_batch_size * data,
        config.plugin(Fp8Config).fp8_format,
    )
    sizes = [
        sum(dense + experts for dense, experts in stage)
        - (model.mtp_num_layers if number == pipeline - 1 else 0)
        for number, stage in enumerate(layout.layers(job))
    ]
    ours = [sum(len(chunk.layers) for chunk in stage) for stage in split_layers(parallel, model.num_layers)]
    if sizes != ours:
        raise InputError(
            f"--pipeline-model-parallel-size: stages of {', '.join(map(str, ours))} layers are not planned; a dry run "
            "counts them"
        )
    return job, layout
