"""The order of --dataloader-type cyclic, which reshuffles the training data every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.errors import InputError


def cyclic(
    total: int, *, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[Sequence[int]]:
    """Yield samples without end, in Megatron-LM's random order: each replica reshuffles its own share every epoch.

    Args:
        total: samples in the dataset; a remainder that does not fill every replica's microbatch is dropped.
        consumed: samples consumed so far by all replicas together.

    Raises:
        InputError: `total` is too small, or `consumed` is not a multiple of micro_batch_size * dp_size.
    """
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
            f"--dataloader-type cyclic: the {consumed} consumed samples are not a multiple of {step} "
            f"(--micro-batch-size times data-parallel size); resume with the sizes of the previous run"
        )
    import torch  # not above: the command line, which imports no torch, registers this order

    bucket = per_epoch // dp_size
    while True:
        generator = torch.Generator().manual_seed(epoch)
        order = (torch.randperm(bucket, generator=generator) + dp_rank * bucket).tolist()
        for start in range(position // dp_size, bucket, micro_batch_size):
            yield order[start : start + micro_batch_size]
        epoch, position = epoch + 1, 0
