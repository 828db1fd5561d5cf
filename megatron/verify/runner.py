"""Run a shrunk run in one process and in layouts, and compare them."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.errors import InputError, TrainingFault
from megatron.model.flops import attention_linears
from megatron.optim.norms import CHUNK_SIZE
from megatron.training.config import RunConfig
from megatron.verify.compare import Comparer, Comparison
from megatron.verify.format import KINDS, Capture
from megatron.verify.launch import Failure
from megatron.verify.layouts import Layout
from megatron.verify.locate import Finding, first_difference
from megatron.verify.reference import STATE_KINDS, Reference
from megatron.verify.shrink import Shrunk, command_words, in_layout, one_process
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
# Kinds of records of a step before the optimizer's.
FIRST_STEP = frozenset(KINDS[: KINDS.index("metric") + 1])

# Starts a configuration in a number of processes, with the arguments of `DividedSums` if sums are to be divided, and
# the prefix of log files. Returns the failure, if any.
Start = Callable[[RunConfig, int, "tuple[int, int] | None", Path], "Failure | None"]


@dataclasses.dataclass(kw_only=True)
class Check:
    """The result of comparing one run.

    Attributes:
        command: flags of the run.
        kinds: by kind of record, the number compared, and the comparison with the largest difference over its bound.
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
            row = self.kinds.setdefault(record.kind, empty_row())
            row["compared"] += 1
            row["failed"] += not comparison.passed
            if comparison.ratio > row["largest"]:
                row |= {"largest": comparison.ratio, "at": f"step {record.step}, {record.name}"}
                row |= {
                    "difference": comparison.difference,
                    "norm": comparison.norm,
                    "bound": comparison.bound,
                }
            if not comparison.passed and len(self.failures) < MAX_FAILURES:
                self.failures.append(_failure(comparison))
        if self.finding is None:
            self.finding = first_difference(comparer, other, comparisons)
        for reason, count in comparer.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        comparer.skipped = {}


def empty_row() -> dict[str, Any]:
    """A value of `Check.kinds` before any comparison."""
    return {
        "compared": 0,
        "failed": 0,
        "largest": 0.0,
        "difference": 0.0,
        "norm": 0.0,
        "bound": 0.0,
        "at": "",
    }


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


class Runs:
    """Runs of one shrunk configuration.

    Attributes:
        comparers: references by whether they have dropout: one process, with its spread.
    """

    def __init__(self, shrunk: Shrunk, layouts: Sequence[Layout], folder: Path, start: Start) -> None:
        """Prepare to run `layouts`.

        Args:
            folder: for captures and logs.
        """
        self.shrunk, self.folder, self.start = shrunk, folder, start
        unit = shrunk.config.training.micro_batch_size
        per_stage = {"interleaved": 1, "dualpipe-v": 2}.get(shrunk.parallel.pipeline_schedule or "")
        groups = math.lcm(*(layout.dp * (layout.pp * per_stage if per_stage else 1) for layout in layouts))
        self.batch = unit * groups * math.ceil(MICROBATCHES / groups)
        # Parts that the runs of the reference's spread divide sums into.
        self.parts = max(max(layout.tp * layout.cp, layout.dp, 2) for layout in layouts)
        self.comparers: dict[bool, Comparer] = {}

    def comparer(self, drops: bool) -> Comparer:
        if drops not in self.comparers:
            label = "-dropout" if drops else ""
            config = self._changed(one_process(self.shrunk), drops)
            runs = {f"one{label}": None, f"fp64{label}": (0, 1)}
            runs |= {f"sums-{seed}{label}": (seed, self.parts) for seed in SEEDS}
            with ThreadPoolExecutor(2) as pool:
                captures = list(
                    pool.map(lambda run: self.launch(Check(name=run[0]), config, *run), runs.items())
                )
            self.comparers[drops] = Comparer(Reference(captures[0], captures[1:], rounding_of(config)))
        return self.comparers[drops]

    def configured(self, layout: Layout, drops: bool, **sections: dict[str, Any]) -> RunConfig:
        """The configuration in a layout, without dropout unless `drops`, and with other values in some sections.

        Raises:
            InputError: the model does not fit the layout.
        """
        # A run of one process keeps its flags, such as those of recomputation; the reference does not.
        is_plain = layout == Layout() and layout != self.shrunk.layout
        config = one_process(self.shrunk) if is_plain else in_layout(self.shrunk, layout)
        return self._changed(config, drops, **sections)

    def _changed(self, config: RunConfig, drops: bool, **sections: dict[str, Any]) -> RunConfig:
        changes: dict[str, Any] = {"training": {"global_batch_size": self.batch}, **sections}
        if not drops:
            changes["model"] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return _replaced(config, **changes)

    def launch(
        self, check: Check, config: RunConfig, name: str, spread: tuple[int, int] | None = None
    ) -> Capture:
        """Run a configuration in the processes of its check, and read its capture.

        Raises:
            TrainingFault: the run failed or timed out.
        """
        folder = self.folder / f"capture-{name.replace(' ', '-')}"
        capture = {"capture": str(folder), "capture_steps": STEPS, "capture_megabytes": CAPTURE_MEGABYTES}
        config = _replaced(config, capture=capture)
        # Without the name of a temporary folder.
        check.command = shlex.join(command_words(config)).replace(f"{self.folder}/", "")
        # An earlier attempt at this run may have failed.
        shutil.rmtree(folder, ignore_errors=True)
        log = self.folder / folder.name.replace("capture", "log")
        failure = self.start(config, check.processes, spread, log)
        if failure is not None:
            raise TrainingFault(f"rank {failure.rank} of {check.name} failed:\n{failure.message}")
        return Capture(folder)


class Verification:
    """The checks of one certificate.

    Attributes:
        checks: results so far.
    """

    def __init__(self, runs: Runs, layouts: Sequence[Layout], report: Callable[[Check], None]) -> None:
        """Prepare to verify `layouts`, of which the first is the run's own; `report` is called with each result."""
        self.runs, self.layouts, self.report = runs, layouts, report
        model = runs.shrunk.config.model
        self.has_dropout = bool(model.hidden_dropout or model.attention_dropout)
        self.checks: list[Check] = []

    @property
    def saved(self) -> Path:
        """Folder of the checkpoint of the run in its own layout."""
        return self.runs.folder / "checkpoints"

    def run(self, *, quick: bool) -> list[Check]:
        """Verify the own layout with its resumes, and unless `quick` the other layouts."""
        own, *others = self.layouts
        check = self.verify(own, saves=True)
        if check.passed and not check.not_covered:
            for layout in [own] if quick else self._resumes(own, others):
                self.resume(layout)
        for layout in () if quick else others:
            self.verify(layout)
        return self.checks

    def _resumes(self, own: Layout, others: Sequence[Layout]) -> list[Layout]:
        """Layouts that the own layout's checkpoint is resumed in: its own, one process, and a third."""
        fitting = [x for x in others if x != Layout() and self._drops(x) == self._drops(own)]
        return list(dict.fromkeys((own, Layout(), *fitting[:1])))

    def _drops(self, layout: Layout) -> bool:
        """True if dropout is compared in a layout: without tensor parallelism, which divides masks."""
        return self.has_dropout and layout.tp == 1

    def verify(self, layout: Layout, *, saves: bool = False) -> Check:
        """Train in a layout from the start, and compare; with `saves` it is the own layout, which saves and ends."""
        check = Check(name=f"the run's layout, {layout}" if saves else f"layout {layout}")
        sections: dict[str, dict[str, Any]] = {}
        if saves:
            sections = {"checkpoint": {"save": str(self.saved)}, "exit": {"exit_interval": SAVED}}
        train = functools.partial(self._train, check, layout, saves)
        return self._fill(check, layout, self._drops(layout), sections, train)

    def resume(self, layout: Layout) -> Check:
        """Resume the own layout's checkpoint in a layout, and compare the state loaded and the next step."""
        check = Check(name=f"resume of {self.layouts[0]} in {layout}")
        resume = functools.partial(self._resume, check, layout)
        sections = {"checkpoint": {"load": str(self.saved)}}
        return self._fill(check, layout, self._drops(self.layouts[0]), sections, resume)

    def _fill(
        self,
        check: Check,
        layout: Layout,
        drops: bool,
        sections: dict[str, dict[str, Any]],
        work: Callable[[RunConfig], None],
    ) -> Check:
        check.processes = layout.processes
        if self.has_dropout and not drops:
            check.skipped["dropout (set to 0, since tensor parallelism divides its masks)"] = 1
        self.checks.append(check)
        try:
            config = self.runs.configured(layout, drops, **sections)
        except InputError as error:
            check.not_covered = str(error)
        else:
            try:
                work(config)
            except (InputError, TrainingFault) as error:
                check.error = str(error)
        self.report(check)
        return check

    def _train(self, check: Check, layout: Layout, saves: bool, config: RunConfig) -> None:
        comparer = self.runs.comparer(self._drops(layout))
        capture = self.runs.launch(check, config, "train" if saves else str(layout))
        steps = range((SAVED if saves else STEPS) + 1)
        check.add(comparer, capture, list(comparer.compare(capture, steps=steps)))

    def _resume(self, check: Check, layout: Layout, config: RunConfig) -> None:
        capture = self.runs.launch(check, config, f"resume-{layout}")
        comparer = self.runs.comparer(self._drops(self.layouts[0]))
        state = Comparer(
            Reference(Capture(self.runs.folder / "capture-train"), [], comparer.reference.rounding)
        )
        exact = state.compare(capture, steps=range(SAVED, SAVED + 1), kinds=STATE_KINDS, exact=True)
        check.add(state, capture, list(exact))
        check.add(comparer, capture, list(comparer.compare(capture, steps=range(SAVED + 1, STEPS + 1))))


def rounding_of(config: RunConfig) -> Rounding:
    """The sizes that the rounding of a run depends on."""
    model, training = config.model, config.training
    tokens = (training.global_batch_size or training.micro_batch_size) * config.data.seq_length
    return Rounding(
        precision=training.precision,
        sum_length=max(model.ffn_hidden_size, *(inputs for inputs, _, _ in attention_linears(model))),
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

    Without these only the state before the first step and the first step are compared, the latter up to the gradients:
    an optimizer's step may amplify rounding. The second capture may be of another program. Except for parameters, what
    it lacks is not compared.
    """
    captures = [Capture(folder) for folder in folders]
    for capture in captures:
        capture.check_ranks()
    reference, other, *spreads = captures
    precision = reference.run.get("precision", "fp32")
    lengths = [record.place.shape[-1] for record in reference.records if record.place is not None]
    rounding = Rounding(precision, max(lengths, default=1), 1 << 16, CHUNK_SIZE)
    comparer = Comparer(Reference(reference, spreads, rounding))
    check = Check(name=f"{folders[1]} against {folders[0]}", processes=other.num_ranks)
    if not spreads:
        check.skipped["updates and later steps, for which captures that round differently are needed"] = 1
    comparisons: list[Comparison] = []
    for step in sorted({record.step for record in reference.records}):
        if step <= comparer.reference.start + 1 or spreads:
            kinds = frozenset(KINDS) if spreads or step == comparer.reference.start else FIRST_STEP
            comparisons += comparer.compare(other, steps=range(step, step + 1), kinds=kinds, partial=True)
    check.add(comparer, other, comparisons)
    if not comparisons:
        check.error = "the captures have no step and kind of tensor in common"
    return check
