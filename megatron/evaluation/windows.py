"""Windows over a text that is longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterator


def spans(count: int, *, length: int, stride: int, fill: bool) -> Iterator[tuple[int, int, int]]:
    """Yield windows over a text of `count` + 1 tokens that predict each token but the first once.

    The first window predicts `length` tokens, every further one the next `stride`. A window has `length` input tokens.

    Args:
        fill: the last window, which may predict fewer tokens, has `length` inputs too; otherwise it begins where a
            complete window would.

    Yields:
        (begin, first, end): the window's tokens are [begin, end), and those in [first, end) are predicted.
    """
    first, size = 1, length
    while first <= count:
        end = min(first + size, count + 1)
        begin = (end if fill else first + size) - 1 - length
        yield max(begin, 0), first, end
        first, size = end, stride
