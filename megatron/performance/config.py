"""Flags that make a run faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.model.config import ModelConfig
from megatron.parallel.schedules import SPLIT
from megatron.reports.config import TimingConfig
from megatron.training.config import PluginConfig, RunConfig

# A multiple of 16 bytes, which rows of grouped products take, in elements of 16 bits.
GROUPED_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerformanceConfig(PluginConfig):
    """Threads, CUDA graphs, overlapped communication, saving in the background, and garbage collection in step."""

    num_threads: int | None = flag(
        None,
        "CPU threads of each process (default: OMP_NUM_THREADS, or one per core; torchrun sets it to 1)",
        low=1,
        high=10**4,
    )
    cuda_graph: bool = flag(
        False,
        "on a GPU: run forward and backward of a microbatch as one CUDA graph, which makes small models faster; for "
        "GPT with one GPU per replica and --attention-dropout 0",
    )
    tp_comm_overlap: bool = flag(
        False,
        "with tensor parallelism: divide the products of layers along the sequence, so that the communication of one "
        "piece overlaps with the product of the next, in forward",
    )
    enable_optimizer_post_validation: bool = flag(
        False,
        "with a pipeline: update the weights before the gradient norm of all stages is known, and validate that after "
        "the first forward passes of the next step; an update that needed clipping is undone. For zb-h2 and zb-v",
    )
    async_save: bool = flag(
        False,
        "write checkpoints in the background, from a copy in host memory; the next save and the end of the run wait "
        "for the write",
    )
    manual_gc: bool = flag(
        False,
        "collect garbage at the same iteration on all ranks: at the start and every --manual-gc-interval",
    )
    manual_gc_interval: int = flag(
        0, "with --manual-gc: iterations between collections; 0: none after the start", low=0
    )
    manual_gc_eval: bool = flag(True, "with --manual-gc: do not collect before and after evaluations")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.manual_gc and (self.manual_gc_interval or not self.manual_gc_eval):
            given = "--manual-gc-interval" if self.manual_gc_interval else "--no-manual-gc-eval"
            raise InputError(f"{given} needs --manual-gc")

    def check(self, run: RunConfig) -> None:
        if self.cuda_graph:
            _check_cuda_graph(run)
        if self.enable_optimizer_post_validation:
            _check_post_validation(run)
        if self.tp_comm_overlap and run.parallel.tensor_model_parallel_size == 1:
            raise InputError("--tp-comm-overlap needs --tensor-model-parallel-size above 1")
        if self.tp_comm_overlap and run.plugin(Fp8Config).fp8_format is not None:
            raise InputError(
                "--tp-comm-overlap and --fp8-format exclude each other: it divides products in bf16; leave one out"
            )
        if self.async_save and run.checkpoint.save is None:
            raise InputError("--async-save needs --save, the folder to write checkpoints to")
        if run.model.moe_grouped_gemm:
            check_grouped_products(run.model, run.training.precision, run.parallel.expert_tp)


def check_grouped_products(model: ModelConfig, precision: str, ranks: int) -> None:
    """Check that the rows of the matrices of experts, each shared by so many ranks, fit torch's grouped products.

    Raises:
        InputError: a size is not a multiple of 16 bytes.
    """
    multiple = GROUPED_MULTIPLE // 2 if precision == "fp32" else GROUPED_MULTIPLE
    for name, size, parts in (
        ("--hidden-size", model.hidden_size, 1),
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size or 0, ranks),
    ):
        if size % (multiple * parts):
            each = f" on each of the {parts} ranks that share an expert" if parts > 1 else ""
            raise InputError(
                f"{name}: {size} is not a multiple of {multiple}{each}, as --moe-grouped-gemm needs in {precision}; "
                f"use a multiple of {multiple * parts}, or leave --moe-grouped-gemm out"
            )


def _check_cuda_graph(run: RunConfig) -> None:
    """Check that all microbatches of a run with --cuda-graph launch the same kernels, and communicate nothing."""
    faults = (
        (
            run.model.num_experts is not None,
            ": with --num-experts the host waits for the number of tokens of each expert, and a graph cannot; leave "
            "one out",
        ),
        (
            run.parallel.data_parallel_sharding_strategy not in ("no_shard", "optim"),
            " needs gradients and parameters at fixed addresses; use --data-parallel-sharding-strategy optim",
        ),
        (
            run.parallel.pipeline_model_parallel_size > 1,
            " captures a pass as a whole, and a pipeline's stages pass on parts of it; leave it out, or use "
            "--pipeline-model-parallel-size 1",
        ),
        (
            run.parallel.tensor_model_parallel_size > 1,
            " captures no communication, and tensor parallelism's is within a pass; leave it out, or use "
            "--tensor-model-parallel-size 1",
        ),
        (
            run.parallel.context_parallel_size > 1,
            " captures no communication, and context parallelism's is within a pass; leave it out, or use "
            "--context-parallel-size 1",
        ),
        (
            run.model.attention_dropout > 0,
            " would drop the same scores of every microbatch, since the host seeds attention's kernels; use "
            "--attention-dropout 0",
        ),
        (
            run.plugin(TimingConfig).timing_log_level > 1,
            " runs a pass as one, which --timing-log-level 2 would time in parts; use --timing-log-level 1",
        ),
    )
    for is_so, why in faults:
        if is_so:
            raise InputError(f"--cuda-graph{why}")


def _check_post_validation(run: RunConfig) -> None:
    """Check that passes of a run with --enable-optimizer-post-validation can be repeated, and that it may gain."""
    parallel, model = run.parallel, run.model
    tied = not model.untie_embeddings_and_output_weights or model.mtp_num_layers > 0
    faults = (
        (parallel.pipeline_model_parallel_size == 1, " needs --pipeline-model-parallel-size above 1"),
        (
            parallel.pipeline_schedule not in SPLIT,
            f" gains nothing with --pipeline-schedule {parallel.pipeline_schedule}, whose first stage ends last; use "
            "zb-h2 or zb-v",
        ),
        (
            tied and not parallel.v_shaped,
            ": the first stage waits for the last one's gradient of the embedding table; use "
            "--untie-embeddings-and-output-weights without --mtp-num-layers, or --pipeline-schedule zb-v",
        ),
        (
            run.optimizer.cpu_offload_optimizer,
            " keeps a copy of the optimizer's state on the device, and --cpu-offload-optimizer none; leave one out",
        ),
        (
            run.plugin(OffloadConfig).cpu_offload_activations,
            " repeats forward passes, whose activations --cpu-offload-activations has copied already; leave one out",
        ),
        (
            run.optimizer.log_num_zeros_in_grad,
            " does not go with --log-num-zeros-in-grad, a sum over all stages before the update; leave one out",
        ),
    )
    for is_so, why in faults:
        if is_so:
            raise InputError(f"--enable-optimizer-post-validation{why}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig(PluginConfig):
    """Activations in host memory."""

    cpu_offload_activations: bool = flag(
        False,
        "copy the activations of layers to host memory after their forward, and back ahead of their backward; those of "
        "the model's last layer stay, since its backward follows at once",
    )
    cpu_offload_activations_num_layers: int | None = flag(
        None,
        "with --cpu-offload-activations: offload only the first N layers of each model chunk (default: all)",
        low=1,
    )

    def check(self, run: RunConfig) -> None:
        number = self.cpu_offload_activations_num_layers
        if not self.cpu_offload_activations:
            if number is not None:
                raise InputError(
                    f"--cpu-offload-activations-num-layers: {number} needs --cpu-offload-activations"
                )
            return
        if number is not None and number > run.model.num_layers:
            raise InputError(
                f"--cpu-offload-activations-num-layers: {number} is above --num-layers {run.model.num_layers}"
            )
        if run.parallel.recompute_granularity == "full":
            raise InputError(
                "--cpu-offload-activations and --recompute-granularity full exclude each other: recomputed layers keep "
                "only their inputs, and nothing is left to offload; leave one out"
            )
        if run.plugin(PerformanceConfig).cuda_graph:
            raise InputError(
                "--cpu-offload-activations and --cuda-graph exclude each other: a graph keeps its activations; leave "
                "one out"
            )

    def num_layers(self, layers: int, *, last: bool) -> int:
        """Number of first layers to offload of a model chunk with this many layers; `last` if the loss follows."""
        if not self.cpu_offload_activations:
            return 0
        number = self.cpu_offload_activations_num_layers
        return layers - last if number is None else min(number, layers)


FP8_FORMATS = ("e4m3", "hybrid")
# Recipes of Megatron-LM that torchao does not have for training on every GPU with FP8.
OTHER_RECIPES = ("delayed", "mxfp8", "blockwise", "custom")
# Scaled products need an inner dimension, and a number of columns of the second operand, that are multiples of this.
FP8_MULTIPLE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config(PluginConfig):
    """FP8 products in the linear layers of transformer layers, by torchao."""

    fp8_format: str | None = flag(
        None,
        "with --bf16: compute the products of linear layers in transformer layers in FP8. 'e4m3': all operands. "
        "'hybrid': output gradients in e5m2. Needs torchao, and a GPU from Ada or Hopper on; a CPU emulates it",
        choices=FP8_FORMATS,
    )
    fp8_recipe: str = flag(
        "tensorwise",
        "with --fp8-format: scales, always by current values. 'tensorwise': one for each tensor. 'rowwise': one for "
        "each row of the first and column of the second operand of a product, a power of 2",
        choices=("tensorwise", "rowwise"),
    )
    first_last_layers_bf16: bool = flag(
        False, "with --fp8-format: compute the first and the last layers in bf16"
    )
    num_layers_at_start_in_bf16: int = flag(
        1, "with --first-last-layers-bf16: number of first layers in bf16", low=0
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "with --first-last-layers-bf16: number of last layers in bf16", low=0
    )

    def __post_init__(self) -> None:
        if self.fp8_recipe in OTHER_RECIPES:
            raise InputError(
                f"--fp8-recipe: {self.fp8_recipe} is not implemented; use tensorwise, one scale for each tensor by its "
                "current values, or rowwise, one for each row and column"
            )
        super().__post_init__()

    def check(self, run: RunConfig) -> None:
        if self.fp8_format is None:
            return
        if not run.training.bf16:
            raise InputError(f"--fp8-format: {self.fp8_format} needs --bf16")
        check_fp8_model(self.fp8_format, run.model, run.parallel.tensor_model_parallel_size)

    def bf16_layers(self, num_layers: int) -> list[int]:
        """Layers of a model that stay in bf16."""
        if not self.first_last_layers_bf16:
            return []
        last = max(0, num_layers - self.num_layers_at_end_in_bf16)
        return [i for i in range(num_layers) if i < self.num_layers_at_start_in_bf16 or i >= last]

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> list[str]:
        edges = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        needs = {"fp8_format": ("fp8_recipe", "first_last_layers_bf16"), "first_last_layers_bf16": edges}
        return [
            f"--{name.replace('_', '-')} has no effect without --{needed.replace('_', '-')}"
            for needed, names in needs.items()
            for name in names
            if name in values and not values.get(needed)
        ]


def check_fp8_model(fp8_format: str, model: ModelConfig, ranks: int) -> None:
    """Check that the layers of a model on so many tensor-parallel ranks can compute in FP8.

    Raises:
        InputError: it has experts, or a size that FP8 products cannot have.
    """
    if model.num_experts is not None:
        raise InputError(
            f"--fp8-format: {fp8_format} is for dense layers, and --num-experts {model.num_experts} adds "
            "products of experts; leave one out"
        )
    if not model.can_split(ranks):  # `check_layout` has the error
        return
    for name, size in fp8_sizes(model, ranks).items():
        if size % FP8_MULTIPLE:
            where = " on each tensor-parallel rank" if ranks > 1 else ""
            raise InputError(
                f"--fp8-format: {name} {size}{where} is not a multiple of {FP8_MULTIPLE}, as FP8 products need; "
                "choose another size, or leave --fp8-format out"
            )


def fp8_sizes(model: ModelConfig, ranks: int) -> dict[str, int]:
    """Sizes of the products of dense layers on one of so many tensor-parallel ranks, by name."""
    queries = model.num_attention_heads // ranks * model.kv_channels
    sizes = {
        "--hidden-size": model.hidden_size,
        "--num-attention-heads times --kv-channels": queries,
        "--ffn-hidden-size": model.ffn_hidden_size // ranks,
    }
    if model.multi_latent_attention:
        heads, q, kv = model.num_attention_heads // ranks, model.q_lora_rank, model.kv_lora_rank
        return sizes | {
            "--q-lora-rank": q or FP8_MULTIPLE,
            "--kv-lora-rank": kv,
            "--kv-lora-rank plus --qk-pos-emb-head-dim": kv + model.qk_pos_emb_head_dim,
            "keys and values": heads * (model.qk_head_dim + model.v_head_dim),
            "--num-attention-heads times --v-head-dim": heads * model.v_head_dim,
        }
    keys_values = 2 * model.kv_heads_per_rank(ranks) * model.kv_channels
    return sizes | {"queries, keys and values": queries + keys_values}
