"""Compare a capture with one of a reference, tensor by tensor, with bounds of rounding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.verify.assemble import assemble, inferred_place, local_index, sums, valid_shape
from megatron.verify.format import KINDS, Capture, Record
from megatron.verify.tolerance import UNIT, Rounding
from megatron.verify.tolerance import bound as bound_of

# Values that are logged but depend on the machine, or count numbers of the order of rounding.
NOT_COMPARED = ("seconds", "tokens per second", "num zeros")
# Tensors of fewer elements share the spread of others of their kind and name.
FEW_ELEMENTS = 64
STATE_KINDS = ("weight", "state", "parameter")
# Tensors that tensor-parallel ranks may each have a part of, without a place that tells which.
SPLIT_KINDS = ("activation", "activation gradient", "mask")
PARAMETER_KINDS = ("gradient", "update", *STATE_KINDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one rank's tensor with its part of the reference.

    Attributes:
        record: of the rank's tensor; of the reference if there is no such tensor.
        order: of the reference's record in its microbatch.
        difference: L2 norm of the difference.
        norm: L2 norm of the reference.
        bound: largest difference that rounding explains.
        fault: why no values were compared; empty if they were.
    """

    record: Record
    order: int
    difference: float
    norm: float
    bound: float
    fault: str = ""

    @property
    def passed(self) -> bool:
        return not self.fault and self.difference <= self.bound < math.inf

    @property
    def ratio(self) -> float:
        """Difference over bound."""
        if self.fault or not math.isfinite(self.difference):
            return math.inf
        return self.difference / self.bound if self.bound else math.inf if self.difference else 0.0

    @property
    def sort_key(self) -> tuple:
        """Position in the order of computation: forward, backward in reverse, then the optimizer."""
        kind = KINDS.index(self.record.kind)
        backward = self.record.kind == "activation gradient"
        forward = self.record.kind in ("mask", "activation", "loss")
        place = -self.order if backward else self.order
        return self.record.step, 1 if forward else kind, place, kind, self.record.sample or 0


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


class Comparer:
    """Compares captures with a reference.

    Attributes:
        skipped: numbers of tensors that were not compared, by reason.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.skipped: dict[str, int] = {}

    def compare(
        self,
        other: Capture,
        *,
        steps: range,
        kinds: Collection[str] = KINDS,
        exact: bool = False,
        partial: bool = False,
    ) -> Iterator[Comparison]:
        """Compare each tensor of `steps` and `kinds` that the reference has with those of all ranks of `other`.

        Args:
            exact: allow no difference.
            partial: `other` may lack modules, metrics, and all tensors of a kind in a step, as another program's
                capture does.
        """
        found = other.by_id()
        written = {id[:2] for id in found}
        lacking = found.keys() - self.reference.records.keys()
        chosen = [id for id in lacking if _is_chosen(id, steps, kinds)]
        self._skip("tensors that the reference lacks", len(chosen))
        held: dict[int, set[str]] = {}
        for record in other.records:
            if record.kind == "parameter":
                held.setdefault(record.rank, set()).add(record.name)
        for id, records in self.reference.records.items():
            if not _is_chosen(id, steps, kinds):
                continue
            if reason := self._not_comparable(id, records[0], exact=exact):
                self._skip(reason)
                continue
            step, kind, name, *_ = id
            theirs = found.get(id, [])
            if kind.startswith("activation") and (theirs or not partial):
                theirs = [r for r in theirs if self._is_whole_module(name, held.get(r.rank, set()))]
                if not theirs:
                    self._skip("modules that are split over pipeline stages or recomputed")
                    continue
            if partial and not theirs and ((step, kind) not in written or kind not in PARAMETER_KINDS):
                self._skip("values that the other capture lacks")
                continue
            yield from self._compare(other, id, records[0], theirs, exact=exact)

    def _not_comparable(self, id: tuple, mine: Record, *, exact: bool) -> str:
        """Why a tensor of the reference cannot be compared with any capture's; empty if it can."""
        if id[0] > self.reference.start + 1 and not exact and self.reference.steps_by_signs:
            return "values after a step whose sizes do not depend on the gradient's"
        if mine.place is None and id[1] in SPLIT_KINDS and self.reference.capture.sizes.get("tp", 1) > 1:
            return "activations and masks of a reference with several tensor-parallel ranks"
        return ""

    def _is_whole_module(self, name: str, held: set[str]) -> bool:
        """True if a rank that holds these parameters holds all of a module's."""
        prefix = f"{name}." if name else ""
        return all(
            parameter in held for parameter in self.reference.parameters if parameter.startswith(prefix)
        )

    def _skip(self, reason: str, count: int = 1) -> None:
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count

    def _compare(
        self, other: Capture, id: tuple, mine: Record, theirs: list[Record], *, exact: bool
    ) -> Iterator[Comparison]:
        whole = self.reference.whole(id)
        if whole is None:
            self._skip("tensors beyond the capture's size")
            return
        if not theirs:
            yield self._fault(mine, mine, "no rank has it")
            return
        written = [record for record in theirs if record.key is not None]
        self._skip("tensors beyond the capture's size", len(theirs) - len(written))
        pieces: Iterable[tuple[Record, Tensor]]
        if theirs[0].sum_over:
            # A sum lacks what one rank has not written.
            pieces = sums(other, written) if len(written) == len(theirs) else ()
        else:
            pieces = ((record, other.read(record)) for record in written)
        covered = torch.zeros(whole.numel(), dtype=torch.bool)
        for record, values in pieces:
            if id[1] == "activation gradient" and _may_be_partial(
                record, values, whole, other.sizes.get("tp", 1)
            ):
                self._skip("gradients of activations that ranks share, of which each may have its part")
                continue
            yield self._compare_piece(id, mine, record, values, whole, covered, other.sizes, exact=exact)
        if id[1] in PARAMETER_KINDS and len(written) == len(theirs) and not covered.all():
            missing = int((~covered).sum())
            yield self._fault(mine, mine, f"no rank has {missing:,} of its {whole.numel():,} elements")

    def _compare_piece(
        self,
        id: tuple,
        mine: Record,
        record: Record,
        values: Tensor,
        whole: Tensor,
        covered: Tensor,
        sizes: dict[str, int],
        *,
        exact: bool,
    ) -> Comparison:
        part = self.part(record, values, whole, sizes)
        if part is None:
            shapes = f"{list(values.shape)}, and the reference's is {list(whole.shape)}"
            return self._fault(mine, record, f"its shape is {shapes}")
        index, mask = part
        covered[index[mask]] = True
        reference = whole.view(-1)[index[mask]]
        difference = values.double().view(-1)[mask] - reference
        norm = float(reference.norm())
        exact = exact or self.reference.is_exact(id)
        error = (
            update_error(self.reference, id)
            if not exact and id[1] in ("update", "weight", "parameter")
            else None
        )
        if error is not None:
            difference = (difference.abs() - error[index[mask]]).clamp(min=0)
        limit = 0.0 if exact else self.reference.bound(id, index[mask])
        return Comparison(
            record=record, order=mine.order, difference=float(difference.norm()), norm=norm, bound=limit
        )

    def part(
        self, record: Record, values: Tensor, whole: Tensor, sizes: dict[str, int]
    ) -> tuple[Tensor, Tensor] | None:
        """Index in the flat whole tensor of each element of a rank's tensor, with false for padding.

        Returns:
            None if the tensor fits nowhere in the whole one.
        """
        place = record.place
        if place is not None:
            return local_index(place) if valid_shape(place) == tuple(whole.shape) else None
        if values.shape == whole.shape:
            return torch.arange(values.numel()), torch.ones(values.numel(), dtype=torch.bool)
        tp = record.coordinates.get("tp", 0), sizes.get("tp", 1)
        place = inferred_place(values.shape, whole.shape, *tp)
        return None if place is None else local_index(place)

    @staticmethod
    def _fault(mine: Record, record: Record, fault: str) -> Comparison:
        return Comparison(
            record=record, order=mine.order, difference=math.inf, norm=mine.norm, bound=0.0, fault=fault
        )


def update_error(reference: Reference, id: tuple) -> Tensor | None:
    """Error of each element's updates up to a step, where the optimizer divides gradients by their size.

    Adam's update has about the same size for a gradient of any size, so that an element whose gradients cancel to
    almost nothing moves by rounding alone. Runs that round differently seldom hit the same element. Each of the two
    runs also rounds the sum of weight and update to fp32, which for an update that is small beside its weight is the
    larger error.

    Returns:
        Flat, fp64; None if the reference has no gradients and updates of the parameter.
    """
    step, _, name, *rest = id
    total, squares = torch.zeros(()), torch.zeros(())
    for earlier in range(reference.start + 1, step + 1):
        found = [(earlier, kind, name, *rest) for kind in ("gradient", "update", "weight", "parameter")]
        wholes = [reference.whole(key) if key in reference.records else None for key in found]
        values, change, master, parameter = wholes
        weight = parameter if master is None else master
        if values is None or change is None:
            return None
        squares = values.flatten().square() + squares
        relative = (reference.gradient_error(found[0]) / squares.sqrt()).nan_to_num(0.0).clamp(max=2.0)
        rounded = 0.0 if weight is None else 2 * UNIT["fp32"] * weight.flatten().abs()
        total = total + change.abs().max() * relative + rounded
    return total


def _is_chosen(id: tuple, steps: range, kinds: Collection[str]) -> bool:
    step, kind, name, *_ = id
    return (
        step in steps
        and kind in kinds
        and kind != "local gradient"
        and not any(word in name for word in NOT_COMPARED)
    )


def _start(records: Sequence[Record]) -> int:
    """The step of the state before the first step, also if a program has not written that state."""
    first = min(record.step for record in records)
    is_state = all(record.kind in STATE_KINDS for record in records if record.step == first)
    return first if is_state else first - 1


def _may_be_partial(record: Record, values: Tensor, whole: Tensor, ranks: int) -> bool:
    """True if several tensor-parallel ranks share the keys of a query group, and each has its part of their gradient.

    Of one group that all ranks share, only a norm's output may be partial, as `Record.partial` tells.
    """
    parts = whole.numel() // max(values.numel(), 1)
    return parts < ranks and (parts > 1 or record.partial)


def _pool(id: tuple) -> tuple:
    step, kind, name, *_ = id
    return (kind, name, step) if kind == "loss" else (kind, name)
