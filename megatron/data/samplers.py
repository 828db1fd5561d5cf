"""Which samples one data-parallel replica reads, microbatch by microbatch.

The position in the data is the number of samples that all replicas together have consumed, so a run can go on
from it in another layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.flags import InputError


def sequential(
    samples: range, *, micro_batch_size: int, dp_rank: int, dp_size: int, drop_last: bool
) -> Iterator[range]:
    """`samples` in order; of every micro_batch_size * dp_size of them, each replica takes its slice.

    Args:
        drop_last: leave out a remainder that does not fill the microbatches of all replicas. Otherwise the
            last microbatches of the replicas hold what there is, which may be nothing.
    """
    step = micro_batch_size * dp_size
    stop = samples.start + len(samples) // step * step if drop_last else samples.stop
    for start in range(samples.start, stop, step):
        first = min(start + dp_rank * micro_batch_size, stop)
        yield range(first, min(first + micro_batch_size, stop))


def cyclic(
    total: int, *, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[Sequence[int]]:
    """Without end, in Megatron-LM's random order: each replica shuffles its own share anew in every epoch.

    Args:
        total: samples in the data set; a remainder that does not fill every replica's microbatch is not used.
        consumed: samples consumed so far.

    Raises:
        InputError: `total` is too small, or `consumed` is not between two steps.
    """
    import torch  # here alone: the order is that of its generator

    step = micro_batch_size * dp_size
    per_epoch = total - total % step
    if per_epoch == 0:
        raise InputError(
            f"--dataloader-type cyclic: {total} samples do not fill one microbatch of {micro_batch_size} samples "
            f"on {dp_size} replicas"
        )
    epoch, position = divmod(consumed, per_epoch)
    if position % step:
        raise InputError(
            f"--dataloader-type cyclic: {consumed} samples have been consumed, which is not a whole number of steps of "
            f"{step} samples (--micro-batch-size times replicas); resume with the sizes of the run before"
        )
    bucket = per_epoch // dp_size
    while True:
        generator = torch.Generator().manual_seed(epoch)
        order = (torch.randperm(bucket, generator=generator) + dp_rank * bucket).tolist()
        for start in range(position // dp_size, bucket, micro_batch_size):
            yield order[start : start + micro_batch_size]
        epoch, position = epoch + 1, 0
