"""Compare a capture with one of a reference, tensor by tensor, with bounds of rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from megatron.verify.assemble import inferred_place, local_index, sums, valid_shape
from megatron.verify.format import KINDS, Capture, Record
from megatron.verify.reference import STATE_KINDS, Reference
from megatron.verify.tolerance import UNIT

# Values that are logged but depend on the machine, or count numbers of the order of rounding.
NOT_COMPARED = ("seconds", "tokens per second", "num zeros")
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


def _may_be_partial(record: Record, values: Tensor, whole: Tensor, ranks: int) -> bool:
    """True if several tensor-parallel ranks share the keys of a query group, and each has its part of their gradient.

    Of one group that all ranks share, only a norm's output may be partial, as `Record.partial` tells.
    """
    parts = whole.numel() // max(values.numel(), 1)
    return parts < ranks and (parts > 1 or record.partial)
