"""Where the processes of a run stand: found out in each, and put in words for all."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch._C import _distributed_c10d

from megatron.parallel.mesh import Mesh, rank_names

MOST_FRAMES = 12  # of a stack, the innermost
MOST_STACKS = 3  # of processes, in a summary


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the main thread of a process stands, and for how many seconds it has got nothing done.

    Attributes:
        communication: which it takes part in, such as "all-reduce over the data-parallel axis"; None for none.
        function: the innermost one that it is in.
        stack: of the main thread, as a traceback shows it.
    """

    communication: str | None
    function: str
    seconds: float
    stack: str

    def __str__(self) -> str:
        return self.communication or f"no communication, in {self.function}"


def standing(mesh: Mesh, seconds: float) -> Standing:
    """Where this process's main thread stands, having got nothing done for so many seconds."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    stack = stack[-MOST_FRAMES:]
    function = f"{stack[-1].name} ({Path(stack[-1].filename).name}:{stack[-1].lineno})"
    communication = None
    if noted := mesh.activity.communication:
        what, axis = noted
        communication = f"{what} over the {axis.name} axis"
    elif mesh.device.type == "cuda":
        communication = next(iter(unfinished_on_gpu()), None)
    return Standing(communication, function, seconds, "".join(traceback.format_list(stack)))


def unfinished_on_gpu() -> list[str]:
    """The communications that NCCL has begun on this process and not ended, by torch's flight recorder, in order."""
    if not hasattr(_distributed_c10d, "_dump_nccl_trace_json"):  # torch without NCCL
        return []
    recorded = json.loads(_distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=True))
    return [
        f"{entry['profiling_name']} {entry['collective_seq_id']} of {entry['process_group'][1]}, {entry['state']}"
        for entry in recorded.get("entries", [])
    ]


def describe_here(mesh: Mesh, here: Standing) -> str:
    """All that this process can say of itself: whom it waits for, what its GPU waits for, what its threads are at."""
    text = f"rank {mesh.world.rank}: {here}"
    if noted := mesh.activity.communication:
        text += f", waiting for {rank_names(rank for rank in noted[1].ranks if rank != mesh.world.rank)}"
    lines = [f"{text}, for {here.seconds:.0f} s"]
    if mesh.device.type == "cuda":
        lines += [f"  on the GPU: {communication}" for communication in unfinished_on_gpu()[:MOST_FRAMES]]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != this:
            stack = traceback.format_stack(frame, limit=MOST_FRAMES)
            lines += [f"  thread {names.get(ident, ident)}:", "".join(stack).rstrip()]
    return "\n".join(lines)


def cause(answers: dict[int, Standing], size: int) -> str:
    """Which of `size` ranks is what the others wait for, as far as the answers of those that gave one tell."""
    missing = _missing(answers, size)
    if missing:
        why = "it has ended or is stopped" if len(missing) == 1 else "they have ended or are stopped"
        return f"{rank_names(missing)} gave no answer: {why}, or cannot be reached"
    idle = [rank for rank, standing in answers.items() if standing.communication is None]
    if len(idle) == 1:
        return f"rank {idle[0]} is in {answers[idle[0]]}"
    return f"{rank_names(idle)} are in no communication" if idle else "every rank waits in a communication"


def summary(answers: dict[int, Standing], size: int, still: float) -> str:
    """Each place where ranks stand, and the stacks of those (of many, the first) that are in no communication and
    have got nothing done for `still` seconds."""
    places: dict[str, list[int]] = {}
    for rank, standing in answers.items():
        places.setdefault(str(standing), []).append(rank)
    lines = [
        f"  {rank_names(ranks)}: {place}, for {max(answers[rank].seconds for rank in ranks):.0f} s"
        for place, ranks in places.items()
    ]
    missing = _missing(answers, size)
    if missing:
        lines.append(f"  {rank_names(missing)}: no answer")
    idle = [rank for rank, s in answers.items() if s.communication is None and s.seconds >= still]
    for rank in idle[:MOST_STACKS]:
        lines += [f"rank {rank} stands in", answers[rank].stack.rstrip()]
    return "\n".join(lines)


def _missing(answers: Iterable[int], size: int) -> list[int]:
    return sorted(set(range(size)).difference(answers))
