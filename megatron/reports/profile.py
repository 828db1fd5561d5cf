"""Profile some iterations: a trace for each rank, and a summary of where the time goes."""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from megatron.errors import InputError
from megatron.parallel.phases import Phases
from megatron.parallel.rendezvous import rank_names
from megatron.reports.config import ProfileConfig, ReportConfig
from megatron.training.config import RunConfig
from megatron.training.engine import Engine
from megatron.training.loop import Hook, Trainer

logger = logging.getLogger("megatron")

# Category of an event, by the first pattern that matches its path: its name, then those of its callers.
PATHS = {
    "waiting for data": re.compile(r"batch-generator"),
    "communication": re.compile(r"nccl|gloo:|c10d::|_Communication|grads-reduce|params-gather|-recv|-send"),
    "optimizer": re.compile(r"optimizer|Optimizer\.step"),
    # _Blocks is the attention of a CPU (ops/cpu/attention.py).
    "attention": re.compile(r"attention|flash|fmha|sdpa|_Blocks", re.IGNORECASE),
}
# Category of the other events, by name alone.
PRODUCTS = re.compile(
    r"::(mm|addmm|bmm|baddbmm|addbmm)$|_linear|gemm|gemv|cutlass|xmma|nvjet|splitk", re.IGNORECASE
)
COPIES = re.compile(r"^Mem(cpy|set)")
OPERATOR = re.compile(r"^(?!autograd::)\w+::|CompiledFxGraph")
# Calls by which the host waits for a GPU.
WAITS = re.compile(r"^cu(da)?\w*Synchronize")

TOP = 25


class Profiling(Hook):
    """Profile the iterations of --profile-step-start to --profile-step-end (--profile)."""

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        iterations = range(trainer.state.iteration + 1, trainer.train_iters + 1)
        config, log = trainer.config, trainer.log
        with Profiler(config, trainer.engine, iterations=iterations, log=log) as self.profiler:
            yield

    def after_step(self, trainer: Trainer) -> None:
        self.profiler.advance(trainer.state.iteration)


class Profiler:
    """Profiles the iterations of --profile-step-start to --profile-step-end on the ranks of --profile-ranks.

    If the run ends among them, within the `with` block, the profile has the iterations that are complete.
    """

    def __init__(
        self, config: RunConfig, engine: Engine, *, iterations: range, log: Callable[[str], None]
    ) -> None:
        """`iterations` are those of this run, numbered as in the log; `log` prints a line.

        Raises:
            InputError: the folder cannot be made.
        """
        flags, self.engine, self.log = config.plugin(ProfileConfig), engine, log
        wanted = range(flags.profile_step_start + 1, flags.profile_step_end + 1)
        self.steps = range(wanted.start, min(wanted.stop, iterations.stop)) if flags.profile else range(0)
        self.last = iterations.start - 1
        self.ranks = flags.profile_ranks
        self.torch: torch.profiler.profile | None = None
        self.annotations = ExitStack()
        if not flags.profile:
            return
        if not self.steps or self.steps.start not in iterations:
            log(
                f"--profile: iterations {wanted.start} to {wanted[-1]} are not in this run, which has "
                f"{iterations.start} to {iterations[-1]}; nothing is profiled"
            )
            self.steps = range(0)
            return
        self.folder = (
            Path(config.plugin(ReportConfig).tensorboard_dir or config.checkpoint.save or "") / "profile"
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--profile: {self.folder}: {error.strerror}") from None

    def __enter__(self) -> Profiler:
        if self.steps.start == self.last + 1:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.steps and self.last >= self.steps.start - 1:
            self._finish()

    def advance(self, iteration: int) -> None:
        """Start or finish the profile if it is due after this iteration."""
        self.last = iteration
        if not self.steps:
            return
        if self.torch is not None:
            self.torch.step()
        if iteration == self.steps.start - 1:
            self._start()
        elif iteration == self.steps[-1]:
            self._finish()

    def _start(self) -> None:
        if self.engine.mesh.world.rank not in self.ranks:
            return
        on_gpu = self.engine.mesh.device.type == "cuda"
        if on_gpu:  # keep kernels of earlier iterations out of the profile
            torch.cuda.synchronize()
        self.torch = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=len(self.steps), repeat=1),
        )
        self.torch.start()
        self.torch.step()  # the warm-up is the profiler's own
        self.annotations.enter_context(annotated(self.engine.phases))

    def _finish(self) -> None:
        """Write the profile of the iterations that are complete."""
        done, self.steps = range(self.steps.start, self.last + 1), range(0)
        self.annotations.close()
        profiler, self.torch = self.torch, None
        if profiler is not None:
            profiler.stop()
        if not done:
            self.log(f"--profile: the run ends within iteration {done.start}, the first; nothing is kept")
            return
        try:
            if profiler is not None:
                self._write(profiler, done)
        except OSError as error:
            logger.warning(
                f"--profile: {self.folder}: the profile of rank {self.engine.mesh.world.rank} cannot be written, and "
                f"is lost: {error.strerror}"
            )
            return
        which = self.ranks[0] if len(self.ranks) == 1 else "*"
        self.log(
            f"profile of iterations {done[0]} to {done[-1]}, {rank_names(self.ranks)}: summary in "
            f"{self._file('.txt', done, which)}, the trace in {self._file(TRACE, done, which)}"
        )

    def _write(self, profiler: torch.profiler.profile, done: range) -> None:
        mesh = self.engine.mesh
        rank = mesh.world.rank
        profiler.export_chrome_trace(str(self._file(TRACE, done, rank)))
        device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "a CPU"
        title = f"iterations {done[0]} to {done[-1]} of rank {rank}, on {device}"
        page = summary(profiler.events(), title, len(done))
        self._file(".txt", done, rank).write_text(page, encoding="utf-8")

    def _file(self, suffix: str, done: range, rank: int | str) -> Path:
        return self.folder / f"iterations-{done[0]}-{done[-1]}-rank-{rank}{suffix}"


@contextmanager
def annotated(phases: Phases) -> Iterator[None]:
    """Name all phases in a profile within the block."""
    phases.observers.append(torch.profiler.record_function)
    try:
        yield
    finally:
        phases.observers.remove(torch.profiler.record_function)


# The suffix that TensorBoard's profile plugin looks for.
TRACE = ".pt.trace.json.gz"


@dataclasses.dataclass(frozen=True)
class Work:
    """Time in an operator or kernel itself, in microseconds."""

    name: str
    kind: str
    time: float


def summary(events: Sequence[FunctionEvent], title: str, iterations: int) -> str:
    """Summarize a profile: time by category, and the operators or kernels that take most.

    Events after the given number of complete iterations do not count.
    """
    steps = sorted(
        (
            e.time_range
            for e in events
            if e.device_type == DeviceType.CPU and e.name.startswith("ProfilerStep")
        ),
        key=lambda t: t.start,
    )
    begin, host_end = steps[0].start, steps[iterations - 1].end
    if len(steps) > iterations:
        events = [e for e in events if e.time_range.start < host_end]
    host = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async]
    annotations = {e.name for e in host if e.is_user_annotation}
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and e.name not in annotations]
    end = max([host_end, *(e.time_range.end for e in kernels)])
    rest: dict[str, float] = {}
    if kernels:
        work = list(_device_work(host, kernels))
        waits = [e.time_range for e in host if WAITS.match(e.name) and e.time_range.start < host_end]
        rest["(the GPU idle)"] = end - begin - _covered(e.time_range for e in kernels)
        rest["(the host waiting for the GPU)"] = sum(wait.elapsed_us() for wait in waits)
    else:
        (thread,) = {e.thread for e in host if e.name.startswith("ProfilerStep")}
        work = [
            Work(_label(e), _kind(e.name, _callers(e), kernel=False), e.self_cpu_time_total)
            for e in host
            if e.thread == thread
        ]
    whole = (end - begin) / iterations / 1000
    kinds: dict[str, float] = collections.defaultdict(float)
    names: dict[str, float] = collections.defaultdict(float)
    for item in work:
        kinds[item.kind] += item.time
        names[item.name] += item.time
    calls = collections.Counter(item.name for item in work)

    def row(name: str, us: float, count: str = "") -> str:
        ms = us / iterations / 1000
        return f"{name[:70]:<70}{count:>8}{ms:10.2f}{ms / whole:8.1%}"

    return "\n".join(
        [
            f"{title}: {whole:.2f} ms an iteration",
            "",
            f"{'Per iteration, by what it is for':<70}{'':>8}{'ms':>10}{'share':>8}",
            *(row(*pair) for pair in _largest_first(kinds)),
            *(row(*pair) for pair in rest.items()),
            "",
            f"{'By kernel' if kernels else 'By operator, without what it calls':<70}{'calls':>8}{'ms':>10}{'share':>8}",
            *(row(name, us, f"{calls[name] / iterations:.0f}") for name, us in _largest_first(names)[:TOP]),
            "",
        ]
    )


def _largest_first(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda pair: -pair[1])


def _device_work(host: list[FunctionEvent], kernels: list[FunctionEvent]) -> Iterator[Work]:
    """Yield every kernel, with the category of the operator that launched it. Kernels of a CUDA graph have none."""
    unknown = collections.Counter(e.name for e in kernels)
    for event in host:
        for kernel in event.kernels:
            unknown[kernel.name] -= 1
            yield Work(
                kernel.name, _kind(kernel.name, [event.name, *_callers(event)], kernel=True), kernel.duration
            )
    for event in kernels:
        if unknown[event.name] > 0:
            unknown[event.name] -= 1
            yield Work(event.name, _kind(event.name, [], kernel=True), event.time_range.elapsed_us())


def _kind(name: str, callers: list[str], *, kernel: bool) -> str:
    path = "/".join([name, *callers])
    for kind, pattern in PATHS.items():
        if pattern.search(path):
            return kind
    if PRODUCTS.search(name):
        return "products"
    if kernel:
        return "copies" if COPIES.match(name) else "pointwise and the rest"
    return "pointwise and the rest" if OPERATOR.search(name) else "Python and autograd"


def _callers(event: FunctionEvent) -> list[str]:
    names, caller = [], event.cpu_parent
    while caller is not None:
        names.append(caller.name)
        caller = caller.cpu_parent
    return names


def _label(event: FunctionEvent) -> str:
    """Name of an event; for compiled code, whose name is a hash, the operator that calls it."""
    if "CompiledFxGraph" not in event.name:
        return event.name
    where = next((name for name in _callers(event) if not name.startswith("Torch-Compiled")), "the model")
    return f"compiled code in {where}"


def _covered(spans: Iterable) -> float:
    """Microseconds during which at least one of the spans runs."""
    total, last = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, last))
        last = max(last, span.end)
    return total
