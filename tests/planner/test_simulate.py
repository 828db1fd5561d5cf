"""The planner's simulator: schedules, collectives and kernels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from models import config_of
from planner.test_memory import ONE_DEVICE
from published import cluster, job

from megatron.planner.cluster import Link
from megatron.planner.dry_run import DryRun
from megatron.planner.given import given_run
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Layout
from megatron.planner.parameters import end_parameters, stage_parameters
from megatron.planner.programs import FSDP, NVIDIA_2021, OURS
from megatron.planner.schedule_costs import makespan
from megatron.planner.simulate import Simulator
from megatron.pretrain_gpt import GPT


@pytest.mark.parametrize("program", [OURS, NVIDIA_2021])
@pytest.mark.parametrize(
    ("pipeline", "chunks", "microbatches"), [(4, 1, 64), (8, 1, 77), (4, 3, 48), (8, 2, 96)]
)
def test_a_partially_simulated_schedule_equals_the_full_simulation(program, pipeline, chunks, microbatches):
    gpt, layout = job(48, 2048, 16, microbatches), Layout(pipeline=pipeline, chunks=chunks)
    simulator = Simulator(gpt, layout, cluster(8), program)
    assert simulator.pipeline_seconds() == pytest.approx(makespan(simulator.timeline(microbatches)), rel=1e-6)


@pytest.mark.parametrize("program", [OURS, NVIDIA_2021])
def test_the_lower_bound_is_close_below_the_simulation(program):
    for layout in (
        Layout(tensor=8, pipeline=p, chunks=v, recompute="full") for p in (2, 8) for v in (1, 2, 6)
    ):
        simulator = Simulator(job(96, 12288, 96, 64), layout, cluster(8 * layout.pipeline), program)
        seconds = simulator.step().seconds
        assert 0.95 * seconds < simulator.lower_bound() < seconds * (1 + 1e-9)


def test_the_parts_of_a_step_sum_to_its_time():
    for program in (OURS, NVIDIA_2021):
        layout = Layout(tensor=2, pipeline=4, data=2, overlap_grad_reduce=True)
        step = Simulator(job(24, 2048, 16, 32), layout, cluster(16), program).step()
        parts = (step.matmul, step.elementwise, step.tensor_parallel, step.ends, step.transfers, step.bubble)
        assert sum(parts) + step.gradients + step.optimizer == pytest.approx(step.seconds)
        assert step.recompute == 0


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence_parallel=True)])
def test_norms_of_outputs_take_time(layout: Layout):
    """A norm reads and writes its input in forward; backward reads it and a gradient, and writes a gradient."""
    gpt, machine = job(24, 2048, 16, 8), cluster(2)
    more = dataclasses.replace(gpt, model=dataclasses.replace(gpt.model, sandwich_norm=True))
    before, after = (Kernels(x, layout, machine, OURS).layer for x in (gpt, more))
    read = 2 * 2048 * 2048 / layout.tensor / (machine.device.bandwidth * machine.efficiency.memory)
    assert after.forward.total - before.forward.total == pytest.approx(2 * 2 * read)
    assert after.backward.total - before.backward.total == pytest.approx(2 * 3 * read)


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 2 + 4 + 4), ("fp32", 4)])
def test_gradients_are_accumulated_once(precision: str, moved: int):
    """In fp32 the product for a weight's gradient adds to the sum: `aten::addmm_`, with no addition after it."""
    gpt, machine = job(24, 2048, 16, 8), cluster(1)
    device = dataclasses.replace(machine.device, precision=precision)
    machine = dataclasses.replace(machine, device=device)
    seconds = Simulator(gpt, Layout(), machine, OURS).accumulation
    bandwidth = device.bandwidth * machine.efficiency.stream
    assert seconds * bandwidth == pytest.approx(moved * stage_parameters(gpt, Layout(), 0))


def test_recomputation_leaves_out_what_backward_does_not_need():
    """torch's checkpoints end before the last product: of 12 h^2 parameters of a layer 4 h^2, without attention."""
    layout = Layout(data=8, sharded_parameters=True, overlap_grad_reduce=True, recompute="full")
    gpt, machine = job(24, 8192, 64, 8), cluster(8)
    programs = (FSDP, dataclasses.replace(FSDP, stops_recomputing=False))
    stops, whole = (Kernels(gpt, layout, machine, program) for program in programs)
    again = [kernels.recomputed(kernels.layer.forward).matmul for kernels in (stops, whole)]
    products = [m.matmul - stops.attention.forward.matmul for m in (stops.layer.forward, whole.layer.forward)]
    assert (again[1] - again[0]) / products[1] == pytest.approx(1 / 3, rel=0.02)
    keeps = Kernels(gpt, layout, machine, dataclasses.replace(FSDP, keeps_queries=True))
    saved = again[0] - keeps.recomputed(keeps.layer.forward).matmul
    assert saved / products[1] == pytest.approx(1 / 4, rel=0.03)


def test_sharded_layers_are_gathered_one_by_one():
    """Each layer's collectives have a latency of their own, which grows with the ranks."""
    layout = Layout(data=512, sharded_parameters=True, overlap_grad_reduce=True)
    gpt, machine = job(24, 2048, 16, 512), cluster(512)
    latency = 448 * machine.link.latency + 63 * machine.network.latency
    gather, *_ = Simulator(gpt, layout, machine, OURS).exchanges()
    one = Simulator(job(1, 2048, 16, 512), layout, machine, OURS).exchanges()[0]
    assert gather.seconds > 24 * latency and one.seconds < gather.seconds / 10


def test_a_collective_takes_the_time_of_a_ring():
    """3/4 of the bytes at 300 GB/s within a node; across nodes, four ranks of a node share four adapters of 25 GB/s."""
    machine = cluster(16)
    within, across = machine.group(4, 1), machine.group(8, 2)
    assert (within.per_domain, across.per_domain) == (4, 4)
    share = machine.efficiency.link
    assert machine.all_reduce(1e9, within) == pytest.approx(2 * 0.75 * 1e9 / (300e9 * share), rel=0.01)
    assert machine.all_reduce(1e9, across) == pytest.approx(2 * 0.875 * 1e9 / (100e9 * share), rel=0.01)
    assert machine.all_reduce(1e9, machine.group(1, 1)) == 0


@pytest.mark.parametrize(
    ("size", "stride", "per_node"),
    [
        (3, 1, 1),  # ranks 6, 7 and 8: the last is alone in its node
        (6, 1, 2),  # ranks 6 to 11: two are in the first node
        (3, 2, 1),  # ranks 6, 8 and 10: one is in the first node
        (16, 1, 8),
        (4, 2, 4),
        (3, 8, 1),
    ],
)
def test_ranks_per_node_of_a_group_across_a_node_boundary(size: int, stride: int, per_node: int):
    machine = cluster(48)
    assert machine.group(size, stride).per_domain == per_node
    ranks = range(machine.devices)
    blocks = [ranks[i : i + size * stride] for i in ranks[:: size * stride]]
    groups = [block[r::stride] for block in blocks for r in range(stride)]
    assert per_node == min(
        sum(rank // machine.per_node == node for rank in group)
        for group in groups
        for node in {rank // machine.per_node for rank in group}
    )


@pytest.mark.parametrize("program", [OURS, NVIDIA_2021])
def test_the_distributed_optimizer_scatters_gradients_and_gathers_weights(program):
    """Half a ring for gradients and half a ring for bf16 weights, instead of a whole ring for gradients."""
    machine, gpt, parameters = cluster(8), job(24, 2304, 24, 512), 1_652_230_656
    half_ring = 7 / 8 * parameters / (300e9 * machine.efficiency.link)
    for sharded, size in ((True, program.gradient + 2), (False, 2 * program.gradient)):
        layout = Layout(
            data=8, micro_batch_size=16, distributed_optimizer=sharded, overlap_param_gather=False
        )
        found = Simulator(gpt, layout, machine, program).gradients()
        assert found == pytest.approx(size * half_ring, rel=0.01)


def test_shards_are_not_faster_than_what_communicates_less():
    """ZeRO-1 moves the least in a step, ZeRO-2 as much for one microbatch, ZeRO-3 a gather more."""
    machine, gpt = cluster(64, "h100-80gb"), job(24, 2304, 24, 64)
    whole = Layout(data=64, distributed_optimizer=True, overlap_grad_reduce=True)
    zero2 = dataclasses.replace(whole, sharded_gradients=True)
    zero3 = dataclasses.replace(whole, sharded_parameters=True)
    one, two, three = (
        Simulator(gpt, layout, machine, OURS).step().seconds for layout in (whole, zero2, zero3)
    )
    assert one * 0.999 <= two <= three
    assert "--overlap-param-gather" in whole.flags(gpt)


def test_parameters_that_are_gathered_beside_forward_cost_less():
    machine, gpt = cluster(64, "h100-80gb"), job(24, 2304, 24, 64)
    for sharding in ({}, {"sharded_parameters": True}):
        beside = Layout(data=64, distributed_optimizer=True, overlap_grad_reduce=True, **sharding)
        after = dataclasses.replace(beside, overlap_param_gather=False)
        exposed = [
            next(
                exchange.exposed
                for exchange in Simulator(gpt, layout, machine, OURS).exchanges()
                if exchange.name == "parameter gather"
            )
            for layout in (beside, after)
        ]
        assert exposed[0] < exposed[1] / 3


def test_a_single_node_needs_no_network():
    """The ends of a pipeline of four stages with two replicas are six ranks apart; there is no DGX with L40S."""
    machine = cluster(8, "l40s")
    assert machine.group(2, 6).per_domain == 2
    step = Simulator(job(24, 2048, 16, 64), Layout(pipeline=4, data=2), machine, OURS).step()
    assert 0 < step.gradients < step.seconds


def test_cost_of_an_overlapped_reduction():
    """The embedding's gradient is complete last, so its reduction is exposed.

    The rest costs six moves through memory, three for each half of a ring, and the SMs that move it.
    """
    machine, gpt = cluster(32), job(24, 2304, 24, 512)
    layout = Layout(data=32, micro_batch_size=16, overlap_grad_reduce=True)
    parameters, tables = 1_652_230_656, (51200 + 2048) * 2304
    step = Simulator(gpt, layout, machine, NVIDIA_2021).step()
    wire = 2 * 31 / 32 * 2 * parameters / (200e9 * machine.efficiency.link)
    memory = 6 * 2 * (parameters - tables) / (2039e9 * machine.efficiency.stream)
    last = tables / parameters
    assert step.gradients == pytest.approx(wire * (last + (1 - last) * 20 / 132) + memory, rel=0.02)


@pytest.mark.parametrize("network", [400e9, 20e9, 5e9, 1e9])
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_a_reduction_runs_beside_the_passes_of_later_chunks(chunks: int, network: float):
    """The last microbatches pass a stage chunk by chunk, and each chunk's gradients are reduced when it is done."""
    machine = dataclasses.replace(cluster(32), network=Link(network, 1e-6))
    layout = Layout(pipeline=4, data=8, chunks=chunks, overlap_grad_reduce=True)
    simulator = Simulator(job(48, 4096, 32, 64), layout, machine, OURS)
    reduction = next(x for x in simulator.exchanges() if x.name == "gradient reduction")
    # The embedding's gradient is complete when backward ends.
    table = end_parameters(simulator.job, 1, first=True, last=False) / simulator._parameters
    passes, each = simulator.layers.backward.total / chunks, reduction.seconds * (1 - table) / chunks
    free = 0.0
    for done in range(chunks):
        last_pass = (4 * (done + 1) - 1) * passes
        free = max(free, last_pass) + each
    left = max(0.0, free - 4 * chunks * passes)
    assert reduction.seconds - reduction.hidden == pytest.approx(left + reduction.seconds * table, rel=0.01)


def test_backward_of_attention_is_four_matmuls():
    """The gradient of the scores has their cost; those of queries, keys and values cost as much as the weighted sum."""
    kernels = Simulator(job(2, 1024, 16, 8), Layout(), cluster(1), NVIDIA_2021).kernels
    scores, sums = kernels.matmul(2048, 2048, 64, 16), kernels.matmul(2048, 64, 2048, 16)
    assert kernels.attention.forward.matmul == pytest.approx(scores + sums)
    assert kernels.attention.backward.matmul == pytest.approx(scores + 3 * sums)


def test_fp8_products_of_layers_run_at_their_peak():
    """Large products take half as long: 1,979 TFLOP/s for 989. The operands of the three are cast, with 2.9 bytes of
    memory traffic for each of their elements. Attention, embedding and output layer are as they were."""
    plain, machine = job(2, 16384, 128, 8), cluster(1, "h100-80gb")
    fp8 = dataclasses.replace(plain, fp8_format="hybrid")
    before, after = (Simulator(gpt, Layout(), machine, OURS).kernels for gpt in (plain, fp8))

    def seconds(kernels: Kernels, part: str) -> float:
        passes = [(kernels.layer, 1), (kernels.attention, -1)]
        return sum(getattr(x, part) * sign for y, sign in passes for x in (y.forward, y.backward))

    assert seconds(after, "matmul") == pytest.approx(seconds(before, "matmul") * 989 / 1979, rel=0.01)
    n, h = 2048, 16384
    weights, inputs, outputs = 12 * h * h, n * (1 + 1 + 1 + 4) * h, n * (3 + 1 + 4 + 1) * h
    traffic = 2.9 * 2 * (weights + inputs + outputs)
    casts = seconds(after, "elementwise") - seconds(before, "elementwise")
    assert casts == pytest.approx(traffic / (machine.device.bandwidth * machine.efficiency.memory))
    assert (after.head, after.embedding, after.attention) == (before.head, before.embedding, before.attention)


@pytest.mark.parametrize(("parallel", "times"), [(False, 2 * 10), (True, 24)])
def test_tensor_parallel_traffic_matches_a_dry_run(parallel: bool, times: int):
    """Two layers: 10 all-reduces, or 14 all-gathers and 10 reduce-scatters, as --dry-run counts them."""
    gpt, machine = job(2, 1024, 16, 8), cluster(2)
    kernels = Simulator(gpt, Layout(tensor=2, sequence_parallel=parallel), machine, OURS).kernels
    chunk = kernels.chunk(2, 0, first=True, last=True)
    one = machine.all_gather(2 * 2048 * 1024, machine.group(2, 1))
    assert chunk.forward.tensor_parallel + chunk.backward.tensor_parallel == pytest.approx(times * one)


def test_overlap_and_the_distributed_optimizer_save_time():
    gpt = job(40, 6144, 48, 1024)
    layouts = (
        Layout(
            tensor=8, data=32, micro_batch_size=8, overlap_grad_reduce=overlap, distributed_optimizer=sharded
        )
        for overlap in (False, True)
        for sharded in (False, True)
    )
    plain, sharded, hidden, both = (Simulator(gpt, layout, cluster(256), OURS).step() for layout in layouts)
    assert sharded.optimizer == pytest.approx(plain.optimizer / 32)
    assert hidden.gradients < 0.35 * plain.gradients  # all but what backward has no time for
    assert both.seconds < plain.seconds


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_accesses_are_those_of_a_compiled_layer(direction: str) -> None:
    """GPT-2's layer with dropout, h = 1024, s = 1024, b = 8, as torch's compiler fuses it for an H100."""
    path = Path(__file__).parents[1] / "gpu_path" / "golden.json"
    golden = json.loads(path.read_text(encoding="utf-8"))
    counted = golden["compiled layers"]["GPT-2"][direction]["bytes of other"]
    at = ("forward", "backward").index(direction)
    accesses = OURS.residual[at] + OURS.heads[at] + 4 * OURS.mlp[at]
    # The backward of a gated activation has more accesses than that of GELU.
    assert counted == pytest.approx(accesses * 1024 * 8 * 1024 * 2, rel=0.04)


@pytest.mark.parametrize(
    "kind", ["p2p", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("all_gather", "a2a"))]
)
def test_context_parallelism_sends_what_a_dry_run_counts(kind: str) -> None:
    """With links so slow that nothing is hidden, at 1 GB/s and without latency."""
    config = config_of(
        f"{ONE_DEVICE} --device cuda --dry-run --context-parallel-size 2 --cp-comm-type {kind}"
    )
    job, layout = given_run(config, 2)
    assert layout.context_exchange == kind
    traffic = DryRun.from_config(config, GPT, 2).count(0).traffic
    machine = cluster(2)
    efficiency = dataclasses.replace(machine.efficiency, link=1.0, launch=0.0, beside=1.0)
    machine = dataclasses.replace(machine, link=Link(1e9, 0.0), efficiency=efficiency)
    sent = {name: counted.bytes for (name, axis), counted in traffic.items() if axis == "context-parallel"}
    # A rank keeps its half of what is gathered, scattered or exchanged.
    expected = sum(bytes_ / (1 if name == "shift" else 2) for name, bytes_ in sent.items()) / 1e9
    assert Simulator(job, layout, machine, OURS).step().context_parallel == pytest.approx(expected)
