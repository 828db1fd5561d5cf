"""Steps of the optimizer that are validated afterwards: the same bits as without, and the time of a step by theory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from torch import Tensor

from megatron import plugins
from megatron.data.gpt_dataset import GPTBatch
from megatron.errors import InputError, TrainingFault
from megatron.parallel.collectives import Pending, start_all_reduce
from megatron.parallel.mesh import Axis, Mesh, init_mesh
from megatron.parallel.schedules import (
    CHUNKED,
    SCHEDULES,
    SPLIT,
    Action,
    BackwardWeight,
    Compute,
    Forward,
    Receive,
    Send,
    Validate,
    one_and_two,
    part_of,
    with_transfers,
)
from megatron.performance import post_validation
from megatron.performance.post_validation import PostValidation
from megatron.performance.validation_lists import with_validation
from megatron.planner.dry_run import DryRun
from megatron.pretrain_gpt import GPT
from megatron.reports.experts import ExpertReport
from megatron.training.engine import Engine

FLAG = "--enable-optimizer-post-validation"
MICROBATCHES = 4
UNTIED = "--untie-embeddings-and-output-weights"
# Gradients of this model have norms of about 1; those that are multiplied are clipped.
FREE = "--clip-grad 100 --on-non-finite skip"
LARGE, INFINITE = 1e6, float("inf")


def batches(step: int, replica: int) -> Iterator[GPTBatch]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(60, (2, 17), generator=generator)
        yield GPTBatch(
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            loss_mask=torch.ones(2, 16),
            position_ids=torch.arange(16).expand(2, 16),
        )


@dataclasses.dataclass
class Result:
    """State after a run, the statistics of all steps, and the numbers of updates made early and undone."""

    state: list[Tensor]
    stats: list[dict[str, float]]
    early: int = 0
    undone: int = 0


def trained(mesh: Mesh, flags: str, faults: dict[int, float], steps: int, plant: Any = None) -> Result:
    """Train; in the steps of `faults` the last stage's gradients are multiplied by their values.

    Args:
        plant: puts a fault into the validation.
    """
    engine = engine_of(mesh, config_of(flags))
    validation = getattr(engine.run_passes, "__self__", None)
    result = Result([], [])
    report = ExpertReport()
    report.during_run(cast(Any, SimpleNamespace(config=engine.config, engine=engine, mesh=mesh)))
    sums = list(engine.sums)
    if isinstance(validation, PostValidation):
        _count(validation, result)
        if plant is not None:
            plant(validation)
    reduce_gradients, pending = engine.reduce_gradients, []
    for step in range(steps):

        def reduce_and_multiply(step: int = step) -> None:
            reduce_gradients()
            if step in faults and mesh.pp.rank == mesh.pp.size - 1:
                for grad in engine.optimizer.grads:
                    grad.mul_(faults[step])

        engine.reduce_gradients = reduce_and_multiply
        _, stats = engine.train_step(
            batches(step, mesh.dp.rank),
            num_microbatches=MICROBATCHES,
            consumed_samples=100 * step,
            lr=1e-2,
            weight_decay=0.1,
        )
        pending.append(stats)
    engine.optimizer.finish()
    engine.buffer.gather.finish()
    result.state = [*state_of(engine), *sums]
    result.stats = [{name: x.item() for name, x in stats.items()} for stats in pending]
    return result


def _count(validation: PostValidation, result: Result) -> None:
    save, restore = validation.backup.save, validation.backup.restore

    def counted_save() -> None:
        result.early += 1
        save()

    def counted_restore() -> None:
        result.undone += 1
        restore()

    validation.backup.save, validation.backup.restore = counted_save, counted_restore


def state_of(engine: Engine) -> list[Tensor]:
    """Parameters, master weights, optimizer state, number of steps, and the states of rules as text."""
    optimizer = engine.optimizer
    rules = [torch.tensor(list(json.dumps(rule.state()).encode())) for rule in optimizer.rules]
    state = [x for pieces in optimizer.state.values() for x in pieces]
    return [engine.buffer.params, *engine.buffer.masters, *state, optimizer.step_count, *rules]


# Flags, faults by step, and how many of the steps after the first are updated early, and undone.
Case = tuple[str, dict[int, float], int, int]


def compare(flags: str, cases: list[Case], steps: int) -> list[str]:
    """Differences from runs without the flag."""
    found = []
    with init_mesh(config_of(flags).parallel, CPU) as mesh:
        for more, faults, early, undone in cases:
            plain = trained(mesh, f"{flags} {more}", faults, steps)
            late = trained(mesh, f"{flags} {more} {FLAG}", faults, steps)
            what = f"rank {mesh.world.rank}, {more} {faults}"
            for i, (x, y) in enumerate(zip(plain.state, late.state, strict=True)):
                if not torch.equal(x, y):
                    found.append(f"{what}: state {i} differs")
            same = [repr(a) == repr(b) for a, b in zip(plain.stats, late.stats, strict=True)]
            if not all(same):
                found.append(f"{what}: statistics of step {same.index(False)} differ")
            if (late.early, late.undone) != (early, undone):
                found.append(f"{what}: {late.early} early, {late.undone} undone")
    return found


def cases(steps: int) -> list[Case]:
    """No step is clipped, all are, some are; and some overflow."""
    last = steps - 1
    return [
        (FREE, {}, last, 0),
        ("--clip-grad 1e-3", {}, 0, 0),
        (FREE, {2: LARGE, 3: LARGE, 5: INFINITE, last: LARGE}, last - 3, 3),
        ("--clip-grad 100 --bf16", {3: INFINITE}, 3, 1),  # no step changes weights after this one
        # The loss scale doubles after three steps without an overflow.
        (f"{FREE} --fp16 --initial-loss-scale 1024 --loss-scale-window 3", {4: INFINITE}, last - 1, 1),
    ]


P2, P3, P4 = (f"--pipeline-model-parallel-size {n} --pipeline-schedule" for n in (2, 3, 4))
SHARDED = "--use-distributed-optimizer"
V = "--num-layers 8 --num-layers-per-virtual-pipeline-stage"
# Loads are states of the router, terms of its loss, and reported.
MIXTURE = """--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"""


@pytest.mark.parametrize(
    ("processes", "flags", "cases", "steps"),
    [
        (2, f"{P2} zb-h2 {UNTIED}", [cases(8)[2], cases(8)[4]], 8),
        (2, f"{P2} zb-h2 {UNTIED} {MIXTURE}", [cases(8)[2]], 8),
        # The middle stage has no embedding group, and all stages make a group afterwards.
        (6, f"{P3} zb-h2 --num-layers 3 {UNTIED}", [(FREE, {1: LARGE}, 1, 1)], 3),
        *(
            pytest.param(processes, flags, cases(20)[2:], 20, marks=pytest.mark.slow)
            for processes, flags in (
                (2, f"{P2} zb-h1 {UNTIED}"),
                (2, f"{P2} zb-v {V} 2"),
                (4, f"{P4} zb-h2 {UNTIED}"),
            )
        ),
        *(
            pytest.param(processes, flags, cases(20)[2:3], 20, marks=pytest.mark.slow)
            for processes, flags in (
                (2, f"{P2} zb-h2 {UNTIED} --recompute-granularity full"),
                (4, f"{P4} zb-v {V} 1"),
                (4, f"{P4} auto {UNTIED} --spike-skip 20"),
                (4, f"{P2} zb-h2 {UNTIED} {SHARDED} --overlap-param-gather --optimizer muon"),
                (4, f"{P2} zb-v {V} 2 {SHARDED} --grad-reduce-in-bf16 --bf16"),
                (4, f"{P2} zb-h2 {UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
                (4, f"{P2} zb-v {V} 2 {MIXTURE} --expert-model-parallel-size 2"),
                (
                    4,
                    f"{P2} zb-h2 {UNTIED} {MIXTURE} --moe-grouped-gemm --expert-model-parallel-size 2 {SHARDED}",
                ),
            )
        ),
    ],
)
def test_same_bits(processes: int, flags: str, cases: list[Case], steps: int) -> None:
    found = run_distributed(compare, processes, flags, cases, steps)
    assert not any(found), found


# ---- whole runs

RUN = f"""
    {P2} zb-h2 {UNTIED} --train-iters 14 --global-batch-size 8 --log-interval 5 --eval-interval 4 --eval-iters 1
    --save-interval 3 --log-params-norm --check-weight-replicas-interval 4 --num-workers 0
    --distributed-timeout-minutes 1
"""


def run(flags: str) -> str:
    """Run a pretraining; returns the fault that ended it, or ""."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            plugins.run(config_of(flags), GPT)
        except TrainingFault as fault:
            return str(fault)
    return ""


def outcome(folder: Path, flags: str) -> tuple[list[str], dict[str, bytes], list[dict[str, float]]]:
    """Faults, tensors of all checkpoints, and metrics without times."""
    faults = run_distributed(run, 2, f"{RUN} {flags} --save {folder} --metrics-path {folder / 'metrics'}")
    tensors = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    rows = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]
    timed = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
    return faults, tensors, [{k: v for k, v in row.items() if k not in timed} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "checkpoints"),
    [
        # The scale overflows by itself each time it has grown to about 2^20; other steps are clipped or not.
        ("--fp16 --loss-scale-window 2 --hysteresis 2 --clip-grad 0.5 --on-non-finite skip", 5),
        ("--fp16 --loss-scale 2e14", 0),  # stops at the first step
        (f"{MIXTURE} --fp16 --loss-scale-window 2 --clip-grad 0.5 --on-non-finite skip", 5),
    ],
)
def test_checkpoints_and_metrics_of_a_run(tmp_path: Path, flags: str, checkpoints: int) -> None:
    plain, late = (outcome(tmp_path / name, f"{flags} {more}") for name, more in (("a", ""), ("b", FLAG)))
    assert {Path(name).parts[0] for name in plain[1]} == {
        f"iter_{3 * (i + 1) - (i == 4):07}" for i in range(checkpoints)
    }
    assert plain == late


# ---- faults


def without_restoring(validation: PostValidation) -> None:
    validation.backup.restore = lambda: None


def with_sums_of_repeated_passes(validation: PostValidation) -> None:
    validation.engine.sums.clear()


def without_gradients(validation: PostValidation) -> None:
    grads = {id(grad) for grad in validation.optimizer.grads}
    validation.backup.tensors = [x for x in validation.backup.tensors if id(x) not in grads]
    validation.backup.copies = [torch.empty_like(x) for x in validation.backup.tensors]


def with_another_divisor(validation: PostValidation) -> None:
    decide = validation.optimizer.decide

    def decide_otherwise(norm: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grad_scale, stats = decide(norm, losses)
        return torch.where(stats["grad norm"] > 100, 1.001 * grad_scale, grad_scale), stats

    validation.optimizer.decide = decide_otherwise


def with_the_norm_of_the_step_before(validation: PostValidation) -> None:
    norms = [torch.zeros((), dtype=torch.float64)]

    def start(x: Tensor, axis: Axis) -> Pending:
        norms.append(start_all_reduce(x, axis).wait())
        return Pending(norms[-2])

    post_validation.start_all_reduce = start


def with_old_forward_passes(validation: PostValidation) -> None:
    validate = validation.validate

    def validate_and_go_on() -> bool:
        validate()
        return True

    validation.validate = validate_and_go_on


FAULTS = (
    without_restoring,
    with_sums_of_repeated_passes,
    without_gradients,
    with_another_divisor,
    with_the_norm_of_the_step_before,
    with_old_forward_passes,
)


def with_faults(flags: str, faults: dict[int, float], steps: int) -> list[bool]:
    """For no fault and each of `FAULTS`, whether it changes bits."""
    found = []
    with init_mesh(config_of(flags).parallel, CPU) as mesh:
        plain = trained(mesh, flags, faults, steps)
        for plant in (None, *FAULTS):
            late = trained(mesh, f"{flags} {FLAG}", faults, steps, plant)
            post_validation.start_all_reduce = start_all_reduce
            found.append(not all(map(torch.equal, plain.state, late.state)))
    return found


@pytest.mark.slow
def test_faults_change_bits() -> None:
    flags = f"{P2} zb-h2 {UNTIED} {MIXTURE} {FREE} --fp16 --initial-loss-scale 1000"
    found = run_distributed(with_faults, 2, flags, {2: LARGE, 5: INFINITE}, 8)
    assert found == [[False] + [True] * len(FAULTS)] * 2


# ---- the time of a step


def lists_of(name: str, stages: int, microbatches: int) -> tuple[list[list[Action]], bool]:
    """Actions of all stages, and whether the schedule is V-shaped."""
    chunks, v_shaped = 1 + (name in CHUNKED), name in CHUNKED
    return with_transfers(SCHEDULES[name](stages, chunks, microbatches), stages, v_shaped), v_shaped


def step_time(lists: list[list[Action]], stages: int, v_shaped: bool) -> float:
    """Time from the end of the third step to that of the fourth, in passes of equal time.

    A `Validate` waits until all stages have ended the step before.
    """
    chunks = 1 + max(a.chunk for row in lists for a in row if isinstance(a, Compute))
    ended: dict[tuple, float] = {}  # by step, and the passes below
    ends = [[0.0] * stages for _ in range(5)]
    todo = [
        [(step, a) for step in range(1, 5) for a in row if not isinstance(a, Send | Receive)] for row in lists
    ]
    clock, progress = [0.0] * stages, True
    while progress:
        progress = False
        for rank, row in enumerate(todo):
            while row:
                step, action = row[0]
                if isinstance(action, Validate):
                    if any(s < step for other in todo for s, _ in other):
                        break
                    clock[rank] = max(clock[rank], *ends[step - 1])
                elif isinstance(action, BackwardWeight):
                    clock[rank] += 1
                else:
                    part = part_of(rank, action.chunk, stages, v_shaped)
                    forward = isinstance(action, Forward)
                    before = part - 1 if forward else part + 1
                    if 0 <= before < stages * chunks:
                        needed = (step, forward, before, action.microbatch)
                        if needed not in ended:
                            break
                        clock[rank] = max(clock[rank], ended[needed])
                    clock[rank] += one_and_two(rank, action)
                    ended[step, forward, part, action.microbatch] = clock[rank]
                ends[step][rank] = clock[rank]
                row.pop(0)
                progress = True
    assert not any(todo)
    return max(ends[4]) - max(ends[3])


def times(name: str, stages: int, microbatches: int) -> tuple[float, float]:
    """Time of a step without and with post-validation."""
    lists, v_shaped = lists_of(name, stages, microbatches)
    at_once = [[Validate(), *row] for row in lists]
    return step_time(at_once, stages, v_shaped), step_time(with_validation(lists), stages, v_shaped)


def test_time_of_a_step() -> None:
    for p, m in ((2, 4), (3, 5), (4, 8), (4, 16), (8, 16), (8, 64)):
        assert times("zb-h2", p, m) == (3 * m + p - 1, 3 * m)


def test_passes_before_a_validation_are_forward_and_leave_no_transfer_open() -> None:
    for name, stages, count in itertools.product(SPLIT, (2, 3, 4, 6), (1, 2, 5, 12)):
        if name == "dualpipe-v" and count < 2 * stages:
            continue
        lists, _ = lists_of(name, stages, count)
        validated = with_validation(lists)
        assert [[a for a in row if a != Validate()] for row in validated] == lists
        open_transfers = collections.Counter()
        for rank, row in enumerate(validated):
            for action in row[: row.index(Validate())]:
                if isinstance(action, Send):
                    open_transfers[rank, action.peer, action.microbatch] += 1
                elif isinstance(action, Receive):
                    open_transfers[action.peer, rank, action.microbatch] -= 1
                else:
                    assert isinstance(action, Forward)
        assert not any(open_transfers.values())


@pytest.mark.slow
def test_time_on_four_processes(command: Callable, tmp_path: Path) -> None:
    """Passes take as long as a sleep, so that four processes need no four cores."""
    output = tmp_path / "parallel.json"
    command("benchmarks/parallel.py", "--only", "validation", "--rounds", 2, "--output", output)
    rows = json.loads(output.read_text())["validation"]["results"]
    assert rows["time validated / waiting"] == pytest.approx(rows["by theory"], rel=0.03)
    assert rows["validated, always clipped"]["seconds"] < 1.03 * rows["waits"]["seconds"]


def test_memory_of_the_copy() -> None:
    """Master weights, two moments and gradients of the shard, and the number of steps, in fp32."""
    flags = f"{P2} zb-h2 {UNTIED} --bf16 --use-distributed-optimizer --global-batch-size 8"
    plain, late = (
        DryRun.from_config(config_of(f"{flags} {more}"), GPT, 4).count(0).memory for more in ("", FLAG)
    )
    assert late["buffers"] - plain["buffers"] == 4 * plain["master weights"] + 4
    assert late["peak"] - plain["peak"] == 4 * plain["master weights"] + 4


# ---- refusals


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("", "needs --pipeline-model-parallel-size above 1"),
        (f"--pipeline-model-parallel-size 2 {UNTIED}", "gains nothing with --pipeline-schedule 1f1b"),
        (f"{P2} zb-h2", "waits for the last one's gradient of the embedding table"),
        (f"{P2} zb-h2 {UNTIED} --mtp-num-layers 1", "without --mtp-num-layers"),
        (f"{P2} zb-h2 {UNTIED} --cpu-offload-optimizer", "--cpu-offload-optimizer"),
        (f"{P2} zb-h2 {UNTIED} --cpu-offload-activations", "--cpu-offload-activations"),
        (f"{P2} zb-h2 {UNTIED} --log-num-zeros-in-grad", "--log-num-zeros-in-grad"),
    ],
)
def test_refusals(flags: str, error: str) -> None:
    with pytest.raises(InputError, match=f"{FLAG}.*{error}"):
        config_of(f"{flags} {FLAG}")
