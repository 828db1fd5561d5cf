"""The samples of a zero-shot task, through a model of any layout.

Shapes in names: b samples, s sequence, n scored tokens, v vocabulary. With tensor parallelism the v of `logits_nv`
counts this process's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.data.loader import Batch
from megatron.data.samplers import sequential
from megatron.evaluation.tasks import Sample, ZeroShotTask
from megatron.inference.stages import Stages
from megatron.parallel.collectives import all_gather, all_reduce_sum
from megatron.parallel.mesh import Axis


def make_batches(
    task: ZeroShotTask, *, micro_batch_size: int, dp: Axis, multiple: int = 1
) -> Iterator[Batch]:
    """This replica's share of the samples; all replicas together have each sample once.

    Args:
        multiple: what the length of sequences is rounded up to, unless the model sees less.

    Yields:
        `tokens`, `position_ids` and `labels` [b, s]; the scored tokens are labels of `rows` [n] and `positions` [n].
    """
    for indices in sequential(
        range(len(task.samples)),
        micro_batch_size=micro_batch_size,
        dp_rank=dp.rank,
        dp_size=dp.size,
        drop_last=False,
    ):
        if indices:
            yield _stack(task.samples[indices.start : indices.stop], multiple, task.length)


def _stack(samples: Sequence[Sample], multiple: int, longest: int) -> Batch:
    lengths = [len(sample.tokens) - 1 for sample in samples]
    length = min(-(-max(lengths) // multiple) * multiple, longest)
    # No token sees those after it, so that any will do to fill the rows.
    tokens_bs = np.zeros((len(samples), length + 1), np.int64)
    for row, sample in enumerate(samples):
        tokens_bs[row, : len(sample.tokens)] = sample.tokens
    rows = np.repeat(np.arange(len(samples)), [sample.scored for sample in samples])
    positions = [np.arange(n - s.scored, n) for n, s in zip(lengths, samples, strict=True)]
    return {
        "tokens": torch.from_numpy(tokens_bs[:, :-1]),
        "position_ids": torch.arange(length).expand(len(samples), length),
        "labels": torch.from_numpy(tokens_bs[:, 1:]),
        "rows": torch.from_numpy(rows),
        "positions": torch.from_numpy(np.concatenate(positions)),
    }


def forward(model: Callable[..., Tensor | None], batch: Batch, task: ZeroShotTask) -> Tensor | None:
    """What `model`, called as `GPTModel`, gives for a batch: where the layers end, the `out` of `total`."""
    tokens_bs, position_ids_bs = batch["tokens"], batch["position_ids"]
    if task.greedy:
        return model(tokens_bs, position_ids_bs, wanted=(batch["rows"], batch["positions"]))
    return model(tokens_bs, position_ids_bs, labels_bs=batch["labels"])


def total(out: Tensor, batch: Batch, task: ZeroShotTask, *, vocab_size: int, tp: Axis) -> Tensor:
    """A scalar in fp64: the sum of the losses `out` [b, s] of scored tokens; or by their logits `out` [n, v] the number
    of samples whose scored tokens are all the most probable ones."""
    if not task.greedy:
        return out[batch["rows"], batch["positions"]].double().sum()
    # Transposed, as processes have parts of the vocabulary. Its padding is no token.
    logits_vn = all_gather(out.t().contiguous(), tp)[:vocab_size]
    wrong_n = logits_vn.argmax(0) != batch["labels"][batch["rows"], batch["positions"]]
    wrong_b = torch.zeros(len(batch["tokens"]), dtype=torch.float64, device=out.device)
    return (wrong_b.index_add_(0, batch["rows"], wrong_n.double()) == 0).double().sum()


def count(batch: Batch, task: ZeroShotTask) -> int:
    """What the sums of a batch are over: samples, or scored tokens."""
    return len(batch["tokens"] if task.greedy else batch["rows"])


@torch.inference_mode()
def evaluate(
    stages: Stages, task: ZeroShotTask, *, micro_batch_size: int, advance: Callable[[], object]
) -> float:
    """The sum over all samples that `task.results` takes, on every process. Every process must take part.

    Args:
        advance: called after each batch of this replica's; the first replica has the most.
    """
    mesh = stages.mesh
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in make_batches(task, micro_batch_size=micro_batch_size, dp=mesh.dp):
        batch = {name: x.to(mesh.device) for name, x in batch.items()}
        out = forward(stages, batch, task)
        if out is not None:
            totals[0] += total(out, batch, task, vocab_size=stages.vocab_size, tp=mesh.tp)
            totals[1] += count(batch, task)
        advance()
    stages.transfers.finish()
    found, counted = all_reduce_sum(all_reduce_sum(totals, mesh.dp), mesh.pp).tolist()
    assert counted == task.count
    return found
