"""Data by phase: blends that follow each other in the training samples of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron.data.build import DatasetBuilder, Source, Split, TokenFile
from megatron.data.dataset import Dataset
from megatron.data.index_cache import cached_arrays
from megatron.data.indexed import IndexedDataset
from megatron.variants.blend import ROUNDINGS, BlendedDataset, blend_order, open_blend
from megatron.variants.blend_flags import DataPhase, parse_blend, split_phases
from megatron.variants.blend_rounding import BlendRounding


@dataclasses.dataclass(frozen=True)
class PhaseOrder:
    """The files of a phase and their shares, which decide the order of its samples.

    Attributes:
        start: training samples before the phase.
        files: numbers of the token files of its blend.
        shares: of each of them; their sum is 1.
    """

    start: int
    files: Sequence[int]
    shares: Sequence[float]


def open_phases(builder: DatasetBuilder, words: Sequence[str], flag: str) -> PhasedBlend | None:
    """Open the files of a data flag with several phases; None if it has one.

    Raises:
        InputError: as `split_phases` and `parse_blend`, or a file is missing or damaged.
    """
    phases = split_phases(words, flag)
    if len(phases) == 1:
        return None
    first = open_blend(builder, phases[0].words, flag)
    return PhasedBlend(builder, phases, flag, first or TokenFile(builder, IndexedDataset(phases[0].words[0])))


@dataclasses.dataclass(frozen=True)
class PhasedBlend:
    """Blends of token files, each for a part of the training samples.

    A file of several phases is read on where the phase before left it. The other splits have the blend of the first
    phase, so that their losses stay comparable.

    Attributes:
        flag: name of the flag, for messages.
        first: the blend of the first phase.
    """

    builder: DatasetBuilder
    phases: Sequence[DataPhase]
    flag: str
    first: Source

    def has_documents(self, split: Split) -> bool:
        return self.first.has_documents(split)

    def build(self, split: Split, samples: int) -> Dataset:
        """Build the dataset of a split. Phases that begin after `samples` samples take no part in it."""
        if split.name != "train":
            return self.first.build(split, samples)
        phases = [phase for phase in self.phases if phase.start < samples]
        files: dict[str, TokenFile] = {}
        needed: dict[str, int] = {}  # samples of each file that has a share
        orders: list[PhaseOrder] = []
        for phase, end in zip(phases, phase_ends(phases, samples), strict=True):
            shares = self._shares(phase, split, files)
            for prefix, share in shares.items():
                # A prefix alone is asked for no surplus, as in a run of one phase.
                count = end - phase.start
                if len(phase.words) > 1:
                    count = self._rounding.samples_of_share(count, share)
                needed[prefix] = needed.get(prefix, 0) + count
            numbers = {prefix: i for i, prefix in enumerate(needed)}
            orders.append(
                PhaseOrder(phase.start, [numbers[prefix] for prefix in shares], list(shares.values()))
            )
        for prefix, count in needed.items():
            files[prefix].check_tokens(split, count)
        index = cached_arrays(
            files[phases[0].words[-1]].cache,
            f"phases-{split.name}-{samples}ns-{len(phases)}",
            {"kind": "phases", "phases": [dataclasses.asdict(order) for order in orders], "size": samples},
            ("dataset", "sample"),
            lambda: phased_order(orders, samples),
        )
        return BlendedDataset([files[prefix].build(split, count) for prefix, count in needed.items()], index)

    def _shares(self, phase: DataPhase, split: Split, files: dict[str, TokenFile]) -> dict[str, float]:
        """The share of each file in a phase; adds the files to `files`. Without weights it follows from the tokens."""
        prefixes, weights = parse_blend(phase.words, self.flag)
        for prefix in prefixes:
            if prefix not in files:
                files[prefix] = TokenFile(self.builder, IndexedDataset(prefix))
        if weights is None:
            sizes = {prefix: files[prefix].num_tokens(split) for prefix in prefixes}
            sizes = {prefix: size for prefix, size in sizes.items() if size} or {prefixes[0]: 1}
            prefixes, weights = list(sizes), [*map(float, sizes.values())]
        return dict(zip(prefixes, self._rounding.normalize(weights), strict=True))

    @property
    def _rounding(self) -> BlendRounding:
        return ROUNDINGS[self.builder.config.data_order]


def phase_ends(phases: Sequence[DataPhase | PhaseOrder], samples: int) -> list[int]:
    """The number of training samples after which each phase ends, in a run of `samples` samples."""
    return [*(phase.start for phase in phases[1:]), samples]


def phased_order(phases: Sequence[PhaseOrder], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each training sample, in the order of `blend_order` within each phase.

    Returns:
        dataset_index: int16 [size].
        sample_index: int64 [size], number of earlier samples from the same dataset, in all phases.
    """
    dataset_index, sample_index = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    read = np.zeros(1 + max(max(phase.files) for phase in phases), dtype=np.int64)
    for phase, end in zip(phases, phase_ends(phases, size), strict=True):
        files, part = np.asarray(phase.files), slice(phase.start, end)
        chosen, number = blend_order(phase.shares, end - phase.start)
        dataset_index[part] = files[chosen]
        sample_index[part] = read[files][chosen] + number
        read += np.bincount(dataset_index[part], minlength=len(read))
    return dataset_index, sample_index
