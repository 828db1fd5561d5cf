"""What is planned: a model and its batch, a layout of processes for it, and the program that runs it."""

from __future__ import annotations

import dataclasses

from megatron.model.config import ModelConfig
from megatron.model.flops import flops_per_sample
from megatron.planner.cluster import Cluster, Group


@dataclasses.dataclass(frozen=True)
class Job:
    """A GPT and the global batch that it is trained with; `vocab_size` before padding."""

    model: ModelConfig
    seq_length: int
    vocab_size: int
    global_batch_size: int

    def padded_vocab_size(self, tensor: int) -> int:
        """As with --make-vocab-size-divisible-by 128."""
        unit = 128 * tensor
        return -(-self.vocab_size // unit) * unit

    def flops(self, *, recompute: str = "none") -> float:
        """Of a step, as 2104.04473 section 5.1 counts them; with "full" the forward pass of the layers twice."""
        sizes = {"seq_length": self.seq_length, "padded_vocab_size": self.vocab_size}
        model = flops_per_sample(self.model, vocab_positions=self.seq_length, **sizes)
        if recompute == "full":
            model += flops_per_sample(self.model, vocab_positions=0, **sizes) / 3
        return self.global_batch_size * model


@dataclasses.dataclass(frozen=True)
class Program:
    """How a program computes, as far as its time and memory depend on it.

    Attributes:
        fused_attention: scores never reach memory (FlashAttention).
        score_moves: otherwise, how often every score passes between memory and processor in forward, beside the two
            products: in units of one element.
        stream_moves: the same of the elements of the residual stream: normalisations, dropouts and additions.
        mlp_moves: the same of the elements of the MLP's middle.
        gradient: bytes of a gradient, as it is accumulated and reduced.
        waits: a stage computes nothing while it sends or receives.
    """

    fused_attention: bool
    score_moves: float
    stream_moves: float
    mlp_moves: float
    gradient: int
    waits: bool


# Two normalisations (2 each), two additions with dropout (3.5 each, the mask being half an element); GELU with its bias (2).
OURS = Program(fused_attention=True, score_moves=0, stream_moves=11, mlp_moves=2, gradient=4, waits=False)
# 2104.04473 section 4.2: scale, mask and softmax in one kernel (2), then dropout (2.5). Transfers are waited for.
NVIDIA_2021 = Program(
    fused_attention=False, score_moves=4.5, stream_moves=11, mlp_moves=2, gradient=2, waits=True
)
# 1909.08053, before those fusions: scale (2), mask by product and sum (4), softmax (2), dropout (2.5); dropout (2.5), bias
# and addition (2 + 3) twice, normalisations; bias (2) and GELU by eight operations of one or two inputs (18).
NVIDIA_2019 = Program(
    fused_attention=False, score_moves=10.5, stream_moves=19, mlp_moves=20, gradient=2, waits=True
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How processes share a job. Flags of the same names say what each means (docs/parallelism.md).

    Attributes:
        tensor, pipeline, data: processes on each axis.
        chunks: of layers that each stage holds, 1 but for the interleaved schedule.
        recompute: "none", "selective" (attention alone) or "full" (whole layers, each by itself).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
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
    def schedule(self) -> str:
        return "interleaved" if self.chunks > 1 else "1f1b"

    def microbatches(self, job: Job) -> int:
        """Of a replica, in a step."""
        return job.global_batch_size // (self.data * self.micro_batch_size)

    def layers_per_chunk(self, job: Job) -> int:
        return job.model.num_layers // (self.pipeline * self.chunks)

    def tensor_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.tensor, 1)

    def data_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.data, self.tensor)

    def flags(self, job: Job) -> list[str]:
        """Those of pretrain_gpt.py that stand for this layout."""
        words = [f"--tensor-model-parallel-size {self.tensor}"] if self.tensor > 1 else []
        if self.sequence_parallel:
            words.append("--sequence-parallel")
        if self.pipeline > 1:
            words.append(f"--pipeline-model-parallel-size {self.pipeline}")
        if self.chunks > 1:
            words.append(f"--num-layers-per-virtual-pipeline-stage {self.layers_per_chunk(job)}")
        if self.distributed_optimizer:
            words.append("--use-distributed-optimizer")
        if self.overlap_grad_reduce:
            words.append("--overlap-grad-reduce")
        if self.recompute != "none":
            words.append(f"--recompute-granularity {self.recompute}")
        words += [
            f"--micro-batch-size {self.micro_batch_size}",
            f"--global-batch-size {job.global_batch_size}",
        ]
        return words

    def __str__(self) -> str:
        parts = [f"T{self.tensor} P{self.pipeline} D{self.data}"]
        if self.chunks > 1:
            parts.append(f"V{self.chunks}")
        parts.append(f"microbatch {self.micro_batch_size}")
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += ["distributed optimizer"] * self.distributed_optimizer
        parts += [f"{self.recompute} recomputation"] * (self.recompute != "none")
        return ", ".join(parts)
