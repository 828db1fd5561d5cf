"""Inputs of a plan: a model and its batch, and a parallel layout."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex

from megatron.model.config import ModelConfig
from megatron.model.flops import flops_per_sample
from megatron.parallel.schedules import Schedule, one_forward_one_backward
from megatron.planner.cluster import Cluster, Group
from megatron.tokenizer import padded_vocab_size
from megatron.variants.auto_stages import stage_sizes
from megatron.variants.schedules import interleaved


@dataclasses.dataclass(frozen=True)
class Job:
    """A GPT, its global batch, and the --fp8-format of its layers. `vocab_size` is the size before padding."""

    model: ModelConfig
    seq_length: int
    vocab_size: int
    global_batch_size: int
    fp8_format: str | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Hash, kept since jobs are keys of caches: a model's config has a hundred fields."""
        return hash((self.model, self.seq_length, self.vocab_size, self.global_batch_size, self.fp8_format))

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
class Layout:
    """The parallel layout of a job. Flags of the same names are described in docs/parallelism.md.

    Attributes:
        tensor, context, pipeline, data: processes on each axis.
        expert, expert_tensor: groups of ranks that divide the experts of a stage, and ranks that share an expert.
        chunks: model chunks on each stage, above 1 only with the interleaved schedule.
        balanced: stages of equal work (--pipeline-model-parallel-layout auto), not of equal numbers of layers; with one
            chunk.
        recompute: "none", "selective" (attention) or "full" (whole layers, one at a time).
        sharded_parameters: ranks hold a part of the parameters and gradients, too, and gather a layer when they need it
            (FSDP, ZeRO-3).
        instances: groups of replicas that each hold the whole optimizer state, and with `sharded_parameters` all
            parameters (hybrid sharding).
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    balanced: bool = False
    micro_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    scatter_gather: bool = True
    sharded_parameters: bool = False
    instances: int = 1

    @property
    def processes(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Processes that hold, or with sharding divide, the same parameters: the data and the context axis."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Processes that divide the optimizer state of the same parameters."""
        return self.replicas // self.instances

    @property
    def schedule(self) -> Schedule:
        return interleaved if self.chunks > 1 else one_forward_one_backward

    def microbatches(self, job: Job) -> int:
        """Number of microbatches of a replica in a step."""
        return job.global_batch_size // (self.data * self.micro_batch_size)

    def tokens(self, job: Job) -> float:
        """Tokens of a microbatch on a process of a context-parallel group."""
        return self.micro_batch_size * job.seq_length / self.context

    def distinct_stages(self, job: Job) -> tuple[int, ...]:
        """The first stage, the last, and of the others the first with each number of layers with experts.

        Others have the layers of one of these and fewer microbatches.
        """
        if self.balanced:
            return tuple(range(self.pipeline))
        return _distinct_stages(job, self.pipeline, self.chunks)

    def layers(self, job: Job) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Dense layers and those with experts of each chunk, by stage; the last has those of multi-token prediction."""
        if self.balanced:
            return _balanced(job, self.tensor, self.pipeline, self.recompute == "full")
        return _stage_layers(job, self.pipeline, self.chunks)

    def layers_per_chunk(self, job: Job, stage: int | None = None) -> int:
        """Layers of the first chunk of the first stage, of the last chunk of the last one, or of all others.

        Where the chunks do not divide the layers, the last chunk has fewer, and then the first: they also have the
        output layer and the embedding.
        """
        longest = -(-job.model.num_layers // (self.pipeline * self.chunks))
        missing = self.pipeline * self.chunks * longest - job.model.num_layers
        if stage == self.pipeline - 1:
            return longest - (missing + 1) // 2
        return longest - missing // 2 if stage == 0 else longest

    def splits_layers(self, job: Job) -> bool:
        """Return True if every stage has layers, and with several chunks all chunks equally many.

        Of several chunks the first and the last may have one less, which leaves the embedding or the output layer alone
        (2407.21783 section 3.3.2). Layers of multi-token prediction are not divided so.
        """
        if self.chunks > 1:
            missing = -job.model.num_layers % (self.pipeline * self.chunks)
            return missing == 0 or (missing <= 2 and job.model.mtp_num_layers == 0)
        return self.layers_per_chunk(job, self.pipeline - 1) > 0

    def tensor_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.tensor, 1)

    def context_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.context, self.tensor)

    def data_group(self, cluster: Cluster) -> Group:
        """Processes that reduce the gradients of the same parameters, except those of experts."""
        return cluster.group(self.replicas, self.tensor)

    def pipeline_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.pipeline, self.replicas * self.tensor)

    @property
    def expert_data(self) -> int:
        """Processes that hold the same part of the experts."""
        return self.replicas * self.tensor // (self.expert * self.expert_tensor)

    def expert_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert * self.expert_tensor, 1)

    def expert_data_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert_data, self.expert * self.expert_tensor)

    def flags(self, job: Job) -> list[str]:
        """Flags of pretrain_gpt.py for this layout."""
        flags = [f"--tensor-model-parallel-size {self.tensor}"] if self.tensor > 1 else []
        if self.sequence_parallel:
            flags.append("--sequence-parallel")
        if self.context > 1:
            flags.append(f"--context-parallel-size {self.context}")
        if self.pipeline > 1:
            flags.append(f"--pipeline-model-parallel-size {self.pipeline}")
        flags += self._layer_flags(job)
        if job.model.num_experts is not None:
            flags.append(f"--expert-model-parallel-size {self.expert}")
            flags.append(f"--expert-tensor-parallel-size {self.expert_tensor}")
        if self.sharded_parameters:
            flags.append("--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather")
        elif self.distributed_optimizer:
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

    def _layer_flags(self, job: Job) -> list[str]:
        """Flags that divide the layers among stages and chunks."""
        if self.balanced:
            return ["--pipeline-model-parallel-layout auto"]
        first, longest, last = (self.layers_per_chunk(job, stage) for stage in (0, None, self.pipeline - 1))
        if self.chunks == 1:
            ends = {"first": first, "last": last}
            return [
                f"--decoder-{name}-pipeline-num-layers {layers}"
                for name, layers in ends.items()
                if layers < longest
            ]
        if first == last == longest:
            return [f"--num-layers-per-virtual-pipeline-stage {longest}"]
        middle = f"({'t' * longest}|)*{self.pipeline * self.chunks - 2}"
        layout = f"E{'t' * first}|{middle}{'t' * last}L"
        return [f"--pipeline-model-parallel-layout {shlex.quote(layout)}"]

    def __str__(self) -> str:
        parts = [
            f"T{self.tensor}" + f" C{self.context}" * (self.context > 1) + f" P{self.pipeline} D{self.data}"
        ]
        if self.expert * self.expert_tensor > 1:
            parts[0] += f" E{self.expert}" + f"T{self.expert_tensor}" * (self.expert_tensor > 1)
        if self.chunks > 1:
            parts.append(f"V{self.chunks}")
        parts += ["stages of equal work"] * self.balanced
        parts.append(f"microbatch {self.micro_batch_size}")
        parts += ["sequence parallel"] * self.sequence_parallel
        if self.sharded_parameters:
            parts.append("sharded parameters")
        else:
            parts += ["distributed optimizer"] * self.distributed_optimizer
        parts += [f"{self.recompute} recomputation"] * (self.recompute != "none")
        return ", ".join(parts)


@functools.lru_cache(maxsize=4096)
def _balanced(job: Job, tensor: int, stages: int, recompute: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`Layout.layers` of stages of equal work."""
    model, vocab_size = job.model, job.padded_vocab_size(tensor)
    sizes = stage_sizes(model, job.seq_length, vocab_size, stages, 1, recompute=recompute)
    ends = list(itertools.accumulate(sizes, initial=0))
    has_experts = [list(job.has_experts[begin:end]) for begin, end in itertools.pairwise(ends)]
    has_experts[-1] += [model.all_expert_layers[-1]] * model.mtp_num_layers
    return tuple(((len(here) - sum(here), sum(here)),) for here in has_experts)


@functools.lru_cache(maxsize=4096)
def _stage_layers(job: Job, stages: int, chunks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`Layout.layers`."""
    layout = Layout(pipeline=stages, chunks=chunks)
    sizes = tuple(layout.layers_per_chunk(job, stage) for stage in (0, None, stages - 1))
    *others, last = _split(job.has_experts, sizes, stages, chunks)
    *before, (dense, experts) = last
    depths = job.model.mtp_num_layers
    added = (dense, experts + depths) if job.model.all_expert_layers[-1] else (dense + depths, experts)
    return *others, (*before, added)


@functools.lru_cache(maxsize=4096)
def _distinct_stages(job: Job, stages: int, chunks: int) -> tuple[int, ...]:
    """`Layout.distinct_stages`."""
    layers = _stage_layers(job, stages, chunks)
    first = {sum(n for _, n in layers[stage]): stage for stage in reversed(range(1, stages - 1))}
    return tuple(sorted({0, stages - 1, *first.values()}))


def _split(
    has_experts: tuple[bool, ...], sizes: tuple[int, ...], stages: int, chunks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Dense layers and those with experts by stage and chunk, for sizes of the first, other and last chunks."""
    first, middle, last = sizes
    found: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    begin = 0
    for chunk in range(chunks):
        for number, stage in enumerate(found):
            size = middle
            if chunk == number == 0:
                size = first
            if chunk == chunks - 1 and number == stages - 1:
                size = last
            experts = sum(has_experts[begin : begin + size])
            stage.append((size - experts, experts))
            begin += size
    return tuple(map(tuple, found))
