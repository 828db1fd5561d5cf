"""Whether processes that should hold the same weights do."""

from __future__ import annotations

import json
from collections import Counter

import torch
from torch import Tensor

from megatron.flags import PassingFault
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import Entry
from megatron.parallel.collectives import all_gather, gather_texts
from megatron.parallel.mesh import Axis

# Elements whose checksum is taken at once.
PIECE = 1 << 20


def check_replicas(buffer: ParamBuffer) -> None:
    """Compare the weights that several processes hold alike, by checksums: those of data-parallel replicas, what all
    tensor-parallel processes hold whole, and tables that both ends of a pipeline hold. Every process must take part.

    Raises:
        PassingFault: some differ. By all processes, naming the parameter and the ranks.
    """
    buffer.finish_gathers()
    mesh, params = buffer.mesh, buffer.params
    compared = [
        (mesh.dp, [(entry, entry.view(params).flatten()) for entry in buffer.entries]),
        (mesh.tp, [(entry, _shared(entry, params)) for entry in buffer.entries if entry.place.shared]),
        (mesh.ends, [(entry, entry.view(params).flatten()) for entry in buffer.entries if entry.tied]),
    ]
    found = [told for axis, entries in compared if (told := _differing(axis, entries)) is not None]
    told = [json.loads(text) for text in gather_texts(json.dumps(found), mesh.world)]
    differing = sorted({text for texts in told for text in texts})
    if differing:
        raise PassingFault(
            f"--check-weight-replicas-interval: the weights of replicas differ: {'; '.join(differing[:5])}; go on from "
            "a checkpoint saved before, and look at the machines of these ranks"
        )


def _shared(entry: Entry, params: Tensor) -> Tensor:
    """The rows of a parameter that every tensor-parallel process holds."""
    return torch.cat([params[begin:end] for begin, end in entry.flat(entry.place.shared)])


def _differing(axis: Axis, entries: list[tuple[Entry, Tensor]]) -> str | None:
    """The first parameter that differs between the processes of `axis`, and on which of them."""
    if axis.size == 1 or not entries:
        return None
    sums = torch.stack([checksum(values) for _, values in entries])
    table = all_gather(sums, axis).view(axis.size, -1).cpu()
    for (entry, _), column in zip(entries, table.t().tolist(), strict=True):
        (common, count), *others = Counter(column).most_common()
        if others:
            ranks = [rank for rank, value in zip(axis.ranks, column, strict=True) if value != common]
            if count == others[0][1]:  # no majority to say who is wrong
                ranks = list(axis.ranks)
            return f"{entry.name} on rank {', '.join(map(str, ranks))} of the {axis.name} ranks {list(axis.ranks)}"
    return None


def checksum(values: Tensor) -> Tensor:
    """Of the bits of a flat tensor in fp32 or bf16 and of their order: int64, a scalar."""
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].long()
        # Odd factors, so that no change of a single element is lost when the sum passes 2^64.
        order = torch.arange(start, start + len(piece), device=values.device) * 2 + 1
        total += (piece * order).sum()
    return total
