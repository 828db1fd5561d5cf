"""A reference of a comparison: its tensors, and bounds of what rounding changes in them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.verify.assemble import assemble
from megatron.verify.format import Capture, Record
from megatron.verify.tolerance import Rounding
from megatron.verify.tolerance import bound as bound_of

# Tensors of fewer elements share the spread of others of their kind and name.
FEW_ELEMENTS = 64
STATE_KINDS = ("weight", "state", "parameter")


class Reference:
    """A reference, and runs of it that only round differently.

    Attributes:
        parameters: names of all parameters.
        start: step of the state before the first step.
    """

    def __init__(self, capture: Capture, spreads: Sequence[Capture], rounding: Rounding) -> None:
        self.capture, self.spreads, self.rounding = capture, spreads, rounding
        self.records = capture.by_id()
        self.spread_records = [spread.by_id() for spread in spreads]
        self.wholes: dict[tuple, Tensor | None] = {}
        self.errors: dict[tuple, list[Tensor]] = {}
        # Ids of the gradients of modules' outputs, by step and module.
        self.output_gradients: dict[tuple, list[tuple]] = {}
        for id in self.records:
            if id[1] == "activation gradient":
                self.output_gradients.setdefault((id[0], id[2]), []).append(id)
        self.term_norms: dict[tuple, Tensor | None] = {}
        self.parameters = {r.name for r in capture.records if r.kind == "parameter"}
        self.start = _start(capture.records)
        self.pools = self._pools()

    def whole(self, id: tuple) -> Tensor | None:
        """A tensor of the reference, fp64."""
        if id not in self.wholes:
            self.wholes[id] = assemble(self.capture, self.records[id])
        return self.wholes[id]

    def spread(self, id: tuple) -> list[Tensor]:
        """Errors of a tensor in the runs that round differently."""
        if id not in self.errors:
            whole, found = self.whole(id), []
            for capture, records in zip(self.spreads, self.spread_records, strict=True):
                other = assemble(capture, records[id]) if id in records else None
                if whole is not None and other is not None and other.shape == whole.shape:
                    found.append(other - whole)
            self.errors[id] = found
        return self.errors[id]

    def _pools(self) -> dict[tuple, list[float]]:
        """Relative spreads of small tensors, by kind and name, and for microbatches by step."""
        pools: dict[tuple, list[float]] = {}
        for id in self.records:
            if self.spreads and id[0] and id[1] not in ("mask", "local gradient") and self._is_small(id):
                whole = self.whole(id)
                if whole is not None and (scale := self.scale(id, whole)):
                    pools.setdefault(_pool(id), []).extend(float(e.norm()) / scale for e in self.spread(id))
        return pools

    def _is_small(self, id: tuple) -> bool:
        whole = self.whole(id)
        return whole is not None and whole.numel() < FEW_ELEMENTS

    def scale(self, id: tuple, values: Tensor, index: Tensor | None = None) -> float:
        """Size that rounding errors of a tensor's `values`, at `index`, are relative to: their norm or their terms'.

        The gradient of a bias is the sum of its output's over tokens and samples. The terms may cancel, as those of two
        classes do: the sum is then small, and its rounding error is not. An optimizer's state, such as the square of
        the gradients, has the relative error of the gradients or twice that.
        """
        step, kind, name, *rest = id
        norm = float(values.norm())
        if kind == "gradient" and (terms := self._terms(id)) is not None:
            return max(norm, float((terms if index is None else terms[index]).norm()))
        if kind == "state":
            steps = range(self.start + 1, step + 1)
            ids = [(earlier, "gradient", name.partition("/")[2], *rest) for earlier in steps]
            return norm * max((2 * x for x in map(self._cancellation, ids) if x > 1), default=1.0)
        return norm

    def _cancellation(self, id: tuple) -> float:
        """The norm of a gradient's terms over its own."""
        terms = self._terms(id) if id in self.records else None
        whole = self.wholes.get(id)
        return (
            float(terms.norm() / whole.norm())
            if terms is not None and whole is not None and whole.any()
            else 1.0
        )

    def _terms(self, id: tuple) -> Tensor | None:
        """Norm of the terms of each element of a bias's gradient, fp64; None if the terms are not known."""
        if id not in self.term_norms:
            step, _, name, *_ = id
            module, whole = name.removesuffix(".bias"), self.whole(id)
            ids = self.output_gradients.get((step, module), []) if module != name else []
            rows = [self.whole(found) for found in ids]
            squares = [x.flatten(0, -2).square().sum(0) for x in rows if x is not None and x.ndim > 1]
            fits = whole is not None and squares and all(x.shape == whole.shape for x in squares)
            self.term_norms[id] = torch.stack(squares).sum(0).sqrt() if fits else None
        return self.term_norms[id]

    @functools.cached_property
    def steps_by_signs(self) -> bool:
        """True if the first step moves most elements by the same amount, as Lion's does.

        The sign of a gradient that is rounding error decides such a step, so that later steps cannot be compared with a
        bound of rounding.
        """
        wholes = [self.whole(id) for id in self.records if id[:2] == (self.start + 1, "update")]
        sizes = [(whole.abs() / whole.abs().max()).flatten() for whole in wholes if whole is not None]
        return bool(sizes) and float((torch.cat(sizes) > 0.9).double().mean()) > 0.5

    def is_exact(self, id: tuple) -> bool:
        """True for masks, and for the state before the first step."""
        return id[1] == "mask" or id[0] == self.start

    def bound(self, id: tuple, index: Tensor) -> float:
        """Largest norm of a difference that rounding explains, of the elements at `index` of the flat whole tensor."""
        whole = self.whole(id)
        assert whole is not None
        size, values = index.numel(), whole.view(-1)[index]
        share = math.sqrt(size / max(whole.numel(), 1))
        errors = self.spread(id)
        # A part may by chance have less of the error than its share.
        spreads = [max(float(e.view(-1)[index].norm()), share * float(e.norm())) for e in errors]
        pooled = self.pools.get(_pool(id), []) if whole.numel() < FEW_ELEMENTS else []
        return bound_of(
            self.scale(id, values, index),
            max(size, len(pooled) // max(len(errors), 1)),
            spreads,
            pooled,
            self.rounding.relative(*id[1:3]),
        )

    def gradient_error(self, id: tuple) -> float:
        """Bound of the root mean square error of a gradient's elements."""
        whole = self.whole(id)
        assert whole is not None
        size = whole.numel()
        return self.bound(id, torch.arange(size)) / math.sqrt(max(size, 1))


def _start(records: Sequence[Record]) -> int:
    """The step of the state before the first step, also if a program has not written that state."""
    first = min(record.step for record in records)
    is_state = all(record.kind in STATE_KINDS for record in records if record.step == first)
    return first if is_state else first - 1


def _pool(id: tuple) -> tuple:
    step, kind, name, *_ = id
    return (kind, name, step) if kind == "loss" else (kind, name)
