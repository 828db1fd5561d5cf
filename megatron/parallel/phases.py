"""Phases of a run, for plug-ins that time them or name them in a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

NOTHING = nullcontext()


class Phases:
    """`with phases("optimizer"):` marks a phase. Some contain others.

    Attributes:
        observers: from the name of a phase to a context that it runs in. Plug-ins add to them.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[str], AbstractContextManager[object]]] = []

    def __call__(self, phase: str) -> AbstractContextManager[object]:
        return self._observed(phase) if self.observers else NOTHING

    @contextmanager
    def _observed(self, phase: str) -> Iterator[None]:
        with ExitStack() as contexts:
            for observe in self.observers:
                contexts.enter_context(observe(phase))
            yield


UNOBSERVED = Phases()
