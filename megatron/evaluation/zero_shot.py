"""Run the samples of a zero-shot task through a model in any layout.

Shapes in names: b samples, s sequence, n scored tokens, v vocabulary. With tensor parallelism v is this rank's shard of
the vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch, sequence_field
from megatron.data.samplers import sequential
from megatron.data.zigzag import Zigzag
from megatron.evaluation.tasks import Sample, ZeroShotTask
from megatron.inference.stages import Stages
from megatron.parallel.collectives import all_gather, all_reduce_sum
from megatron.parallel.mesh import Axis

T = TypeVar("T")

MAX_RANGES = 8  # of contexts, in `by_context`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotBatch(Batch):
    """Batch of a zero-shot task.

    Attributes:
        tokens, position_ids, labels: int64 [b, s].
        rows, positions: int64 [n], the coordinates of the scored tokens in `labels`.
        contexts: int64 [n], their positions in the whole sequence, of which a rank of context parallelism has a part.
        scored: int64 [b], number of scored tokens of each sample; 0 on all but one of the ranks that divide a sequence.
    """

    position_ids: Tensor = sequence_field(dim=1)
    labels: Tensor = sequence_field(dim=1)
    rows: Tensor
    positions: Tensor
    contexts: Tensor
    scored: Tensor

    def divide(self, rank: int, size: int) -> ZeroShotBatch:
        """Return a rank's positions of every sequence, and the scored tokens at these."""
        place = torch.full((self.seq_length,), -1)
        local = torch.arange(self.seq_length // size)
        place[Zigzag(self.seq_length, size).positions(rank, local)] = local
        positions = place[self.positions]
        here = positions >= 0
        return dataclasses.replace(
            super().divide(rank, size),
            rows=self.rows[here],
            positions=positions[here],
            contexts=self.contexts[here],
            scored=self.scored if rank == 0 else torch.zeros_like(self.scored),
        )


def make_batches(
    task: ZeroShotTask, *, micro_batch_size: int, dp: Axis, multiple: int = 1
) -> Iterator[ZeroShotBatch]:
    """Yield this replica's batches, as many as the others have; over all replicas each sample is scored once.

    A batch in which nothing is scored lets replicas that share experts compute together.

    Args:
        multiple: sequence lengths are rounded up to a multiple of it, up to the context length.
    """
    for indices in sequential(
        range(len(task.samples)),
        micro_batch_size=micro_batch_size,
        dp_rank=dp.rank,
        dp_size=dp.size,
        drop_last=False,
    ):
        samples = task.samples[indices.start : indices.stop]
        yield _stack(samples or [task.samples[0]._replace(scored=0)], multiple, task.length)


def _stack(samples: Sequence[Sample], multiple: int, longest: int) -> ZeroShotBatch:
    lengths = [len(sample.tokens) - 1 for sample in samples]
    length = min(-(-max(lengths) // multiple) * multiple, longest)
    # Attention is causal, so the padding does not matter.
    tokens_bs = np.zeros((len(samples), length + 1), np.int64)
    for row, sample in enumerate(samples):
        tokens_bs[row, : len(sample.tokens)] = sample.tokens
    scored = torch.tensor([sample.scored for sample in samples])
    ends = zip(lengths, samples, strict=True)
    positions = torch.from_numpy(np.concatenate([np.arange(end - s.scored, end) for end, s in ends]))
    return ZeroShotBatch(
        tokens=torch.from_numpy(tokens_bs[:, :-1]),
        position_ids=torch.arange(length).expand(len(samples), length),
        labels=torch.from_numpy(tokens_bs[:, 1:]),
        rows=torch.arange(len(samples)).repeat_interleave(scored),
        positions=positions,
        contexts=positions,
        scored=scored,
    )


def forward(model: Callable[..., T], batch: ZeroShotBatch, task: ZeroShotTask) -> T:
    """Call `model`, with the signature of `GPTModel`, on a batch; the last stage returns the `out` of `total`."""
    if task.greedy:
        return model(batch.tokens, batch.position_ids, logit_positions=(batch.rows, batch.positions))
    return model(batch.tokens, batch.position_ids, labels_bs=batch.labels)


def total(
    out: Tensor, batch: ZeroShotBatch, task: ZeroShotTask, *, vocab_size: int, tp: Axis, cp: Axis
) -> Tensor:
    """Sum this rank's share of a batch to an fp64 scalar.

    The sum is over the losses `out` [b, s] of scored tokens, or counts the samples for which all scored tokens are the
    most probable ones by their logits `out` [n, v].
    """
    if not task.greedy:
        return out[batch.rows, batch.positions].double().sum()
    # Transposed, because ranks hold shards of the vocabulary. Its padding is never a candidate.
    logits_vn = all_gather(out.t().contiguous(), tp)[:vocab_size]
    wrong_n = logits_vn.argmax(0) != batch.labels[batch.rows, batch.positions]
    zeros_b = torch.zeros(batch.num_sequences, dtype=torch.float64, device=out.device)
    right_b = all_reduce_sum(zeros_b.index_add(0, batch.rows, wrong_n.double()), cp) == 0
    return (right_b & (batch.scored > 0)).double().sum()


def count(batch: ZeroShotBatch, task: ZeroShotTask) -> Tensor:
    """Return a batch's share of `task.count`, int64 []."""
    return ((batch.scored > 0) if task.greedy else batch.scored).sum()


@dataclasses.dataclass(frozen=True)
class ContextRange:
    """Mean loss (nats) of the `tokens` scored tokens that have `first` to `last` tokens of context in their window."""

    first: int
    last: int
    tokens: int
    loss: float


def by_context(sums: Tensor) -> list[ContextRange]:
    """Means over ranges of contexts, each twice as long as the one before it, up to all `length` tokens.

    Args:
        sums: [2, length], as `evaluate` fills them.
    """
    length = sums.shape[1]
    bounds = [0, *sorted({length >> i for i in range(MAX_RANGES) if length >> i})]
    ranges = []
    for begin, end in itertools.pairwise(bounds):
        loss, tokens = sums[:, begin:end].sum(1).tolist()
        if tokens:
            ranges.append(ContextRange(begin + 1, end, int(tokens), loss / tokens))
    return ranges


@torch.inference_mode()
def evaluate(
    stages: Stages,
    task: ZeroShotTask,
    *,
    micro_batch_size: int,
    advance: Callable[[], object],
    by_position: Tensor | None = None,
) -> float:
    """Return the sum over all samples that `task.results` takes. Collective over all processes.

    Args:
        advance: called after each batch of this replica; the first replica has the most batches.
        by_position: fp64 [2, task.length] of zeros, to receive the sum of the losses (nats) at each position of a
            window, and the number of tokens scored there. Only of tasks that sum losses.
    """
    mesh, cp = stages.mesh, stages.mesh.cp
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    multiple = 2 * cp.size if cp.size > 1 else 1
    for whole in make_batches(task, micro_batch_size=micro_batch_size, dp=mesh.dp, multiple=multiple):
        batch = whole.divide(cp.rank, cp.size).to(mesh.device)
        out = forward(stages, batch, task)
        if out is not None:
            totals[0] += total(out, batch, task, vocab_size=stages.vocab_size, tp=mesh.tp, cp=cp)
            totals[1] += count(batch, task)
            if by_position is not None:
                losses_n = out[batch.rows, batch.positions].double()
                sums_2n = torch.stack((losses_n, torch.ones_like(losses_n)))
                by_position.index_add_(1, batch.contexts, sums_2n)
        advance()
    stages.transfers.finish()
    if by_position is not None:
        by_position.copy_(all_reduce_sum(by_position, mesh.dp_cp, mesh.pp))
    result, scored = all_reduce_sum(totals, mesh.dp_cp, mesh.pp).tolist()
    assert scored == task.count
    return result
