"""What is planned: a model and its batch, a layout of processes for it, and the program that runs it."""

from __future__ import annotations

import dataclasses
import math

from megatron.model.config import ModelConfig
from megatron.model.flops import flops_per_sample
from megatron.planner.cluster import Cluster, Group

Moves = tuple[float, float]


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

    def residual_element(self, element: int) -> int:
        """Bytes of an element of the residual stream, where one of other activations has `element`."""
        return 4 if self.model.fp32_residual_connection else element

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

    Moves say how often an element passes between memory and processor in forward and in backward, beside the matrix
    products: an operation that reads two tensors and writes one moves 3.

    Attributes:
        fused_attention: scores never reach memory (FlashAttention).
        scores: otherwise, moves of an attention score.
        stream: of an element of the residual stream: normalisations, dropouts, additions.
        heads: of an element of the attention's heads: biases, changes of order.
        middle: of an element of the MLP's middle: bias and activation.
        kept_logits: bytes of logits that are kept for backward; where there are more, backward computes them again.
        gradient: bytes of a gradient, as it is accumulated and reduced.
        waits: a stage computes nothing while it sends or receives.
    """

    fused_attention: bool
    scores: Moves
    stream: Moves
    heads: Moves
    middle: Moves
    kept_logits: float
    gradient: int
    waits: bool


# Forward; backward, in moves. Backward of a bias reads the gradient (1), and of splitting queries, keys and values
# writes them as one (2 each).
#
# Stream, twice: normalisation (2; 3), bias, dropout and addition in one (3; 2 and 1 for the bias), the branch's
# gradient added (3). Heads: order of the result (2; 2), splitting (6), bias (3). Middle: GELU with bias (2; 3 and
# 1).
OURS = Program(
    fused_attention=True,
    scores=(0, 0),
    stream=(10, 18),
    heads=(2, 11),
    middle=(2, 4),
    kept_logits=1 << 27,  # as in ops/projected_loss.py
    gradient=4,
    waits=False,
)
# 2104.04473 section 4.2. Scores: scale, mask and softmax in one (2; 3), dropout with its mask of half an element
# (2.5; 2.5). Stream and middle as ours, with a mask of dropout (0.5; 0.5). Heads: bias (6; 3), order of the result
# (2; 2), splitting (6). Gradients are fp16; transfers are waited for.
NVIDIA_2021 = Program(
    fused_attention=False,
    scores=(4.5, 5.5),
    stream=(11, 19),
    heads=(8, 11),
    middle=(2, 4),
    kept_logits=math.inf,
    gradient=2,
    waits=True,
)
# The program of 1909.08053, before those fusions. Scores: scale (2; 2), mask by a product and a difference (4; 2),
# softmax (2; 3), dropout (2.5; 2.5). Stream, twice: normalisation (2; 3), bias (2; 1), dropout (2.5; 2.5), addition
# (3; 3). Heads: bias (6; 3), order of queries, keys, values and result (8; 2), splitting (6). Middle: bias (2; 1),
# GELU (2; 3).
NVIDIA_2019 = Program(
    fused_attention=False,
    scores=(10.5, 9.5),
    stream=(19, 19),
    heads=(14, 11),
    middle=(4, 4),
    kept_logits=math.inf,
    gradient=2,
    waits=True,
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
