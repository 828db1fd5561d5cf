"""Flags of the parallel layout and of process groups."""

from __future__ import annotations

import dataclasses
import re

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.parallel.schedules import CHUNKED, SCHEDULES, SPLIT, V_SHAPED

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Sharding strategies; each shards more than the one before. These are ZeRO 0 to 3 (arXiv 1910.02054).
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """Layout of the processes. Data-parallel size = processes / (tensor x pipeline x context-parallel size)."""

    tensor_model_parallel_size: int = flag(
        1, "tensor-parallel size: number of ranks that share each layer", low=1
    )
    sequence_parallel: bool = flag(
        False,
        "with tensor parallelism: also split norms, dropout and the residual stream, along the sequence",
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline-parallel size: number of pipeline stages", low=1)
    pipeline_schedule: str | None = flag(
        None,
        "order of forward and backward passes on a stage (default: 1f1b, or interleaved with "
        "--num-layers-per-virtual-pipeline-stage)",
        choices=SCHEDULES.keys(),  # plug-ins add to them
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of a chunk (virtual stage); each rank holds several chunks (interleaved schedule)",
        low=1,
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage (default: as the other stages)", low=0
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage (default: as the other stages)", low=0
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "parts of the model, first to last, separated by |: E embedding, t layer, m multi-token prediction, L loss; "
        "t*3 and (tt|)*3 repeat. The interleaved schedule has several parts per stage. auto: parts of equal work, by "
        "counted operations; two for each stage with a --pipeline-schedule that has several",
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer when layers are divided evenly among stages"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the output layer and the loss as a layer when layers are divided evenly among stages"
    )
    context_parallel_size: int = flag(
        1, "context-parallel size: number of ranks that divide each sequence, of all layers", low=1
    )
    cp_comm_type: str = flag(
        "p2p",
        "communication of attention with context parallelism: keys and values go around a ring of the ranks (p2p), "
        "every rank gathers them (all_gather), the ranks exchange heads for positions (a2a), or those of a group do, "
        "and the groups form a ring (a2a+p2p)",
        choices=CP_COMM_TYPES,
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, "with --cp-comm-type a2a+p2p: ranks of a group, and number of groups", low=1, nargs="+"
    )
    expert_model_parallel_size: int = flag(
        1, "expert-parallel size: number of groups of ranks that share the experts of a layer", low=1
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "number of ranks that share each expert (default: --tensor-model-parallel-size); both sizes fold into the "
        "data- and tensor-parallel ranks of a stage",
        low=1,
    )
    scatter_gather_tensors_in_pipeline: bool = flag(
        True,
        "every tensor-parallel rank sends the whole activation to the next stage, instead of 1/tp of it followed by an "
        "all-gather",
    )
    use_distributed_optimizer: bool = flag(
        False, "shard master weights and optimizer state over the data-parallel ranks (ZeRO-1)"
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "what data-parallel ranks shard: master weights and optimizer state (optim, as --use-distributed-optimizer), "
        "also gradients (optim_grads), also parameters (optim_grads_params); ZeRO 1 to 3",
        choices=SHARDING_STRATEGIES,
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "with --use-distributed-optimizer: divide the data-parallel ranks into this many groups of neighbors; each "
        "shards among its own ranks only, and holds what the other groups hold",
        low=1,
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients over data-parallel ranks during backward")
    overlap_param_gather: bool = flag(
        False,
        "with --use-distributed-optimizer: all-gather updated parameters during forward; with optim_grads_params: "
        "each layer's while the one before computes",
    )
    grad_reduce_in_bf16: bool = flag(
        False, "reduce gradients over data-parallel ranks in bf16 (default: fp32)"
    )
    ddp_bucket_size: int = flag(
        40_000_000, "gradient elements per bucket; a bucket is reduced in one collective", low=1
    )
    recompute_granularity: str | None = flag(
        None,
        "recompute activations in backward to save memory: only attention (selective) or whole layers (full)",
        choices=("selective", "full"),
    )
    recompute_method: str | None = flag(
        None,
        "with --recompute-granularity full: save the input of each group of layers (uniform), or recompute only the "
        "first layers of each stage (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "layers per group (uniform), or layers recomputed per stage or chunk (block) (default: 1)",
        low=1,
        aliases=("--checkpoint-num-layers",),
    )
    distribute_saved_activations: bool = flag(
        False,
        "with --recompute-granularity full: split the saved inputs over the tensor-parallel ranks",
        aliases=("--distribute-checkpointed-activations",),
    )
    distributed_backend: str | None = flag(
        None, "communication library (default: nccl on GPUs, gloo on CPUs)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes that a rank waits in a collective before it aborts", low=1, high=10**6
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve_recompute()
        self._resolve_pipeline()
        if self.tensor_model_parallel_size == 1:
            object.__setattr__(self, "sequence_parallel", False)  # nothing to split, as in Megatron-LM
        self._check_context()
        self._resolve_sharding()
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise InputError("--overlap-param-gather needs --use-distributed-optimizer")

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_size(self) -> int:
        """Number of ranks that divide the experts of a layer."""
        return self.expert_model_parallel_size * self.expert_tp

    @property
    def layer_split(self) -> str:
        """Name of the way in which layers are divided among pipeline stages."""
        if self.pipeline_model_parallel_layout is not None:
            return "layout"
        if self.num_layers_per_virtual_pipeline_stage is not None:
            return "virtual"
        uneven = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        if uneven != (None, None):
            return "uneven"
        counted = self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        return "counted" if counted else "even"

    @property
    def layout_parts(self) -> list[str]:
        """Parts of --pipeline-model-parallel-layout without its shorthands: "E(tt|)*2L" is Ett, tt and L."""
        text = re.sub(r"[,\s]", "", self.pipeline_model_parallel_layout or "")
        for repeated in (r"\(([^()]*)\)\*(\d{1,3})", r"([^()*])\*(\d{1,3})"):
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
        return text.split("|")

    @property
    def v_shaped(self) -> bool:
        """True if the second of two chunks per stage comes back from the last stage to the first."""
        chunked = self.layer_split == "virtual" or len(self.layout_parts) > self.pipeline_model_parallel_size
        return chunked and self.pipeline_schedule in V_SHAPED

    def _resolve_sharding(self) -> None:
        strategy = self.data_parallel_sharding_strategy
        if strategy == "no_shard" and self.use_distributed_optimizer:
            strategy = "optim"
        object.__setattr__(self, "data_parallel_sharding_strategy", strategy)
        object.__setattr__(self, "use_distributed_optimizer", strategy != "no_shard")
        if strategy in SHARDING_STRATEGIES[2:] and self.pipeline_schedule in SPLIT:
            raise InputError(
                f"--data-parallel-sharding-strategy: {strategy} reduces gradients of a layer when its backward ends, "
                f"and --pipeline-schedule {self.pipeline_schedule} computes them later; use optim, or another schedule"
            )
        if self.num_distributed_optimizer_instances > 1 and strategy == "no_shard":
            raise InputError("--num-distributed-optimizer-instances needs --use-distributed-optimizer")

    def _resolve_recompute(self) -> None:
        full = self.recompute_granularity == "full"
        for name, value in (
            ("--recompute-method", self.recompute_method),
            ("--recompute-num-layers", self.recompute_num_layers),
            ("--distribute-saved-activations", self.distribute_saved_activations or None),
        ):
            if value is not None and not full:
                raise InputError(f"{name} needs --recompute-granularity full")
        if full:
            object.__setattr__(self, "recompute_method", self.recompute_method or "uniform")
            object.__setattr__(self, "recompute_num_layers", self.recompute_num_layers or 1)
        if self.distribute_saved_activations:
            if self.tensor_model_parallel_size == 1:
                raise InputError("--distribute-saved-activations needs --tensor-model-parallel-size above 1")
            if self.sequence_parallel:
                raise InputError(
                    "--distribute-saved-activations has no effect with --sequence-parallel; leave it out"
                )

    @property
    def context_grid(self) -> tuple[int, int]:
        """Ranks that exchange heads for positions, and those between which keys and values move."""
        cp = self.context_parallel_size
        if self.hierarchical_context_parallel_sizes is not None:
            heads, ring = self.hierarchical_context_parallel_sizes
            return heads, ring
        return (cp, 1) if self.cp_comm_type == "a2a" else (1, cp)

    def _check_context(self) -> None:
        sizes, cp = self.hierarchical_context_parallel_sizes, self.context_parallel_size
        if (sizes is not None) != (self.cp_comm_type == "a2a+p2p"):
            pair = f"2 {cp // 2}, the groups that exchange heads and the ring" if cp % 2 == 0 else f"1 {cp}"
            raise InputError(
                "--cp-comm-type: a2a+p2p needs --context-parallel-size above 1; leave it out"
                if cp == 1 and sizes is None
                else f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, such as {pair}"
                if sizes is None
                else "--hierarchical-context-parallel-sizes needs --cp-comm-type a2a+p2p; add it or drop the sizes"
            )
        if sizes is not None and (len(sizes) != 2 or sizes[0] * sizes[1] != cp):
            raise InputError(
                f"--hierarchical-context-parallel-sizes: {' '.join(map(str, sizes))} must be two sizes whose product "
                f"is --context-parallel-size {cp}"
            )

    def _resolve_pipeline(self) -> None:
        stages, parts = self.pipeline_model_parallel_size, len(self.layout_parts)
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        chosen = self.pipeline_model_parallel_layout == "auto" and self.pipeline_schedule in CHUNKED
        chunked = per_chunk is not None or parts > stages or chosen
        schedule = self.pipeline_schedule or ("interleaved" if chunked else "1f1b")
        if (schedule in CHUNKED) != chunked and schedule not in V_SHAPED - CHUNKED:  # these go with both
            raise InputError(
                f"--pipeline-schedule: {schedule} "
                + (
                    "needs --num-layers-per-virtual-pipeline-stage, such as half of the layers of a stage"
                    if not chunked
                    else f"does not go with --num-layers-per-virtual-pipeline-stage {per_chunk}"
                    if per_chunk is not None
                    else f"does not go with {parts} parts of --pipeline-model-parallel-layout on {stages} stages"
                )
            )
        object.__setattr__(self, "pipeline_schedule", schedule)
