"""Kill small runs at random moments, restart them, and compare them with undisturbed runs."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

from distributed import free_port, rank_environment

from attack.commands import Command
from attack.files import metrics

FAILURES = ("silent", "lost", "hang")
LIMIT = 240.0  # seconds for a whole run
MAX_KILLS = 4
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 80 --lr 2e-3
    --log-interval 1 --eval-interval 30 --eval-iters 1 --device cpu --save-interval 5 --keep-last 2
    --distributed-timeout-minutes 1 --save run --load run --metrics-path run/metrics.jsonl
"""
# Number of processes, and flags.
LAYOUTS = {
    "one process": (1, "--num-workers 0"),
    "D2, distributed optimizer, async save": (2, "--use-distributed-optimizer --async-save --num-workers 0"),
    "one process, async save": (1, "--async-save --num-workers 0"),
    "T2 in bf16": (2, "--tensor-model-parallel-size 2 --bf16 --num-workers 0"),
    "one process, data workers": (1, "--num-workers 1"),
    "P2": (2, "--pipeline-model-parallel-size 2 --num-workers 0"),
}


def prepare(folder: Path) -> None:
    """Nothing to prepare; undisturbed runs are made when they are first needed."""


def start(layout: str, folder: Path) -> list[Command]:
    """Start the processes of a run."""
    processes, flags = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    port = free_port()
    environments = [rank_environment(rank, processes, port) for rank in range(processes)]
    return [
        Command(f"pretrain_gpt.py {FLAGS} {flags}", folder, folder / f"rank-{rank}", environment)
        for rank, environment in enumerate(environments if processes > 1 else [{}])
    ]


def finish(layout: str, folder: Path) -> str:
    """Run to the end. Returns what went wrong, or ""."""
    ranks = [command.end(LIMIT) for command in start(layout, folder)]
    wrong = [f"status {rank.status}: {rank.last_line()}" for rank in ranks if rank.status != 0]
    return "; ".join(wrong)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The metrics and the last checkpoint's tensors."""
    tensors = (folder / "run" / "iter_0000080").glob("*.safetensors")
    return metrics(folder / "run" / "metrics.jsonl"), {
        path.name: path.read_bytes() for path in sorted(tensors)
    }


def attack(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill one run up to `MAX_KILLS` times and describe the outcome."""
    layout = list(LAYOUTS)[number % len(LAYOUTS)]
    rng = random.Random(f"{seed} {number}")
    undisturbed = folder / f"undisturbed {layout}"
    if not undisturbed.exists():
        wrong = finish(layout, undisturbed)
        assert not wrong, f"{layout}: fails without a kill: {wrong}"
    run = folder / f"run-{number}"
    moments, hung, kills = [], "", rng.randrange(1, MAX_KILLS + 1)
    while len(moments) < kills and not hung:
        moment, hung = kill(layout, run, rng)
        if not moment:
            break
        moments.append(moment)
    row = {"number": number, "attack": f"{layout}: {', '.join(moments)}", "kills": len(moments)}
    wrong = hung or finish(layout, run)
    if wrong:
        return row | {"outcome": "hang" if hung else "lost", "says": wrong}
    differ = [
        name
        for name, a, b in zip(("metrics", "weights"), outcome(run), outcome(undisturbed), strict=True)
        if a != b
    ]
    return row | {
        "outcome": "silent" if differ else "the same",
        "says": f"{' and '.join(differ)} differ" if differ else "",
    }


def kill(layout: str, folder: Path, rng: random.Random) -> tuple[str, str]:
    """Start a run and kill one rank or all. Returns the moment, "" if the run had ended before, and what hung."""
    ranks, begin, clock = start(layout, folder), time.monotonic(), time.time()
    moment = "while it saves" if rng.random() < 0.5 else "at any time"
    try:
        if moment == "while it saves":
            saves = rng.randrange(1, 12)
            while saves and time.monotonic() < begin + 8 and not ranks[0].poll():
                saves -= is_saving(folder / "run", clock)
                time.sleep(rng.uniform(0, 0.005))
        else:
            ranks[0].wait(rng.uniform(0.05, 4))
        if any(rank.poll() for rank in ranks):
            return "", ""
        moment += f" ({time.monotonic() - begin:.2f} s)"
        first = rng.randrange(len(ranks))
        ranks[first].kill()
        # The other rank must notice and end by itself, if it is not killed too.
        if len(ranks) > 1 and rng.random() < 0.3:
            killed = time.monotonic()
            in_time = ranks[1 - first].wait(90)
            moment += f", rank {first} only ({time.monotonic() - killed:.0f} s)"
            if not in_time:
                return moment, f"rank {1 - first} did not end within 90 s of the death of rank {first}"
        return moment, ""
    finally:
        for rank in ranks:
            rank.kill()


def is_saving(folder: Path, since: float) -> bool:
    """True while a checkpoint is written, not counting one that a killed run left before `since`."""
    for path in folder.glob(".writing-iter*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ctime > since:
                return True
    return False
