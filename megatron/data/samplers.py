"""Samplers: the samples of each microbatch of one data-parallel replica.

The position in the data is the number of samples consumed by all replicas together, so a run can resume in another
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


def sequential(
    samples: range, *, micro_batch_size: int, dp_rank: int, dp_size: int, drop_last: bool
) -> Iterator[range]:
    """Yield `samples` in order; of every micro_batch_size * dp_size samples, each replica takes its slice.

    Args:
        drop_last: drop a remainder that does not fill the microbatches of all replicas. Otherwise the last microbatch
            of a replica may be short or empty.
    """
    step = micro_batch_size * dp_size
    stop = samples.start + len(samples) // step * step if drop_last else samples.stop
    for start in range(samples.start, stop, step):
        first = min(start + dp_rank * micro_batch_size, stop)
        yield range(first, min(first + micro_batch_size, stop))


def single(total: int, *, consumed: int, **layout: int) -> Iterator[range]:
    """Yield the samples of a dataset once, in order, after those consumed; `layout` is as for `sequential`."""
    return sequential(range(consumed, total), drop_last=True, **layout)


# Orders of the training data by --dataloader-type, with the arguments of `single`. `megatron.plugin_flags` adds some.
SAMPLE_ORDERS: dict[str, Callable[..., Iterator[Sequence[int]]]] = {"single": single}
