"""Compare the weights of processes that should hold the same ones."""

from __future__ import annotations

import collections
import json

import torch
from torch import Tensor

from megatron.errors import TransientFault
from megatron.faults.config import FaultsConfig
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import FlatParam
from megatron.parallel.collectives import all_gather, gather_texts
from megatron.parallel.mesh import Axis
from megatron.parallel.slices import intersections
from megatron.training.loop import Hook, Trainer

# Elements whose checksum is taken at once.
PIECE = 1 << 20


class ReplicaCheck(Hook):
    """Compare replicated weights every --check-weight-replicas-interval iterations, and before every checkpoint."""

    def after_step(self, trainer: Trainer) -> None:
        if trainer.is_due(trainer.config.plugin(FaultsConfig).check_weight_replicas_interval):
            with trainer.clock.paused():
                trainer.engine.optimizer.finish()
                check_replicas(trainer.engine.buffer)

    def before_save(self, trainer: Trainer) -> None:
        # Without the check a checkpoint could hold good weights of one replica and bad ones of another.
        if trainer.config.plugin(FaultsConfig).check_weight_replicas_interval is not None:
            check_replicas(trainer.engine.buffer)


def check_replicas(buffer: ParamBuffer) -> None:
    """Compare checksums of weights that several processes hold: of data-parallel replicas, of what tensor-parallel
    ranks replicate, and of tied embeddings on the first and last stage. Every process must call it.

    Raises:
        TransientFault: on all processes if some weights differ, naming the parameter and the ranks.
    """
    buffer.gather.finish()
    mesh = buffer.mesh
    replicated, shared, tied = collections.defaultdict(list), collections.defaultdict(list), []
    for param, values, begin in buffer.held_params():
        bucket = buffer.buckets[buffer.param_memory.index(param)]
        group = bucket.group
        replicas = group.instance_axis if group.shards_params else group.reduce_axis
        replicated[replicas].append((param, values))
        if param.shard_spec.shared:
            shared[param.shard_spec.replicas].append((param, _shared(param, values, begin)))
        if param.tied:
            tied.append((param, values))
    compared = [*replicated.items(), *shared.items(), (mesh.embedding, tied)]
    found = [text for axis, weights in compared if (text := _differing(axis, weights)) is not None]
    gathered = [json.loads(texts) for texts in gather_texts(json.dumps(found), mesh.world)]
    differing = sorted({text for texts in gathered for text in texts})
    if differing:
        raise TransientFault(
            f"--check-weight-replicas-interval: the weights of replicas differ: {'; '.join(differing[:5])}; continue "
            "from an earlier checkpoint, and check the machines of these ranks"
        )


def _shared(param: FlatParam, values: Tensor, begin: int) -> Tensor:
    """The elements that every tensor-parallel rank holds, among `values`, elements `begin` and following of `param`."""
    start = param.start + begin
    ranges = intersections((start, start + len(values)), param.flat(param.shard_spec.shared))
    return torch.cat([values[:0], *(values[first - start : end - start] for first, end in ranges)])


def _differing(axis: Axis, weights: list[tuple[FlatParam, Tensor]]) -> str | None:
    """Describe the first parameter that differs between the ranks of `axis`, and on which; None if none differs."""
    if axis.size == 1 or not weights:
        return None
    sums = torch.stack([checksum(values) for _, values in weights])
    table = all_gather(sums, axis).view(axis.size, -1).cpu()
    for (param, _), column in zip(weights, table.t().tolist(), strict=True):
        (common, count), *others = collections.Counter(column).most_common()
        if others:
            ranks = [rank for rank, value in zip(axis.ranks, column, strict=True) if value != common]
            if count == others[0][1]:  # without a majority any rank may be wrong
                ranks = list(axis.ranks)
            return f"{param.name} on rank {', '.join(map(str, ranks))} of the {axis.name} ranks {list(axis.ranks)}"
    return None


def checksum(values: Tensor) -> Tensor:
    """Checksum of a flat fp32 or bf16 tensor that depends on all bits and their order: int64, a scalar."""
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].long()
        # Odd factors, so that no change of a single element is lost when the sum passes 2^64.
        order = torch.arange(start, start + len(piece), device=values.device) * 2 + 1
        total += (piece * order).sum()
    return total
