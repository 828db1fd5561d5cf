"""Status of each rank of a run that hangs: collected on the rank, and summarized for all."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch._C import _distributed_c10d

from megatron.parallel.mesh import Mesh
from megatron.parallel.rendezvous import rank_names

MAX_FRAMES = 12  # innermost frames of a stack
MAX_STACKS = 3  # stacks in a summary


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """State of a process's main thread.

    Attributes:
        communication: the one it waits in, such as "all-reduce over the data-parallel axis"; None if there is none.
        function: its innermost function.
        seconds: time since the process last made progress.
        stack: its stack, formatted like a traceback.
    """

    communication: str | None
    function: str
    seconds: float
    stack: str

    def __str__(self) -> str:
        return self.communication or f"no communication, in {self.function}"


def rank_status(mesh: Mesh, seconds: float) -> RankStatus:
    """Status of this process, which has made no progress for `seconds`."""
    main = threading.main_thread().ident
    assert main is not None
    stack = list(traceback.extract_stack(sys._current_frames()[main]))[-MAX_FRAMES:]
    function = f"{stack[-1].name} ({Path(stack[-1].filename).name}:{stack[-1].lineno})"
    communication = None
    if noted := mesh.heartbeat.communication:
        what, axis = noted
        communication = f"{what} over the {axis.name} axis"
    elif mesh.device.type == "cuda":
        communication = next(iter(unfinished_on_gpu()), None)
    return RankStatus(communication, function, seconds, "".join(traceback.format_list(stack)))


def unfinished_on_gpu() -> list[str]:
    """Communications that NCCL started on this process and has not finished, from torch's flight recorder, in order."""
    if not hasattr(_distributed_c10d, "_dump_nccl_trace_json"):  # torch without NCCL
        return []
    recorded = json.loads(_distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=True))
    return [
        f"{entry['profiling_name']} {entry['collective_seq_id']} of {entry['process_group'][1]}, {entry['state']}"
        for entry in recorded.get("entries", [])
    ]


def describe_here(mesh: Mesh, here: RankStatus) -> str:
    """Describe this process: the ranks it waits for, unfinished communications on its GPU, stacks of its threads."""
    text = f"rank {mesh.world.rank}: {here}"
    if noted := mesh.heartbeat.communication:
        text += f", waiting for {rank_names(rank for rank in noted[1].ranks if rank != mesh.world.rank)}"
    lines = [f"{text}, for {here.seconds:.0f} s"]
    if mesh.device.type == "cuda":
        lines += [f"  on the GPU: {communication}" for communication in unfinished_on_gpu()[:MAX_FRAMES]]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != this:
            stack = traceback.format_stack(frame, limit=MAX_FRAMES)
            lines += [f"  thread {names.get(ident, ident)}:", "".join(stack).rstrip()]
    return "\n".join(lines)


def cause(answers: dict[int, RankStatus], size: int) -> str:
    """Name the ranks, of `size`, that the others wait for, as far as the answers show it."""
    missing = _missing(answers, size)
    if missing:
        why = "it has ended or is stopped" if len(missing) == 1 else "they have ended or are stopped"
        return f"{rank_names(missing)} gave no answer: {why}, or cannot be reached"
    idle = [rank for rank, rank_status in answers.items() if rank_status.communication is None]
    if len(idle) == 1:
        return f"rank {idle[0]} is in {answers[idle[0]]}"
    return f"{rank_names(idle)} are in no communication" if idle else "every rank waits in a communication"


def summary(answers: dict[int, RankStatus], size: int, still: float) -> str:
    """List the status of all ranks, and the stacks of the first ones that are in no communication and have made no
    progress for `still` seconds."""
    places: dict[str, list[int]] = {}
    for rank, rank_status in answers.items():
        places.setdefault(str(rank_status), []).append(rank)
    lines = [
        f"  {rank_names(ranks)}: {place}, for {max(answers[rank].seconds for rank in ranks):.0f} s"
        for place, ranks in places.items()
    ]
    missing = _missing(answers, size)
    if missing:
        lines.append(f"  {rank_names(missing)}: no answer")
    idle = [rank for rank, s in answers.items() if s.communication is None and s.seconds >= still]
    for rank in idle[:MAX_STACKS]:
        lines += [f"stack of rank {rank}:", answers[rank].stack.rstrip()]
    return "\n".join(lines)


def _missing(answers: Iterable[int], size: int) -> list[int]:
    return sorted(set(range(size)).difference(answers))
