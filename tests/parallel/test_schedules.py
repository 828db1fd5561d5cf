"""Properties of the pipeline schedules over a grid of sizes; formulas from arXiv 2104.04473, section 2."""

from __future__ import annotations

import itertools

import pytest

from megatron.parallel.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Receive,
    Send,
    forward_only,
    one_and_two,
    one_forward_one_backward,
    part_of,
    simulate,
    with_transfers,
)
from megatron.planner.schedule_costs import bubble_fraction, makespan, peak_in_flight
from megatron.variants.half_memory import v_half, v_min
from megatron.variants.schedules import breadth_first, gpipe, interleaved
from megatron.variants.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

# (stages, chunks, microbatches)
ONE_CHUNK = [(p, 1, m) for p in range(1, 17) for m in [*range(1, 41), 64]]
INTERLEAVED = [
    (p, v, p * k) for p in range(1, 17) for v in range(1, 9) for k in range(1, 13) if p * v * k <= 120
]
FORWARD_ONLY = [(p, v, m) for p in range(1, 11) for v in range(1, 5) for m in range(1, 41)]
SPLIT = [(p, 1, m) for p in range(1, 9) for m in (*range(1, 18), 40)]
V_SHAPED = [
    (p, 2, m) for p in range(2, 9) for m in (1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p)
]
DUALPIPE = [(p, 2, m) for p in range(2, 9) for m in range(2 * p, 4 * p)]
V = (zb_v, v_half, v_min, dualpipe_v)
CASES = [
    *((zb_h1, *sizes) for sizes in SPLIT),
    *((zb_h2, *sizes) for sizes in SPLIT),
    *((make, *sizes) for make in (zb_v, v_half, v_min) for sizes in V_SHAPED),
    *((dualpipe_v, *sizes) for sizes in DUALPIPE),
    *((breadth_first, p, v, m) for p, v, m in FORWARD_ONLY if m % 3 == 1),
    *((gpipe, *sizes) for sizes in ONE_CHUNK),
    *((one_forward_one_backward, *sizes) for sizes in ONE_CHUNK),
    *((interleaved, *sizes) for sizes in INTERLEAVED),
    *((forward_only, *sizes) for sizes in FORWARD_ONLY),
]
# Cases by number of stages, so that a failure names it. By default every fourth one of some groups runs.
BY_STAGES = [
    *(
        pytest.param([case for case in CASES if case[1] == stages][::4], id=f"P{stages}, a quarter")
        for stages in (2, 3, 4, 5, 8, 16)
    ),
    *(
        pytest.param(
            [case for case in CASES if case[1] == stages],
            id=f"P{stages}",
            marks=() if stages == 1 else pytest.mark.slow,
        )
        for stages in sorted({case[1] for case in CASES})
    ),
]


def test_the_grid_is_large():
    assert len({case[1:] for case in CASES}) >= 2000


@pytest.mark.parametrize("cases", BY_STAGES)
def test_every_compute_happens_once_and_forward_comes_first(cases):
    for make, stages, chunks, microbatches in cases:
        schedule = make(stages, chunks, microbatches)
        pairs = list(itertools.product(range(microbatches), range(chunks)))
        assert len(schedule) == stages
        for actions in schedule:
            forwards = {(a.microbatch, a.chunk): i for i, a in enumerate(actions) if isinstance(a, Forward)}
            backwards = {
                (a.microbatch, a.chunk): i
                for i, a in enumerate(actions)
                if isinstance(a, Backward | BackwardInput)
            }
            split = {(a.microbatch, a.chunk) for a in actions if isinstance(a, BackwardInput)}
            weights = {
                (a.microbatch, a.chunk): i for i, a in enumerate(actions) if isinstance(a, BackwardWeight)
            }
            assert sorted(forwards) == pairs
            assert sorted(backwards) == ([] if make is forward_only else pairs)
            assert sorted(weights) == sorted(split)
            assert len(actions) == len(forwards) + len(backwards) + len(weights)
            assert all(forwards[key] < at for key, at in backwards.items())
            assert all(backwards[key] < at for key, at in weights.items())


@pytest.mark.parametrize("cases", BY_STAGES)
def test_blocking_transfers_do_not_deadlock(cases):
    for make, stages, chunks, microbatches in cases:
        schedule = make(stages, chunks, microbatches)
        actions = with_transfers(schedule, stages, make in V)
        assert [[a for a in row if isinstance(a, Compute)] for row in actions] == schedule
        run_with_rendezvous(actions, stages, chunks, make in V)


def owner(part, stages, v_shaped):
    """Rank and chunk of a part of the model."""
    chunk = part // stages
    return next((r, chunk) for r in range(stages) if part_of(r, chunk, stages, v_shaped) == part)


def run_with_rendezvous(actions, stages, chunks, v_shaped=False):
    """Run each rank's actions in order with rendezvous transfers, which happen only when both ends reach them.

    Every compute must find its input, and nothing may be left undelivered. Both ends must be at the same transfer,
    so this also checks that the ranks of a pair agree on the order.
    """
    at = [0] * stages
    held = [set() for _ in range(stages)]  # per rank: (kind, forward, microbatch, chunk) of available tensors

    def current(rank):
        return actions[rank][at[rank]] if at[rank] < len(actions[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(stages):
            action = current(rank)
            while isinstance(action, Compute):
                run_compute(action, rank, stages, chunks, held, v_shaped)
                at[rank] += 1
                moved = True
                action = current(rank)
            if not isinstance(action, Send):
                continue
            receive = current(action.peer)
            if not (isinstance(receive, Receive) and receive.peer == rank):
                continue
            part = part_of(rank, action.chunk, stages, v_shaped) + (1 if action.forward else -1)
            peer, chunk = owner(part, stages, v_shaped)
            assert (receive, action.peer) == (Receive(action.microbatch, chunk, rank, action.forward), peer)
            sent = ("made", action.forward, action.microbatch, action.chunk)
            assert sent in held[rank]
            held[rank].remove(sent)
            held[action.peer].add(("need", receive.forward, receive.microbatch, receive.chunk))
            at[rank] += 1
            at[action.peer] += 1
            moved = True
    assert [current(rank) for rank in range(stages)] == [None] * stages
    assert not any(held)


def run_compute(action, rank, stages, chunks, held, v_shaped):
    """Consume the compute's input from `held[rank]` and add its output for the next compute or transfer."""
    if isinstance(action, BackwardWeight):
        return
    forward = isinstance(action, Forward)
    part = part_of(rank, action.chunk, stages, v_shaped)
    first, last = (0, stages * chunks - 1) if forward else (stages * chunks - 1, 0)
    if part != first:
        held[rank].remove(("need", forward, action.microbatch, action.chunk))
    if part == last:
        return
    if owner(part + (1 if forward else -1), stages, v_shaped)[0] != rank:
        held[rank].add(("made", forward, action.microbatch, action.chunk))
    else:
        held[rank].add(("need", forward, action.microbatch, action.chunk + (1 if forward else -1)))


@pytest.mark.parametrize("stages, chunks, microbatches", [(2, 2, 4), (2, 3, 2), (4, 2, 8), (3, 1, 7)])
@pytest.mark.parametrize("make", [one_forward_one_backward, interleaved, forward_only])
def test_a_pair_lists_its_transfers_in_one_order(make, stages, chunks, microbatches):
    if make is one_forward_one_backward:
        chunks = 1
    if make is interleaved:
        microbatches += -microbatches % stages
    actions = with_transfers(make(stages, chunks, microbatches), stages)
    for a, b in itertools.combinations(range(stages), 2):
        ends = [
            [
                (isinstance(x, Send) == (rank == a), x.forward, x.microbatch)
                for x in actions[rank]
                if isinstance(x, Send | Receive) and x.peer == peer
            ]
            for rank, peer in ((a, b), (b, a))
        ]
        assert ends[0] == ends[1]


def peaks(schedule):
    return [peak_in_flight(actions) for actions in schedule]


def test_peak_of_activations_in_flight():
    for stages, chunks, microbatches in ONE_CHUNK:
        peak = peaks(gpipe(stages, chunks, microbatches))
        assert peak == [microbatches] * stages
        peak = peaks(one_forward_one_backward(stages, chunks, microbatches))
        assert peak == [min(microbatches, stages - rank) for rank in range(stages)]
    for stages, chunks, microbatches in INTERLEAVED:
        peak = peaks(interleaved(stages, chunks, microbatches))
        warmup = [2 * (stages - rank - 1) + (chunks - 1) * stages for rank in range(stages)]
        assert peak == [min(microbatches * chunks, w + 1) for w in warmup]


def test_bubble_equals_the_formula():
    for make, sizes in [
        (gpipe, ONE_CHUNK),
        (one_forward_one_backward, ONE_CHUNK),
        (interleaved, INTERLEAVED),
    ]:
        for stages, chunks, microbatches in sizes[::5]:
            schedule = make(stages, chunks, microbatches)
            timeline = simulate(
                schedule, stages, lambda rank, action, v=chunks: one_and_two(rank, action) / v
            )
            formula = (stages - 1) / (chunks * microbatches)
            busy = max(sum(end - start for _, start, end in row) for row in timeline)
            assert makespan(timeline) / busy - 1 == pytest.approx(formula)
            assert bubble_fraction(stages, chunks, microbatches) == formula
            assert makespan(timeline) == pytest.approx(3 * microbatches * (1 + formula))


def idle(row):
    """Time of a rank without a pass, between its first and its last."""
    return row[-1][2] - row[0][1] - sum(end - start for _, start, end in row)


def test_zero_bubble_schedules_of_the_papers():
    """2401.10241, table 1, and 2405.15362, section 3, with equal times of the three passes."""
    for stages, _, microbatches in SPLIT:
        timeline = simulate(zb_h1(stages, 1, microbatches), stages)
        if microbatches >= stages:  # the bubble is (p - 1) (F + B - W), the memory p microbatches
            assert makespan(timeline) == 3 * microbatches + stages - 1
            assert peaks(zb_h1(stages, 1, microbatches)) == [stages] * stages
        if microbatches >= 2 * stages - 1:
            timeline = simulate(zb_h2(stages, 1, microbatches), stages)
            assert [idle(row) for row in timeline] == [0] * stages
            assert peaks(zb_h2(stages, 1, microbatches)) == [2 * stages - 1] * stages
    for stages, _, microbatches in V_SHAPED:
        schedule = zb_v(stages, 2, microbatches)
        assert max(peaks(schedule)) <= 2 * stages
        if microbatches >= stages:
            bubble = makespan(simulate(schedule, stages, v_shaped=True)) - 6 * microbatches
            assert bubble <= (3 * 2 * (stages - 1)) / 3  # a third of 1F1B's, in passes of half a stage
    for stages, _, microbatches in DUALPIPE:
        schedule = dualpipe_v(stages, 2, microbatches)
        assert max(peaks(schedule)) <= 2 * stages + 1
        assert makespan(simulate(schedule, stages, v_shaped=True)) == 6 * microbatches + stages - 1


def test_half_memory_schedules_of_the_paper():
    """2405.15362, table 1: microbatches in memory, and the bubble compared with 1F1B's, 6 (p - 1) half passes."""
    for stages, _, microbatches in V_SHAPED:
        for make, memory, bubble in ((v_half, (stages + 2) // 2, 1 / 2), (v_min, (stages + 4) // 3, 2 / 3)):
            schedule = make(stages, 2, microbatches)
            assert max(peaks(schedule)) <= 2 * memory
            idle = makespan(simulate(schedule, stages, v_shaped=True)) - 6 * microbatches
            assert idle <= bubble * 6 * (stages - 1) or microbatches < stages


def test_breadth_first_has_the_bubble_of_the_interleaved_schedule():
    for stages, chunks, microbatches in INTERLEAVED[::5]:
        timelines = [
            simulate(make(stages, chunks, microbatches), stages) for make in (breadth_first, interleaved)
        ]
        assert makespan(timelines[0]) == makespan(timelines[1])


def test_zb_h1_of_the_paper():
    """2401.10241, figure 2, its third device of four, eight microbatches (numbered from 0 current)."""
    names = "".join(type(a).__name__.removeprefix("Backward")[0] for a in zb_h1(4, 1, 8)[2])
    assert names == "FFIFIFIWFIWFIWFIWFIWIWWW"


def test_bubble_of_forward_only_is_the_pipeline_fill():
    for stages, chunks, microbatches in FORWARD_ONLY:
        if microbatches % stages == 0:
            timeline = simulate(forward_only(stages, chunks, microbatches), stages)
            assert makespan(timeline) == microbatches * chunks + stages - 1


def test_1f1b_of_the_paper():
    """arXiv 2104.04473, figure 4, top: four devices, eight microbatches (numbered from 0 current)."""
    schedule = one_forward_one_backward(4, 1, 8)
    names = [" ".join(f"{type(a).__name__[0]}{a.microbatch}" for a in actions) for actions in schedule]
    assert names[0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert names[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_of_the_paper():
    """arXiv 2104.04473, figure 4, bottom: device 1 runs ten forward passes, then alternates."""
    actions = interleaved(4, 2, 8)[0]
    names = " ".join(f"{type(a).__name__[0]}{a.microbatch}{'ab'[a.chunk]}" for a in actions[:14])
    assert names == "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b"


def test_transfers_of_two_stages():
    assert with_transfers(gpipe(2, 1, 1), 2) == [
        [Forward(0, 0), Send(0, 0, 1, True), Receive(0, 0, 1, False), Backward(0, 0)],
        [Receive(0, 0, 0, True), Forward(0, 0), Backward(0, 0), Send(0, 0, 0, False)],
    ]


def test_the_last_rank_wraps_around_to_the_first():
    first, last = with_transfers(forward_only(2, 2, 1), 2)
    assert first == [
        Forward(0, 0),
        Send(0, 0, 1, True),
        Receive(0, 1, 1, True),
        Forward(0, 1),
        Send(0, 1, 1, True),
    ]
    assert last == [
        Receive(0, 0, 0, True),
        Forward(0, 0),
        Send(0, 0, 0, True),
        Receive(0, 1, 0, True),
        Forward(0, 1),
    ]


def test_one_stage_transfers_nothing():
    schedule = interleaved(1, 3, 2)
    assert with_transfers(schedule, 1) == schedule


def test_a_transfer_delays_the_neighbor():
    """Two stages, one microbatch: forward and back."""
    assert makespan(simulate(gpipe(2, 1, 1), 2, transfer_time=0.5)) == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_a_deadlock_is_detected():
    schedule = [[Backward(0, 0), Forward(0, 0)], [Forward(0, 0), Backward(0, 0)]]
    with pytest.raises(AssertionError, match="deadlocks"):
        simulate(schedule, 2)
