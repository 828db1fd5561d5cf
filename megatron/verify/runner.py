"""Run a shrunk run in one process and in layouts, and compare them."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.errors import InputError, TrainingFault
from megatron.optim.norms import CHUNK_SIZE
from megatron.training.config import RunConfig
from megatron.verify.compare import Comparer, Comparison
from megatron.verify.format import KINDS, Capture
from megatron.verify.launch import Failure
from megatron.verify.locate import Finding, first_difference
from megatron.verify.shrink import Layout, Shrunk, command_words, in_layout, one_process
from megatron.verify.tolerance import Rounding

# Steps of a run, and the step after which it saves.
STEPS, SAVED = 3, 2
# Runs of one process that round differently: seeds of the permutations, and one with products in fp64.
SEEDS = (1, 2, 3)
# Fewest microbatches of a step.
MICROBATCHES = 4
CAPTURE_MEGABYTES = 4096
# Failed comparisons that a certificate lists.
MAX_FAILURES = 50
STATE = ("weight", "state", "parameter")

# Starts a configuration in a number of processes, with the arguments of `DividedSums` if sums are to be divided, and
# the prefix of log files. Returns the failure, if any.
Start = Callable[[RunConfig, int, "tuple[int, int] | None", Path], "Failure | None"]


@dataclasses.dataclass(kw_only=True)
class Check:
    """The result of comparing one run.

    Attributes:
        command: flags of the run.
        kinds: by kind of record, the number compared and the largest difference over its bound.
        failures: failed comparisons in the order of computation.
        skipped: numbers of tensors that were not compared, by reason.
        error: why the run did not end.
        not_covered: why nothing was run.
    """

    name: str
    processes: int = 1
    command: str = ""
    kinds: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finding: Finding | None = None
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""
    not_covered: str = ""

    @property
    def passed(self) -> bool:
        return not (self.failures or self.error)

    @property
    def compared(self) -> int:
        return sum(row["compared"] for row in self.kinds.values())

    @property
    def largest(self) -> float:
        """The largest difference over its bound."""
        return max((row["largest"] for row in self.kinds.values()), default=0.0)

    def add(self, comparer: Comparer, other: Capture, comparisons: Sequence[Comparison]) -> None:
        """Add comparisons of a capture with the reference of `comparer`."""
        for comparison in sorted(comparisons, key=lambda c: c.sort_key):
            record = comparison.record
            row = self.kinds.setdefault(record.kind, {"compared": 0, "failed": 0, "largest": 0.0, "at": ""})
            row["compared"] += 1
            row["failed"] += not comparison.passed
            if comparison.ratio > row["largest"]:
                row |= {"largest": comparison.ratio, "at": f"step {record.step}, {record.name}"}
            if not comparison.passed and len(self.failures) < MAX_FAILURES:
                self.failures.append(_failure(comparison))
        if self.finding is None:
            self.finding = first_difference(comparer, other, comparisons)
        for reason, count in comparer.skipped.items():
            if count:
                self.skipped[reason] = self.skipped.get(reason, 0) + count
        comparer.skipped = {}


def _failure(comparison: Comparison) -> dict[str, Any]:
    record = comparison.record
    return {
        "step": record.step,
        "kind": record.kind,
        "name": record.name,
        "rank": record.rank,
        "sample": record.sample,
        "difference": comparison.difference,
        "norm": comparison.norm,
        "bound": comparison.bound,
        "fault": comparison.fault,
    }


class Verification:
    """The runs of one certificate.

    Attributes:
        checks: results so far.
    """

    def __init__(
        self,
        shrunk: Shrunk,
        layouts: Sequence[Layout],
        folder: Path,
        start: Start,
        report: Callable[[Check], None],
    ) -> None:
        """Prepare to verify `layouts`, of which the first is the run's own.

        Args:
            folder: for captures, checkpoints and logs.
            report: called with each result.
        """
        self.folder, self.start, self.report = folder, start, report
        self.layouts = layouts
        unit = shrunk.config.training.micro_batch_size
        interleaved = shrunk.parallel.pipeline_schedule == "interleaved"
        groups = math.lcm(*(layout.dp * (layout.pp if interleaved else 1) for layout in layouts))
        self.batch = unit * groups * math.ceil(MICROBATCHES / groups)
        self.shrunk = shrunk
        self.checks: list[Check] = []
        self.references: dict[bool, Comparer] = {}
        self.saved: Path | None = None

    @property
    def has_dropout(self) -> bool:
        model = self.shrunk.config.model
        return bool(model.hidden_dropout or model.attention_dropout)

    def run(self, *, quick: bool) -> list[Check]:
        """Verify the own layout with its resumes, and unless `quick` the other layouts."""
        own, *others = self.layouts
        self._verify_own(own, () if quick else self._resumes(own, others))
        for layout in () if quick else others:
            check = self._check(f"layout {layout}", layout)
            self._fill(check, functools.partial(self._train, check, layout))
        return self.checks

    def _resumes(self, own: Layout, others: Sequence[Layout]) -> list[Layout]:
        """Layouts other than its own that the own layout's checkpoint is resumed in: one process, and a third."""
        fitting = [layout for layout in others if self._drops(layout) == self._drops(own)]
        return [Layout(), *fitting[:1]]

    def _drops(self, layout: Layout) -> bool:
        """True if dropout is compared in a layout: without tensor parallelism, which divides masks."""
        return self.has_dropout and layout.tp == 1

    def _check(self, name: str, layout: Layout) -> Check:
        check = Check(name=name, processes=layout.processes)
        if self.has_dropout and not self._drops(layout):
            check.skipped["dropout (set to 0, since tensor parallelism divides its masks)"] = 1
        self.checks.append(check)
        return check

    def _fill(self, check: Check, work: Callable[[], None]) -> None:
        try:
            work()
        except InputError as error:
            check.not_covered = str(error)
        except TrainingFault as error:
            check.error = str(error)
        self.report(check)

    def _verify_own(self, own: Layout, resumes: Sequence[Layout]) -> None:
        check = self._check(f"the run's layout, {own}", own)
        self._fill(check, functools.partial(self._train, check, own, saves=True))
        if not check.passed or check.not_covered:
            return
        for layout in (own, *resumes):
            check = self._check(f"resume of {own} in {layout}", layout)
            self._fill(check, functools.partial(self._resume, check, own, layout))

    def _train(self, check: Check, layout: Layout, *, saves: bool = False) -> None:
        """Train in a layout from the start, and compare."""
        comparer = self._comparer(self._drops(layout))
        config = self._configured(in_layout(self.shrunk, layout), self._drops(layout))
        last = STEPS
        if saves:
            last, self.saved = SAVED, self.folder / "checkpoints"
            config = _replaced(config, checkpoint={"save": str(self.saved)}, exit={"exit_interval": SAVED})
        capture = self._launch(check, config, layout.processes, "train" if saves else str(layout))
        check.add(comparer, capture, list(comparer.compare(capture, steps=range(last + 1))))

    def _resume(self, check: Check, own: Layout, layout: Layout) -> None:
        """Resume the own layout's checkpoint in a layout, and compare the state loaded and the next step."""
        drops = self._drops(own)
        config = one_process(self.shrunk) if layout == Layout() else in_layout(self.shrunk, layout)
        config = _replaced(self._configured(config, drops), checkpoint={"load": str(self.saved)})
        capture = self._launch(check, config, layout.processes, f"resume-{layout}")
        saved = Capture(self.folder / "capture-train")
        comparer = self._comparer(drops)
        state = Comparer(saved, [], comparer.rounding)
        exact = state.compare(capture, steps=range(SAVED, SAVED + 1), kinds=STATE, exact=True)
        check.add(state, capture, list(exact))
        check.add(comparer, capture, list(comparer.compare(capture, steps=range(SAVED + 1, STEPS + 1))))

    def _comparer(self, drops: bool) -> Comparer:
        """The reference, one process, with its spread; `drops` with dropout."""
        if drops not in self.references:
            label = "-dropout" if drops else ""
            config = self._configured(one_process(self.shrunk), drops)
            parts = max(max(layout.tp, layout.dp, 2) for layout in self.layouts)
            runs = {f"one{label}": None, f"fp64{label}": (0, 1)}
            runs |= {f"sums-{seed}{label}": (seed, parts) for seed in SEEDS}
            with ThreadPoolExecutor(2) as pool:
                captures = list(
                    pool.map(
                        lambda run: self._launch(Check(name=run[0]), config, 1, run[0], run[1]), runs.items()
                    )
                )
            self.references[drops] = Comparer(captures[0], captures[1:], rounding_of(config))
        return self.references[drops]

    def _configured(self, config: RunConfig, drops: bool) -> RunConfig:
        changes: dict[str, Any] = {"training": {"global_batch_size": self.batch}}
        if not drops:
            changes["model"] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return _replaced(config, **changes)

    def _launch(
        self,
        check: Check,
        config: RunConfig,
        processes: int,
        name: str,
        spread: tuple[int, int] | None = None,
    ) -> Capture:
        """Run a configuration, and read its capture.

        Raises:
            TrainingFault: the run did not end.
        """
        folder = self.folder / f"capture-{name.replace(' ', '-')}"
        capture = {"capture": str(folder), "capture_steps": STEPS, "capture_megabytes": CAPTURE_MEGABYTES}
        config = _replaced(config, capture=capture)
        check.command = shlex.join(command_words(config))
        failure = self.start(config, processes, spread, self.folder / folder.name.replace("capture", "log"))
        if failure is not None:
            raise TrainingFault(f"rank {failure.rank} of {check.name} failed:\n{failure.message}")
        return Capture(folder)


def rounding_of(config: RunConfig) -> Rounding:
    """The sizes that the rounding of a run depends on."""
    model, training = config.model, config.training
    tokens = (training.global_batch_size or training.micro_batch_size) * config.data.seq_length
    return Rounding(
        precision=training.precision,
        sum_length=max(
            model.hidden_size, model.ffn_hidden_size, model.num_attention_heads * model.kv_channels
        ),
        tokens=tokens,
        norm_length=CHUNK_SIZE,
    )


def _replaced(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The configuration with other values in some sections, plug-ins' by title."""
    core = {name: values for name, values in sections.items() if hasattr(config, name)}
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in core.items()}
    plugins = dict(config.plugins)
    for name in sections.keys() - core.keys():
        plugins[name] = dataclasses.replace(plugins[name], **sections[name])
    return dataclasses.replace(config, **changed, plugins=plugins)


def compare_captures(folders: Sequence[Path]) -> Check:
    """Compare two captures, of which the first is the reference; further ones are runs of it that round differently.

    Without these only the first step is compared, up to the gradients: an optimizer's step may amplify rounding.
    """
    reference, other, *spreads = (Capture(folder) for folder in folders)
    precision = reference.run.get("precision", "fp32")
    lengths = [record.place.shape[-1] for record in reference.records if record.place is not None]
    rounding = Rounding(precision, max(lengths, default=1), 1 << 16, CHUNK_SIZE)
    comparer = Comparer(reference, spreads, rounding)
    last = max(record.step for record in reference.records)
    kinds = KINDS if spreads else KINDS[: KINDS.index("metric") + 1]
    steps = range(comparer.start, (last if spreads else comparer.start + 1) + 1)
    check = Check(name=f"{folders[1]} against {folders[0]}", processes=math.prod(other.sizes.values()))
    if not spreads:
        check.skipped["updates and later steps, for which captures that round differently are needed"] = 1
    check.add(comparer, other, list(comparer.compare(other, steps=steps, kinds=kinds)))
    return check
