"""Order of communications over all ranks of a run: agreement within each group, and progress on NCCL's streams."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from gpu_path.recorded_step import Call, Wait

Group = tuple[tuple[int, ...], int]
TRANSFERS = {"send", "receive"}


def disagreements(ranks: Sequence[Sequence[Call | Wait]]) -> list[str]:
    """Groups whose ranks do not all ask for the same collectives, or whose transfers do not pair up, in order.

    `ranks` holds the events of each rank of the run.
    """
    found = []
    collectives: dict[Group, dict[int, list[Call]]] = collections.defaultdict(dict)
    transfers: dict[tuple[Group, int, int], dict[str, list[Call]]] = collections.defaultdict(
        lambda: {"send": [], "receive": []}
    )
    for rank, events in enumerate(ranks):
        for call in events:
            if isinstance(call, Wait):
                continue
            if call.kind in TRANSFERS:
                assert call.peer is not None
                sender, receiver = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
                transfers[call.group, sender, receiver][call.kind].append(call)
            else:
                collectives[call.group].setdefault(rank, []).append(call)
    for group, calls in collectives.items():
        members = group[0]
        sequences = [calls.get(rank, []) for rank in members]
        for i in range(max(map(len, sequences))):
            at = [sequence[i] if i < len(sequence) else None for sequence in sequences]
            if len(set(at)) > 1:
                found.append(f"collective {i} of ranks {members} differs: {_describe(at)}")
                break
    for (_, sender, receiver), both in transfers.items():
        sizes = [[(call.elements, call.dtype) for call in both[kind]] for kind in ("send", "receive")]
        if sizes[0] != sizes[1]:
            found.append(f"transfers from rank {sender} to rank {receiver} do not pair up")
    return found


def _describe(calls: Sequence[Call | None]) -> str:
    return ", ".join("none" if call is None else f"{call.kind} of {call.elements}" for call in calls)


class Streams:
    """Simulates a compute stream for each rank, and a stream for each of its communicators.

    A communicator's stream takes its calls in order. A call begins when it is at the head of the queue on all ranks
    that take part, and their compute streams have reached it. A compute stream stops at a wait until that call has
    ended. This is what NCCL does, with transfers on the stream of their group (torch's eager mode, `device_id`).
    """

    def __init__(self, ranks: Sequence[Sequence[Call | Wait]]) -> None:
        self.ranks = ranks
        self.at = [0] * len(ranks)
        self.calls = [[event for event in events if isinstance(event, Call)] for events in ranks]
        self.reached: list[set[int]] = [set() for _ in ranks]
        self.ended: list[set[int]] = [set() for _ in ranks]
        self.queues: list[dict[Group, collections.deque[int]]] = []
        for calls in self.calls:
            queues: dict[Group, collections.deque[int]] = collections.defaultdict(collections.deque)
            for number, call in enumerate(calls):
                queues[call.group].append(number)
            self.queues.append(queues)

    def run(self) -> list[str]:
        """Run to the end. Returns what each rank is stuck in, or nothing."""
        while True:
            moved = [self._compute(rank) for rank in range(len(self.ranks))]
            moved += [self._communicate(rank) for rank in range(len(self.ranks))]
            if not any(moved):
                break
        return [
            f"rank {rank} waits for {_describe([self.calls[rank][events[at].call]])}"
            for rank, (events, at) in enumerate(zip(self.ranks, self.at, strict=True))
            if at < len(events)
        ]

    def _compute(self, rank: int) -> bool:
        """Let a compute stream run until it must wait."""
        events, begin = self.ranks[rank], self.at[rank]
        while self.at[rank] < len(events):
            event = events[self.at[rank]]
            if isinstance(event, Call):
                self.reached[rank].add(len(self.reached[rank]))
            elif event.call not in self.ended[rank]:
                break
            self.at[rank] += 1
        return self.at[rank] > begin

    def _communicate(self, rank: int) -> bool:
        """End the calls at the heads of a rank's queues that all partners have reached."""
        moved = False
        for group, queue in self.queues[rank].items():
            while queue and self._is_ready(rank, group):
                call = self.calls[rank][queue[0]]
                partners = [call.peer] if call.kind in TRANSFERS else [r for r in group[0] if r != rank]
                for other in (rank, *partners):
                    assert other is not None
                    self.ended[other].add(self.queues[other][group].popleft())
                moved = True
        return moved

    def _is_ready(self, rank: int, group: Group) -> bool:
        call = self._head(rank, group)
        if call is None:
            return False
        if call.kind in TRANSFERS:
            assert call.peer is not None
            other = self._head(call.peer, group)
            return other is not None and other.peer == rank and {call.kind, other.kind} == TRANSFERS
        return all(self._head(other, group) == call for other in group[0])

    def _head(self, rank: int, group: Group) -> Call | None:
        """The call at the head of a queue, if the compute stream has reached it."""
        queue = self.queues[rank].get(group)
        return self.calls[rank][queue[0]] if queue and queue[0] in self.reached[rank] else None
