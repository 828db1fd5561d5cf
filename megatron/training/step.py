"""One step of training, and one evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import seed_dropout
from megatron.training.task import Batch, Task


def to_device(batch: Batch, mesh: Mesh) -> Batch:
    """The batch on the mesh's device; from pinned memory the host does not wait for the copy."""
    return {name: tensor.to(mesh.device, non_blocking=True) for name, tensor in batch.items()}


def train_step(
    model: nn.Module,
    task: Task,
    batches: Iterator[Batch],
    buffer: ParamBuffer,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    num_microbatches: int,
    micro_batch_size: int,
    consumed_samples: int,
    seed: int,
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward over the microbatches of one global batch, then one step of the optimizer.

    Nothing here waits for the device.

    Returns:
        [terms] this replica's share of the mean losses, which summed over the replicas are the means; and what
        `Optimizer.step` tells, the same on every replica.
    """
    microbatches = [to_device(batch, mesh) for batch in itertools.islice(batches, num_microbatches)]
    counts = all_reduce_sum(torch.stack([task.count(batch) for batch in microbatches]).sum(0), mesh.dp)
    counts = counts.clamp(min=1)  # with every position masked the loss is 0, not 0/0

    losses = torch.zeros(len(task.loss_names), dtype=torch.float64, device=mesh.device)
    for i, batch in enumerate(microbatches):
        seed_dropout(seed, consumed_samples + (i * mesh.dp.size + mesh.dp.rank) * micro_batch_size)
        share = task.loss(model, batch) / counts
        share.sum().backward()
        losses += share.detach()

    all_reduce_sum(buffer.grads, mesh.dp)
    return losses, optimizer.step(lr=lr, weight_decay=weight_decay)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, batches: Iterable[Batch], mesh: Mesh) -> dict[str, float]:
    """Mean of each loss over all samples of all replicas' `batches`, which may differ in number and size."""
    model.eval()
    totals = torch.zeros(2, len(task.loss_names), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        batch = to_device(batch, mesh)
        totals[0] += task.loss(model, batch)
        totals[1] += task.count(batch)
    model.train()
    sums, counts = all_reduce_sum(totals, mesh.dp).tolist()
    return {name: s / max(c, 1) for name, s, c in zip(task.loss_names, sums, counts, strict=True)}
