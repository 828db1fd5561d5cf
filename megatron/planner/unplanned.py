"""Flags of a training run whose time or memory is not planned."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.performance.config import Fp8Config, PerformanceConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Layout
from megatron.recipes.config import FreezeConfig, RampUpConfig
from megatron.training.config import RunConfig

# Share of the layers in bf16 up to which a run counts as one in FP8: with more, the difference exceeds the error.
MAX_BF16_LAYERS = 0.1


def check_model(model: ModelConfig) -> None:
    """Check that the time of a model is known.

    Raises:
        InputError: it has ALiBi, or pads the inputs of experts.
    """
    if model.position_embedding_type == "alibi":
        raise InputError(
            "--position-embedding-type: alibi is not planned, since the times of attention with a bias are not known; "
            "a dry run of one layout counts its memory (docs/dry-run.md)"
        )
    if model.moe_pad_expert_input_to_capacity:
        raise InputError("--moe-pad-expert-input-to-capacity is not planned; a dry run counts it")


def check_flags(run: RunConfig, replicas: int) -> None:
    """Check that a run with so many replicas has no flags that are not planned but change its time or memory.

    Raises:
        InputError: it has one.
    """
    check_model(run.model)
    parallel, optimizer, fp8 = run.parallel, run.optimizer, run.plugin(Fp8Config)
    faults = (
        (parallel.cp_comm_type == "a2a+p2p", f"--cp-comm-type: {parallel.cp_comm_type}"),
        (parallel.recompute_method == "block", f"--recompute-method: {parallel.recompute_method}"),
        (parallel.distribute_saved_activations, "--distribute-saved-activations"),
        (parallel.grad_reduce_in_bf16 and replicas > 1, "--grad-reduce-in-bf16"),
        (optimizer.optimizer != "adam", f"--optimizer: {optimizer.optimizer}"),
        (optimizer.bf16_optimizer_states, "--bf16-optimizer-states"),
        (run.plugin(FreezeConfig).freeze is not None, "--freeze"),
        (fp8.fp8_format is not None and fp8.fp8_recipe != "tensorwise", f"--fp8-recipe: {fp8.fp8_recipe}"),
        (_bf16_layers(run) > MAX_BF16_LAYERS * run.model.num_layers, "--first-last-layers-bf16"),
    )
    for given, name in faults:
        if given:
            raise InputError(f"{name} is not planned; a dry run counts it")


def notes(run: RunConfig) -> list[str]:
    """Describe flags that a plan leaves out, since their effect is small, unknown or depends on the data."""
    performance = run.plugin(PerformanceConfig)
    left_out = (
        (
            performance.tp_comm_overlap,
            "--tp-comm-overlap: communication within layers counts whole, so the run may be faster",
        ),
        (performance.cuda_graph, "--cuda-graph: kernels count with the time of their launches"),
        (_bf16_layers(run) > 0, "--first-last-layers-bf16: all layers count in FP8"),
        (
            run.data.reset_attention_mask,
            "--reset-attention-mask: a sample counts as one document, so the run may be faster",
        ),
        (
            run.plugin(RampUpConfig).rampup_batch_size is not None,
            "--rampup-batch-size: all steps count with the full batch, so training takes longer",
        ),
    )
    return [*model_notes(run.model), *(words for given, words in left_out if given)]


def model_notes(model: ModelConfig) -> list[str]:
    """Describe flags of the model that a plan leaves out."""
    left_out = (
        (
            model.moe_expert_capacity_factor is not None,
            "--moe-expert-capacity-factor: counts as if no token were dropped",
        ),
        (
            model.moe_shared_expert_overlap,
            "--moe-shared-expert-overlap: predicted without the overlap, so the run may be faster",
        ),
    )
    return [words for given, words in left_out if given]


def run_on(run: RunConfig, layout: Layout, cluster: Cluster) -> Cluster:
    """Return the cluster in the precision of a run.

    A GPU is as fast in fp16 as in bf16.

    Raises:
        InputError: the device is described in another precision, or as one with other operations.
    """
    device, precision = cluster.device, run.training.precision
    if device.precision == "bf16" and precision == "fp16" and not device.is_cpu:
        device = dataclasses.replace(device, precision=precision)
    if device.precision != precision:
        planned = f"{device.name} is planned in {device.precision}"
        if precision == "fp32":
            raise InputError(f"--{device.precision} is required: {planned}, and the command is in fp32")
        change = "leave the flag out" if device.precision == "fp32" else f"give --{device.precision} instead"
        raise InputError(f"--{precision}: {planned}; {change}")
    if not device.is_cpu:
        _check_gpu_flags(run, layout)
    return dataclasses.replace(cluster, device=device)


def _check_gpu_flags(run: RunConfig, layout: Layout) -> None:
    """Check flags that a CPU's plan does not depend on.

    Raises:
        InputError: layers are not compiled, and plans assume that they are.
    """
    ops = run.ops
    if not layout.splits_backward and (not ops.torch_compile or ops.ops_backend in ("plain", "apex")):
        name = f"--ops-backend: {ops.ops_backend}" if ops.torch_compile else "--no-torch-compile"
        raise InputError(
            f"{name} is planned only with a --pipeline-schedule that splits backward passes, such as zb-h1; "
            "leave it out, or count its memory by a dry run"
        )


def _bf16_layers(run: RunConfig) -> int:
    """Number of layers of an FP8 run that stay in bf16."""
    fp8 = run.plugin(Fp8Config)
    return 0 if fp8.fp8_format is None else len(fp8.bf16_layers(run.model.num_layers))
