"""The planner's search for layouts."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from random import Random

import pytest
from published import cluster, job

from megatron.commands.plan_inputs import PlanConfig, make_job
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.parallel.config import ParallelConfig
from megatron.parallel.stages import split_layers
from megatron.planner.cluster import Cluster, Host, cluster_from_data_sheet
from megatron.planner.device_specs import data_sheet
from megatron.planner.explain import other_choices, takeaways, why_not
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import fits
from megatron.planner.models import MODELS
from megatron.planner.our_program import memory_of, simulator_of
from megatron.planner.parameters import stage_parameters
from megatron.planner.profiles import find_constants, with_constants
from megatron.planner.report import command_flags
from megatron.planner.search import SearchResult, make_plan, search, smallest_layout
from megatron.planner.space import shapes, variants

# Random cases that are enumerated within a second.
QUICK = (2, 7)
UNTIED = {"untie_embeddings_and_output_weights": True, "add_bias_linear": False}
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_grouped_gemm": True, "add_bias_linear": False}


def found(job, cluster) -> SearchResult:
    return search(job, cluster, num_plans=10, progress=lambda count: None)


def random_case(seed: int) -> tuple[Job, Cluster]:
    """A random model and batch on a random cluster of up to 32 devices, whose memory may be scarce."""
    random = Random(seed)
    heads = random.choice([8, 12, 16, 24])
    model = ModelConfig(
        num_layers=random.choice([6, 8, 12, 15, 23]),
        hidden_size=128 * heads,
        num_attention_heads=heads,
        max_position_embeddings=8192,
        **random.choice([{}, {"swiglu": True, **UNTIED}, EXPERTS]),
    )
    gpu, sizes = random.choice([("a100-80gb", [2, 8, 16, 24]), ("h100-80gb", [8, 32]), ("gb200", [4, 8, 16])])
    machine = cluster(random.choice(sizes), gpu)
    memory = machine.device.memory * random.choice([0.1, 0.2, 1])
    machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory=memory))
    length = random.choice([1024, 4096, 8192])
    return Job(model, length, 32000, machine.devices * random.choice([2, 3, 8])), machine


def check_search(seed: int) -> None:
    """Compare the plans of a search with those of simulating every layout, with offload if none fits without."""
    gpt, machine = random_case(seed)
    every: dict[Layout, float] = {}
    number = sum(1 for shape in shapes(gpt, machine) for _ in variants(shape, gpt, machine))
    for ways_of in (lambda layout, gpt: [[layout]], with_host_memory):
        for shape in shapes(gpt, machine):
            for layout in variants(shape, gpt, machine):
                for ways in ways_of(layout, gpt):
                    fitting = [way for way in ways if fits(memory_of(gpt, way, machine), machine)]
                    for way in fitting[:2]:
                        seconds = simulator_of(gpt, way, machine).step().seconds
                        every[shape] = min(seconds, every.get(shape, seconds))
        if every:
            break
    if not every:
        with pytest.raises(InputError, match="no layout fits"):
            found(gpt, machine)
        return
    result = found(gpt, machine)
    seconds = [plan.step.seconds for plan in result.plans]
    assert seconds == pytest.approx(sorted(every.values())[:10], rel=1e-9)
    assert result.layouts == number >= result.too_large


def with_host_memory(layout: Layout, gpt: Job) -> Iterator[list[Layout]]:
    """Yield a layout with each number of offloaded layers, without and with the optimizer in host memory."""
    numbers: list[int | None] = [0]
    if layout.recompute == "none" and not layout.post_validation:
        layers = max(sum(chunk) for stage in layout.layers(gpt) for chunk in stage)
        numbers += [*range(1, layers), None]
    for state in (False, True)[: 1 + (not layout.post_validation)]:
        yield [
            dataclasses.replace(layout, offload_optimizer=state, offload_layers=number) for number in numbers
        ]


@pytest.mark.parametrize("seed", QUICK)
def test_a_search_finds_the_best_of_all_layouts(seed: int):
    check_search(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(50)) - set(QUICK)))
def test_a_search_finds_the_best_of_all_layouts_at_length(seed: int):
    check_search(seed)


def test_a_search_of_many_layouts_simulates_few():
    """512 H100 for a model of 70 billion parameters: thousands of layouts, tens of simulations."""
    model = make_job(PlanConfig(model="llama3-70b"), {})
    result = found(model, cluster(512, "h100-80gb"))
    assert result.layouts > 2000 and result.timed < 100


def test_plans_fit_and_divide():
    gpt, machine = MODELS["39.1b"].job(), cluster(512)
    result = found(gpt, machine)
    assert len(result.plans) == 10
    assert result.too_large > 0
    for plan in result.plans:
        layout = plan.layout
        assert layout.processes == 512
        assert fits(plan.memory, machine)
        assert layout.splits_layers(gpt) or layout.balanced
        assert gpt.global_batch_size % (layout.data * layout.micro_batch_size) == 0
        if layout.chunks > 1 and not layout.v_shaped:
            assert layout.microbatches(gpt) % layout.pipeline == 0


def test_a_small_model_needs_no_model_parallelism():
    """Takeaway 2 of arXiv 2104.04473: model parallelism only until the model fits."""
    best = found(MODELS["1.7b"].job(), cluster(32)).plans[0]
    assert (best.layout.tensor, best.layout.pipeline) == (1, 1)


@pytest.mark.slow
def test_a_trillion_parameters_stay_within_nodes():
    """Takeaway 1: tensor parallelism up to the size of a node, then pipelines. The search takes less than a minute."""
    begin = time.perf_counter()
    best = found(MODELS["1t"].job(), cluster(3072)).plans[0]
    assert time.perf_counter() - begin < 60
    assert best.layout.tensor == 8
    assert best.layout.pipeline >= 16


def test_other_choices_state_their_cost():
    gpt, machine = MODELS["18.4b"].job(), cluster(256)
    best = found(gpt, machine).plans[0]
    reasons = {
        words: why_not(other, best, gpt, machine) for words, other in other_choices(best, gpt, machine)
    }
    assert len(reasons) >= 7
    for text in reasons.values():
        assert re.match(r"([\d.]+% slower: |does not fit: needs [\d.]+ GB of 79.0$|as fast; needs )", text), (
            text
        )
    assert any(text.startswith("does not fit") for text in reasons.values())
    assert "recomputation" in reasons["full recomputation"]
    paragraphs = takeaways(best, gpt, machine)
    assert [f"takeaway {n}" in " ".join(paragraphs) for n in (1, 2, 3)] == [True] * 3


def test_single_changes_keep_sizes_that_a_search_does_not_try():
    """Microbatches of 3 samples, and 12 chunks on a stage."""
    gpt, machine = dataclasses.replace(MODELS["175b"].job(), global_batch_size=1536), cluster(512)
    given = Layout(tensor=8, pipeline=8, data=8, micro_batch_size=3, overlap_grad_reduce=True)
    others = dict(other_choices(make_plan(gpt, given, machine), gpt, machine))
    assert {"T4 D16", "sequence parallelism", "full recomputation", "microbatch 1"} <= set(others)
    assert others["full recomputation"] == dataclasses.replace(given, recompute="full")
    assert "microbatch 6" not in others

    given = dataclasses.replace(given, chunks=12, micro_batch_size=1)
    others = dict(other_choices(make_plan(gpt, given, machine), gpt, machine))
    assert others["microbatch 2"] == dataclasses.replace(given, micro_batch_size=2)
    assert others["T4 D16"].chunks == 12
    assert others["P16 D4"].chunks == 6  # 96 layers
    assert "no interleaving" in others and "1F1B or interleaving" not in others


def test_single_changes_have_stages_of_equal_work_where_others_are_impossible():
    """16 stages of 36 layers: with three layers each, nothing is left for the last four."""
    gpt, machine = job(36, 4096, 32, 64), cluster(64)
    given = Layout(pipeline=8, data=8, overlap_grad_reduce=True)
    other = dict(other_choices(make_plan(gpt, given, machine), gpt, machine))["P16 D4"]
    assert other.balanced and {sum(chunk) for (chunk,) in other.layers(gpt)} == {2, 3}
    others = dict(other_choices(make_plan(gpt, other, machine), gpt, machine))
    assert "P8 D8" in others and "stages of equal numbers of layers" not in others


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=8, pipeline=8, data=8, chunks=12), "which 12 chunks per stage reduce to 0.3%"),
        (
            Layout(tensor=8, pipeline=8, data=8, chunks=2, pipeline_schedule="zb-v"),
            "(p - 1) / m = 3.6% with 1F1B; in simulation with zb-v",
        ),
        (Layout(tensor=8, pipeline=8, data=8, recompute="full"), "Recomputation (section 3.5): 2"),
        (Layout(tensor=8, pipeline=8, data=8), "not needed, the activations fit"),
        (
            Layout(tensor=8, pipeline=8, data=8, offload_layers=2),
            "not used, activations of 2 layers go to host memory",
        ),
        (
            Layout(tensor=8, pipeline=8, data=8, offload_layers=None),
            "not used, activations of all layers go to host memory",
        ),
    ],
    ids=str,
)
def test_takeaways_are_those_of_the_layout(layout: Layout, words: str):
    gpt, machine = MODELS["175b"].job(), cluster(512)
    text = "\n".join(takeaways(make_plan(gpt, layout, machine), gpt, machine))
    assert words in text and "is best" not in text
    assert ("chunks per stage" in text) == (layout.schedule_name == "interleaved")


@pytest.mark.parametrize(("gpu", "gpus", "joined"), [("l40s", 4, 4), ("h100-80gb", 16, 8), ("gb200", 16, 16)])
def test_takeaways_count_the_devices_that_links_join(gpu: str, gpus: int, joined: int):
    gpt, machine = job(8, 1024, 16, 64), cluster(gpus, gpu)
    text = takeaways(make_plan(gpt, Layout(data=gpus), machine), gpt, machine)[0]
    assert f"Links join {joined} devices; T1 stays within them" in text


def test_a_model_that_fits_nowhere_names_the_smallest_cluster():
    gpt = MODELS["39.1b"].job()
    with pytest.raises(InputError) as error:
        found(gpt, cluster(2))
    message = str(error.value)
    assert (
        "on 2 a100-80gb with 79 GB usable on each and 225 GB of host memory; the smallest cluster" in message
    )
    smallest = int(re.search(r"the smallest cluster that fits it has ([\d]+) of them", message)[1])
    assert found(gpt, cluster(smallest)).plans
    assert smallest == 4
    with pytest.raises(InputError, match="has 4 of them"):
        found(gpt, cluster(1))
    # Host memory of 50 GB for each device has no room for the optimizer's state of four of them.
    scarce = dataclasses.replace(cluster(2), host=Host(32e9, 50e9))
    with pytest.raises(InputError, match=r"and 45 GB of host memory; .* fits it has 16 of them"):
        found(gpt, scarce)


def test_a_model_on_few_devices_uses_host_memory():
    """Llama 3 70B on one node of 8 H100: 16 + 12 bytes a parameter are more than they have."""
    gpt, machine = make_job(PlanConfig(model="llama3-70b"), {}), cluster(8, "h100-80gb")
    best = found(gpt, machine).plans[0]
    assert best.layout.offload_optimizer
    assert best.memory.host > 12 * 70.5e9 / 8
    flags = " ".join(command_flags(best, gpt, machine, None))
    assert "--cpu-offload-optimizer" in flags and fits(best.memory, machine)
    nowhere = dataclasses.replace(machine, host=Host(64e9, 64e9))
    with pytest.raises(InputError, match="no layout fits"):
        found(gpt, nowhere)


@pytest.mark.parametrize("batch", [7, 8])
def test_no_cluster_below_the_named_one_fits(batch: int):
    """The message of every smaller cluster names the one that the search then plans."""
    gpt = job(2, 57344, 64, batch)
    for gpus in (1, 2, 4):
        with pytest.raises(InputError, match=re.escape("has 8 of them (T4 P2 D1, ")):
            found(gpt, cluster(gpus))
    assert found(gpt, cluster(8)).plans


def test_the_smallest_layout_divides_the_batch():
    """The search plans as many devices as it has."""
    gpt, machine = job(1, 40960, 320, 13 * 8), cluster(8)
    smallest = smallest_layout(gpt, machine)
    assert smallest is not None and gpt.global_batch_size % smallest.data == 0
    assert found(gpt, cluster(smallest.processes)).plans


def test_other_choices_divide_the_sequence():
    gpt, machine = job(8, 4096, 32, 48, seq_length=1004), cluster(8)
    others = [other for plan in found(gpt, machine).plans for _, other in other_choices(plan, gpt, machine)]
    assert {2, 4} <= {other.tensor for other in others if other.sequence_parallel} < {2, 4, 8}
    assert 8 in {other.tensor for other in others}


def llama_405b(batch: int) -> Job:
    """Llama 3.1 405B, whose 126 layers no usual number of stages divides (arXiv 2407.21783 section 3.3)."""
    return make_job(PlanConfig(model="llama3.1-405b", global_batch_size=batch), {})


def test_stages_may_be_uneven():
    """16 stages of 126 layers: the first and the last have one layer less, as in arXiv 2407.21783 section 3.3.2."""
    gpt, sixteen = llama_405b(2048), Layout(pipeline=16)
    assert [sixteen.layers(gpt)[stage][0][0] for stage in (0, 1, 14, 15)] == [7, 8, 8, 7]
    flags = " ".join(sixteen.flags(gpt))
    assert "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7" in flags
    chunks = Layout(pipeline=16, chunks=8)
    assert "--pipeline-model-parallel-layout 'E|(t|)*126L'" in chunks.flags(gpt)
    config = ParallelConfig(pipeline_model_parallel_size=16, pipeline_model_parallel_layout="E|(t|)*126L")
    stages = [[len(chunk.layers) for chunk in stage] for stage in split_layers(config, 126)]
    assert stages == [[sum(chunk) for chunk in stage] for stage in chunks.layers(gpt)]
    assert chunks.layers(gpt)[0][0] == chunks.layers(gpt)[15][7] == (0, 0)


def test_llama_405b_is_as_fast_as_published():
    """Table 4 of arXiv 2407.21783: T8 P16 D128 on 16,384 H100, 16 million tokens a step, 400 TFLOP/s a GPU.

    The table does not say how many chunks a stage has. The layers divide into 4 or 8.
    """
    gpt = llama_405b(2048)
    sheet = data_sheet("h100-80gb", where="")
    machine = with_constants(cluster_from_data_sheet(sheet, 16384), find_constants(sheet.name))
    published = Layout(
        tensor=8,
        pipeline=16,
        data=128,
        chunks=4,
        sequence_parallel=True,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
    )
    seconds = make_plan(gpt, published, machine).step.seconds
    assert gpt.flops() / seconds / 16384 / 1e12 == pytest.approx(400, rel=0.03)
    seconds = make_plan(gpt, dataclasses.replace(published, chunks=8), machine).step.seconds
    best = found(gpt, machine).plans[0]
    assert best.step.seconds == pytest.approx(seconds, rel=0.05)
    assert best.layout.context * best.layout.pipeline >= 16 and best.layout.tensor in (4, 8)


def test_stages_of_equal_work_with_a_large_vocabulary():
    """Llama 3.2 1B: the output layer for 128,256 tokens takes as long as two layers."""
    big = llama_405b(16)
    model = dataclasses.replace(
        big.model,
        num_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        kv_channels=64,
        ffn_hidden_size=8192,
    )
    gpt, machine = dataclasses.replace(big, model=model), cluster(4)
    plain = Layout(pipeline=4)
    candidates = [
        layout
        for layout in variants(plain, gpt, machine)
        if layout.recompute == "none" and not layout.splits_backward
    ]
    plan = min((make_plan(gpt, layout, machine) for layout in candidates), key=lambda plan: plan.step.seconds)
    assert plan.layout == dataclasses.replace(plain, balanced=True)
    assert plan.layout.layers(gpt) == (((5, 0),), ((5, 0),), ((4, 0),), ((2, 0),))
    assert "--pipeline-model-parallel-layout auto" in plan.layout.flags(gpt)
    assert plan.step.seconds < 0.9 * make_plan(gpt, plain, machine).step.seconds
    parameters = [stage_parameters(gpt, plan.layout, stage) for stage in range(4)]
    assert sum(parameters) == sum(stage_parameters(gpt, plain, stage) for stage in range(4))


@pytest.mark.slow
def test_a_cluster_that_no_layout_divides_is_told_what_would_fit():
    """The model fits fewer devices than there are, but no layout of it divides their number."""
    machine = cluster_from_data_sheet(data_sheet("h100-80gb", where=""), 8 * 257)
    machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory=20e9))
    mixture = make_job(PlanConfig(model="deepseek-v3", global_batch_size=8 * 257), {})
    with pytest.raises(
        InputError, match=r"no layout fits .* and divides them .* choose a multiple of \d+ of them"
    ):
        found(mixture, machine)


def test_a_layer_that_fits_nowhere_is_an_error():
    with pytest.raises(
        InputError, match=r"nor on more of them: a single layer with a sample of .* tokens is too large"
    ):
        found(job(2, 400_000, 16, 8), cluster(8))


def test_a_batch_that_no_layout_divides_is_an_error():
    with pytest.raises(
        InputError,
        match=r"--global-batch-size: no layout divides 7 samples, .* over 64 devices; choose 4 or 8 samples, or",
    ):
        found(job(25, 5 * 128, 5, 7), cluster(64))
