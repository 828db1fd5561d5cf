"""Inputs of a plan: a model and its batch, a parallel layout, and the implementation that runs it."""

from __future__ import annotations

import dataclasses
import functools

from megatron.model.config import ModelConfig
from megatron.model.flops import flops_per_sample
from megatron.parallel.schedules import Schedule, one_forward_one_backward
from megatron.planner.cluster import Cluster, Group
from megatron.tokenizer import padded_vocab_size
from megatron.variants.schedules import interleaved

# Reads and writes of an element in memory: in forward, in backward.
Accesses = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Job:
    """A GPT, its global batch, and the --fp8-format of its layers. `vocab_size` is the size before padding."""

    model: ModelConfig
    seq_length: int
    vocab_size: int
    global_batch_size: int
    fp8_format: str | None = None

    @functools.cached_property
    def has_experts(self) -> tuple[bool, ...]:
        """True for each layer whose MLP is a mixture of experts."""
        return tuple(self.model.expert_layers(self.model.num_layers))

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding table, with --make-vocab-size-divisible-by 128."""
        return padded_vocab_size(self.vocab_size, 128, tensor)

    def residual_element(self, element: int) -> int:
        """Bytes of an element of the residual stream, if other activations have `element` bytes."""
        return 4 if self.model.fp32_residual_connection else element

    def flops(self, *, recompute: str = "none") -> float:
        """FLOPs of a step by 2104.04473 section 5.1; "full" recomputation adds a second forward pass of the layers."""
        sizes = {"seq_length": self.seq_length, "padded_vocab_size": self.vocab_size}
        model = flops_per_sample(self.model, num_logits=self.seq_length, **sizes)
        if recompute == "full":
            model += flops_per_sample(self.model, num_logits=0, **sizes) / 3
        return self.global_batch_size * model


@dataclasses.dataclass(frozen=True)
class Program:
    """Properties of an implementation that its time and memory depend on.

    `scores`, `residual`, `heads` and `mlp` count reads and writes per element by element-wise operations: one that
    reads two tensors and writes one has 3.

    Attributes:
        fused_attention: scores never reach memory (FlashAttention).
        scores: accesses of an attention score, without fused attention.
        residual: accesses of an element of the residual stream: norms, dropout, additions.
        heads: accesses of an element of the attention heads: biases, transposes.
        mlp: accesses of an element of the MLP's hidden layer: bias and activation.
        chunked_logits: the loss and its gradients are computed together, by chunks of the logits.
        gradient: bytes of an element of a gradient when it is accumulated and reduced.
        blocking_transfers: a stage does not compute while it sends or receives.
    """

    fused_attention: bool
    scores: Accesses
    residual: Accesses
    heads: Accesses
    mlp: Accesses
    chunked_logits: bool
    gradient: int
    blocking_transfers: bool


# Accesses as (forward; backward). The backward of a bias reads the gradient (1); the backward of splitting queries,
# keys and values writes them as one tensor (2 each).
#
# Residual stream, twice a layer: norm (2; 3), fused bias, dropout and addition (3; 2, and 1 for the bias), addition of
# the branch's gradient (3). Heads: transpose of the result (2; 2), split (6), bias (3). MLP: GELU with bias (2; 3
# and 1).
OURS = Program(
    fused_attention=True,
    scores=(0, 0),
    residual=(10, 18),
    heads=(2, 11),
    mlp=(2, 4),
    chunked_logits=True,
    gradient=4,
    blocking_transfers=False,
)
# 2104.04473 section 4.2. Scores: fused scale, mask and softmax (2; 3), dropout with a mask of half an element
# (2.5; 2.5). Residual stream and MLP as above, with a mask of dropout (0.5; 0.5). Heads: bias (6; 3), transpose of the
# result (2; 2), split (6). Gradients are fp16; transfers block.
NVIDIA_2021 = dataclasses.replace(
    OURS,
    fused_attention=False,
    scores=(4.5, 5.5),
    residual=(11, 19),
    heads=(8, 11),
    chunked_logits=False,
    gradient=2,
    blocking_transfers=True,
)
# The implementation of 1909.08053, without those fusions. Scores: scale (2; 2), mask by a product and a difference
# (4; 2), softmax (2; 3), dropout (2.5; 2.5). Residual stream, twice: norm (2; 3), bias (2; 1), dropout (2.5; 2.5),
# addition (3; 3). Heads: bias (6; 3), transposes of queries, keys, values and result (8; 2), split (6). MLP: bias
# (2; 1), GELU (2; 3).
NVIDIA_2019 = dataclasses.replace(
    NVIDIA_2021, scores=(10.5, 9.5), residual=(19, 19), heads=(14, 11), mlp=(4, 4)
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parallel layout of a job. Flags of the same names are described in docs/parallelism.md.

    Attributes:
        tensor, pipeline, data: processes on each axis.
        expert, expert_tensor: groups of ranks that divide the experts of a stage, and ranks that share an expert.
        chunks: model chunks on each stage, above 1 only with the interleaved schedule.
        recompute: "none", "selective" (attention) or "full" (whole layers, one at a time).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    micro_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    scatter_gather: bool = True

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def schedule(self) -> Schedule:
        return interleaved if self.chunks > 1 else one_forward_one_backward

    def microbatches(self, job: Job) -> int:
        """Number of microbatches of a replica in a step."""
        return job.global_batch_size // (self.data * self.micro_batch_size)

    def distinct_stages(self, job: Job) -> tuple[int, ...]:
        """The first stage, the last, and of the others the first with each number of layers with experts.

        Others have the layers of one of these and fewer microbatches.
        """
        stages = self.layers(job)
        first = {sum(n for _, n in stages[stage]): stage for stage in reversed(range(1, self.pipeline - 1))}
        return tuple(sorted({0, self.pipeline - 1, *first.values()}))

    def layers(self, job: Job) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Dense layers and those with experts of each chunk, by stage; the last has those of multi-token prediction."""
        sizes = tuple(self.layers_per_chunk(job, stage) for stage in (0, None, self.pipeline - 1))
        *stages, last = _split(job.has_experts, sizes, self.pipeline, self.chunks)
        *chunks, (dense, experts) = last
        depths = job.model.mtp_num_layers
        added = (dense, experts + depths) if job.model.all_expert_layers[-1] else (dense + depths, experts)
        return *stages, (*chunks, added)

    def layers_per_chunk(self, job: Job, stage: int | None = None) -> int:
        """Layers of each chunk of a stage, or of the longest one.

        Where the stages do not divide the layers, the last stage has fewer, and then the first: they also have the
        output layer and the embedding.
        """
        longest = -(-job.model.num_layers // (self.pipeline * self.chunks))
        missing = self.pipeline * self.chunks * longest - job.model.num_layers
        if stage == self.pipeline - 1:
            return longest - (missing + 1) // 2
        return longest - missing // 2 if stage == 0 else longest

    def splits_layers(self, job: Job) -> bool:
        """Return True if every stage has layers, and with several chunks an equal number of them."""
        if self.chunks > 1:
            return job.model.num_layers % (self.pipeline * self.chunks) == 0
        return self.layers_per_chunk(job, self.pipeline - 1) > 0

    def tensor_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.tensor, 1)

    def data_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.data, self.tensor)

    @property
    def expert_data(self) -> int:
        """Processes that hold the same part of the experts."""
        return self.data * self.tensor // (self.expert * self.expert_tensor)

    def expert_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert * self.expert_tensor, 1)

    def expert_data_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert_data, self.expert * self.expert_tensor)

    def flags(self, job: Job) -> list[str]:
        """Flags of pretrain_gpt.py for this layout."""
        flags = [f"--tensor-model-parallel-size {self.tensor}"] if self.tensor > 1 else []
        if self.sequence_parallel:
            flags.append("--sequence-parallel")
        if self.pipeline > 1:
            flags.append(f"--pipeline-model-parallel-size {self.pipeline}")
        longest = self.layers_per_chunk(job)
        for name, stage in (("first", 0), ("last", self.pipeline - 1)):
            if (layers := self.layers_per_chunk(job, stage)) < longest:
                flags.append(f"--decoder-{name}-pipeline-num-layers {layers}")
        if self.chunks > 1:
            flags.append(f"--num-layers-per-virtual-pipeline-stage {self.layers_per_chunk(job)}")
        if job.model.num_experts is not None:
            flags.append(f"--expert-model-parallel-size {self.expert}")
            flags.append(f"--expert-tensor-parallel-size {self.expert_tensor}")
        if self.distributed_optimizer:
            flags.append("--use-distributed-optimizer")
        if self.overlap_grad_reduce:
            flags.append("--overlap-grad-reduce")
        if self.recompute != "none":
            flags.append(f"--recompute-granularity {self.recompute}")
        flags += [
            f"--micro-batch-size {self.micro_batch_size}",
            f"--global-batch-size {job.global_batch_size}",
        ]
        return flags

    def __str__(self) -> str:
        parts = [f"T{self.tensor} P{self.pipeline} D{self.data}"]
        if self.expert * self.expert_tensor > 1:
            parts[0] += f" E{self.expert}" + f"T{self.expert_tensor}" * (self.expert_tensor > 1)
        if self.chunks > 1:
            parts.append(f"V{self.chunks}")
        parts.append(f"microbatch {self.micro_batch_size}")
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += ["distributed optimizer"] * self.distributed_optimizer
        parts += [f"{self.recompute} recomputation"] * (self.recompute != "none")
        return ", ".join(parts)


@functools.lru_cache(maxsize=4096)
def _split(
    has_experts: tuple[bool, ...], sizes: tuple[int, ...], stages: int, chunks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`Layout.layers`. `sizes` are the layers in a chunk of the first stage, of those in the middle and of the last."""
    first, middle, last = sizes
    each = [first, *[middle] * (stages - 2), last][:stages]
    found: list[list[tuple[int, int]]] = [[] for _ in each]
    begin = 0
    for _ in range(chunks):
        for stage, size in zip(found, each, strict=True):
            experts = sum(has_experts[begin : begin + size])
            stage.append((size - experts, experts))
            begin += size
    return tuple(map(tuple, found))
