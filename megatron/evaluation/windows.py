"""How a text that is longer than a model's context is cut up."""

from __future__ import annotations

from collections.abc import Iterator


def spans(count: int, *, length: int, stride: int, fill: bool) -> Iterator[tuple[int, int, int]]:
    """Windows over a text of one token and `count` more that are to be predicted, each of these once.

    The first window predicts `length` tokens, every further one the next `stride`, from the `length` before the last
    of them.

    Args:
        fill: the last window, which predicts what is left, sees `length` tokens too; else it begins where it would if
            it were whole.

    Yields:
        (begin, first, end): of the tokens from `begin` on, those from `first` to `end` are predicted.
    """
    first, size = 1, length
    while first <= count:
        end = min(first + size, count + 1)
        begin = (end if fill else first + size) - 1 - length
        yield max(begin, 0), first, end
        first, size = end, stride
