"""Predictions of layouts that a training command gives: schedules, sharding, divisions of the layers."""

from __future__ import annotations

import dataclasses

import pytest
from models import config_of
from published import cluster, job

from megatron.parallel.schedules import Forward
from megatron.planner.dry_run import DryRun
from megatron.planner.given import given_run
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import stage_memory
from megatron.planner.our_program import our_program, simulator_of
from megatron.planner.schedule_costs import makespan
from megatron.planner.space import pipeline_sizes, variants
from megatron.pretrain_gpt import GPT
from megatron.variants.auto_stages import with_auto_layout

COMMON = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 131071 --bf16 --micro-batch-size 1 --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0 "
    "--device cuda --dry-run"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 14336 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8"
)
TP, PP, CHUNKS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
)
SHARDED, OVERLAP = "--data-parallel-sharding-strategy", "--overlap-grad-reduce --overlap-param-gather"
SCHEDULE, EAGER, INSTANCES = (
    "--pipeline-schedule",
    "--no-torch-compile",
    "--num-distributed-optimizer-instances 2",
)
VALIDATED = "--enable-optimizer-post-validation"
# Processes and flags; and the stages that are counted by default.
LAYOUTS: dict[str, tuple[int, str]] = {
    "P4": (4, f"{PP} 4"),
    "P4V2": (4, f"{PP} 4 {CHUNKS} 2"),
    "T2P2+SP": (4, f"{TP} 2 {PP} 2 --sequence-parallel"),
    "T2P2 whole transfers": (4, f"{TP} 2 {PP} 2 --no-scatter-gather-tensors-in-pipeline"),
    "P4 recomputed": (4, f"{PP} 4 --recompute-granularity full"),
    "P4 gpipe": (4, f"{PP} 4 {SCHEDULE} gpipe"),
    "P4V2 breadth-first": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} breadth-first"),
    "P4 equal work": (4, f"{PP} 4 --pipeline-model-parallel-layout auto"),
    "P4 uneven": (4, f"{PP} 4 --pipeline-model-parallel-layout Et*6|t*3|t*5|ttL"),
    "P4 zb-h1": (4, f"{PP} 4 {SCHEDULE} zb-h1 {EAGER}"),
    "P4 zb-h2": (4, f"{PP} 4 {SCHEDULE} zb-h2 {EAGER}"),
    "P4 zb-h2 validated": (4, f"{PP} 4 {SCHEDULE} zb-h2 {EAGER} {VALIDATED}"),
    "P4D2 zb-v validated": (
        8,
        f"{PP} 4 {CHUNKS} 2 {SCHEDULE} zb-v {EAGER} {VALIDATED} --use-distributed-optimizer",
    ),
    "P4 zb-v": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} zb-v {EAGER}"),
    "P4 v-half": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} v-half {EAGER}"),
    "P4 v-min": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} v-min {EAGER}"),
    "P4 dualpipe-v": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} dualpipe-v {EAGER}"),
    "P4 zb-h1 recomputed": (4, f"{PP} 4 {SCHEDULE} zb-h1 {EAGER} --recompute-granularity full"),
    "P4 zb-v recomputed": (4, f"{PP} 4 {CHUNKS} 2 {SCHEDULE} zb-v {EAGER} --recompute-granularity full"),
    "P4 auto": (4, f"{PP} 4 {SCHEDULE} auto {EAGER}"),
    "P2D4+ZeRO in 2": (8, f"{PP} 2 {SHARDED} optim {INSTANCES}"),
    "D4+ZeRO2": (4, f"{SHARDED} optim_grads {OVERLAP}"),
    "P2D4+ZeRO2": (8, f"{PP} 2 {SHARDED} optim_grads"),
    "D4+ZeRO3": (4, f"{SHARDED} optim_grads_params {OVERLAP}"),
    "P2D4+ZeRO3": (8, f"{PP} 2 {SHARDED} optim_grads_params {OVERLAP}"),
    "P2D4+ZeRO3 in 2": (8, f"{PP} 2 {SHARDED} optim_grads_params {OVERLAP} {INSTANCES}"),
    "P2V2D4+ZeRO3": (8, f"{PP} 2 {CHUNKS} 4 {SHARDED} optim_grads_params {OVERLAP}"),
}
# Stages whose dry runs are quick, for the default tests.
QUICK = {("P2D4+ZeRO3", 1), ("P4 uneven", 3)}
CASES = [
    pytest.param(name, stage, marks=() if (name, stage) in QUICK else pytest.mark.slow)
    for name, (processes, flags) in LAYOUTS.items()
    for stage in range(int(flags.split(f"{PP} ")[1][0]) if PP in flags else 1)
]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_memory_of_a_given_layout_matches_a_dry_run(name: str, stage: int):
    processes, flags = LAYOUTS[name]
    config = config_of(f"{COMMON} {LLAMA} {flags}")
    gpt, layout = given_run(config, processes)
    machine = cluster(processes)
    run = DryRun.from_config(with_auto_layout(config), GPT, processes)
    counted = run.count(stage * processes // layout.pipeline).memory
    planned = stage_memory(gpt, layout, machine, stage, our_program(gpt, layout, machine))
    assert (planned.master, planned.moments) == pytest.approx(
        (counted["master weights"], counted["moments"]), rel=1e-3
    )
    assert planned.total == pytest.approx(counted["peak"], rel=0.004 if "zb-" in name else 0.006)


# Eight layers whose activations are small, so that whole parameters and gradients determine the peak.
SHORT = COMMON.replace("--num-layers 16", "--num-layers 8").replace("--seq-length 4096", "--seq-length 1024")
TIED = LLAMA.replace("--untie-embeddings-and-output-weights ", "")
ZERO2, ZERO3 = f"{SHARDED} optim_grads", f"{SHARDED} optim_grads_params {OVERLAP}"
FULL = "--recompute-granularity full"
UNITS = {
    "ZeRO2, tied": (4, f"{TIED} {ZERO2}"),
    "ZeRO2 overlapped, tied": (4, f"{TIED} {ZERO2} {OVERLAP}"),
    "ZeRO3": (4, f"{LLAMA} {ZERO3}"),
    "ZeRO3, reduction not overlapped": (4, f"{LLAMA} {SHARDED} optim_grads_params --overlap-param-gather"),
    "ZeRO3, gather not overlapped": (4, f"{LLAMA} {SHARDED} optim_grads_params --overlap-grad-reduce"),
    "ZeRO3, not overlapped": (4, f"{LLAMA} {SHARDED} optim_grads_params"),
    "ZeRO3, tied": (4, f"{TIED} {ZERO3}"),
    "ZeRO3, tied, recomputed": (4, f"{TIED} {ZERO3} {FULL}"),
    "P2 ZeRO2, tied": (8, f"{TIED} {ZERO2} {OVERLAP} {PP} 2"),
    "P2 ZeRO3, tied": (8, f"{TIED} {ZERO3} {PP} 2"),
    "P2 ZeRO3, recomputed": (8, f"{LLAMA} {ZERO3} {FULL} {PP} 2"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "ZeRO3, tied" else pytest.mark.slow) for x in UNITS]
)
def test_memory_of_whole_units_matches_a_dry_run(name: str):
    """Parameters and gradients that ranks gather for a layer, for the loss and for the embedding."""
    processes, flags = UNITS[name]
    config = config_of(f"{SHORT} {flags}")
    gpt, layout = given_run(config, processes)
    machine, run = cluster(processes), DryRun.from_config(config, GPT, processes)
    for stage in range(layout.pipeline):
        counted = run.count(stage * processes // layout.pipeline).memory
        planned = stage_memory(gpt, layout, machine, stage, our_program(gpt, layout, machine))
        assert planned.total == pytest.approx(counted["peak"], rel=4e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_flags_of_a_given_layout_give_it(name: str):
    """The planner's flags for a layout are those of the command, or mean the same."""
    processes, flags = LAYOUTS[name]
    gpt, layout = given_run(config_of(f"{COMMON} {LLAMA} {flags}"), processes)
    words = " ".join(word for word in layout.flags(gpt)).replace("'", "")
    again = given_run(config_of(f"{COMMON} {LLAMA} {words}"), processes)
    assert again == (gpt, layout)


SCHEDULES = [
    *(Layout(pipeline=4, pipeline_schedule=name) for name in ("gpipe", "zb-h1", "zb-h2", "auto")),
    *(
        Layout(pipeline=4, chunks=2, pipeline_schedule=name)
        for name in ("breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v", "auto")
    ),
    Layout(pipeline=4, balanced=True),
    Layout(pipeline=4, chunks=2, balanced=True, pipeline_schedule="zb-v"),
    Layout(pipeline=4, data=2, sharded_parameters=True, pipeline_schedule="gpipe"),
]


@pytest.mark.parametrize("layout", SCHEDULES, ids=str)
@pytest.mark.parametrize("microbatches", [8, 42])
def test_the_time_of_a_schedule_is_that_of_its_list(layout: Layout, microbatches: int):
    """Also where only the first of many microbatches are simulated; and the bound of the search is below it."""
    gpt, machine = job(16, 2048, 16, microbatches * layout.data), cluster(8)
    simulator = simulator_of(gpt, layout, machine)
    timeline = simulator.timeline(microbatches)
    assert simulator.pipeline_seconds() == pytest.approx(makespan(timeline), rel=2e-3)
    assert simulator.pipeline_bound() <= simulator.pipeline_seconds() * (1 + 1e-9)
    # Every stage does all of its work.
    for rank, row in enumerate(timeline):
        work = sum(sum(simulator.pass_seconds(rank, chunk)[:2]) for chunk in range(layout.chunks))
        assert sum(end - start for _, start, end in row) == pytest.approx(microbatches * work)
        assert len([1 for action, _, _ in row if isinstance(action, Forward)]) == microbatches * layout.chunks


def test_weight_gradients_are_half_of_the_backward_products_of_linear_layers():
    simulator = simulator_of(job(4, 4096, 32, 8), Layout(pipeline=2, pipeline_schedule="zb-h1"), cluster(2))
    layer, attention = simulator.kernels.layer, simulator.kernels.attention
    products = layer.backward.matmul - attention.backward.matmul
    assert layer.weights == pytest.approx(products / 2, rel=0.1)


def test_hybrid_sharding_gathers_within_a_node():
    """64 replicas on nodes of 8: eight instances gather parameters over NVLink, and sum gradients over the network."""
    gpt, machine = job(24, 4096, 32, 256), cluster(64)
    whole = Layout(data=64, sharded_parameters=True, distributed_optimizer=True, overlap_grad_reduce=True)
    within = dataclasses.replace(whole, instances=8)
    one, eight = (
        {exchange.name: exchange for exchange in simulator_of(gpt, layout, machine).exchanges()}
        for layout in (whole, within)
    )
    assert eight["parameter gather"].seconds < one["parameter gather"].seconds / 1.2
    assert eight["gradient reduction over instances"].hidden == 0
    assert "gradient reduction over instances" not in one


@pytest.mark.parametrize(("layers", "stages"), [(36, 16), (28, 12), (61, 32), (6, 8)])
def test_a_search_has_stages_that_training_takes(layers: int, stages: int):
    """Equal numbers of layers do not fill these stages, so all of its layouts have stages of equal work."""
    common = COMMON.replace("--num-layers 16", f"--num-layers {layers}")
    config = config_of(f"{common} {LLAMA} {PP} {stages} --pipeline-model-parallel-layout auto")
    gpt, given = given_run(config, stages)
    assert stages in pipeline_sizes(gpt)
    found = list(variants(Layout(pipeline=stages), gpt, cluster(64), ("none",)))
    assert found and {layout.layers(gpt) for layout in found} == {given.layers(gpt)}


def test_a_division_that_is_even_is_the_even_one():
    config = config_of(
        f"{COMMON} {LLAMA} {PP} 4 --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 3"
    )
    gpt, layout = given_run(config, 4)
    assert layout.division == (5, 4, 4, 3)
    assert [sum(chunk) for (chunk,) in layout.layers(gpt)] == [5, 4, 4, 3]
    same = given_run(
        config_of(f"{COMMON} {LLAMA} {PP} 4 --pipeline-model-parallel-layout Et*4|(t*4|)*2t*4L"), 4
    )
    assert same[1].division is None
    assert isinstance(same[0], Job)


def test_the_divisor_of_the_vocabulary_counts():
    """131,072 ids are padded to a multiple of 2 x 50,000."""
    config = config_of(
        f"{COMMON} --num-layers 1 {LLAMA} {TP} 2 --make-vocab-size-divisible-by 50000 --micro-batch-size 1"
    )
    gpt, layout = given_run(config, 2)
    assert gpt.padded_vocab_size(2) == 200_000
    counted, machine = DryRun.from_config(config, GPT, 2).count(0).memory, cluster(2)
    planned = stage_memory(gpt, layout, machine, 0, our_program(gpt, layout, machine))
    assert planned.weights == counted["weights"]
    assert planned.total == pytest.approx(counted["peak"], rel=0.006)
