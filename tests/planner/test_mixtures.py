"""The planner's formulas of mixtures of experts against models and dry runs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from models import config_of
from planner.test_memory import ONE_DEVICE
from published import cluster

from megatron.commands.plan_inputs import PlanConfig, make_job
from megatron.model.config import check_expert_parallel
from megatron.model.moe import experts
from megatron.ops.cpu import linear
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import axis_sizes
from megatron.parallel.recompute import NO_RECOMPUTE
from megatron.performance.config import check_grouped_products
from megatron.planner import kernels
from megatron.planner.activations import layer_activations
from megatron.planner.dry_run import DryRun
from megatron.planner.explain import other_choices
from megatron.planner.kernels import Kernels
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import stage_memory
from megatron.planner.parameters import model_parameters, owned_parameters, stage_parameters
from megatron.planner.programs import OURS
from megatron.planner.routing import Routing, busiest, mean_tiles
from megatron.planner.search import search
from megatron.planner.simulate import Simulator
from megatron.planner.space import expert_sizes, shapes
from megatron.pretrain_gpt import GPT
from megatron.reports.flops import exact_flops_per_sample, unused_parameters

GATED = f"""
    {ONE_DEVICE} --device cuda --dry-run --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
"""
SHAPES = {
    "mixtral": "--num-experts 4 --ffn-hidden-size 512 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm",
    "deepseek": "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 128 --moe-layer-freq [0]*1+[1]*7 "
    "--moe-shared-expert-intermediate-size 128 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001",
    "qwen": "--num-experts 8 --moe-ffn-hidden-size 256 --moe-router-pre-softmax --moe-shared-expert-gate "
    "--moe-shared-expert-intermediate-size 256 --moe-layer-recompute --moe-z-loss-coeff 0.01 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --moe-layer-freq 2",
}
LAYOUTS = {
    "one": Layout(),
    "E4": Layout(data=4, expert=4, distributed_optimizer=True),
    "E2 ZeRO-2": Layout(data=4, expert=2, sharded_gradients=True, overlap_grad_reduce=True),
    "E2 ZeRO-3": Layout(data=4, expert=2, sharded_parameters=True, overlap_grad_reduce=True),
    "T2 E2": Layout(tensor=2, data=2, expert=2, sequence_parallel=True, distributed_optimizer=True),
    "T2 E2T2": Layout(tensor=2, data=2, expert=2, expert_tensor=2),
    "P4 E2": Layout(pipeline=4, data=2, expert=2),
    "P2V2 E2": Layout(pipeline=2, chunks=2, data=2, expert=2, recompute="full"),
}
QUICK = {("qwen", "E4"), ("deepseek", "P4 E2")}
CASES = [
    pytest.param(shape, name, marks=() if (shape, name) in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for name in LAYOUTS
    # Units count as the largest layer, and of qwen's only every second one has experts.
    if (shape, name) != ("qwen", "E2 ZeRO-3")
]


def job_of(shape: str) -> Job:
    return Job(config_of(f"{GATED} {SHAPES[shape]}").model, 128, vocab_size=512, global_batch_size=8)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("mixtral-8x22b", 140.6, 39.1),
        ("kimi-k2", 1027, 32.6),
        # Their model card does not count the embedding of 0.58 billion as active.
        ("gpt-oss-20b", 20.91, 3.61 + 0.58),
        ("gpt-oss-120b", 116.83, 5.13 + 0.58),
    ],
)
def test_named_mixtures_have_their_published_sizes(name: str, total: float, active: float) -> None:
    job = make_job(PlanConfig(model=name), {})
    parameters = model_parameters(job)
    assert parameters / 1e9 == pytest.approx(total, rel=2e-3)
    assert (parameters - unused_parameters(job.model)) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_memory_matches_a_dry_run(shape: str, name: str) -> None:
    """Exact for weights, gradients and optimizer state but for the padding of buckets."""
    job, layout = job_of(shape), LAYOUTS[name]
    flags = " ".join(layout.flags(job))
    run = DryRun.from_config(config_of(f"{GATED} {SHAPES[shape]} {flags}"), GPT, layout.processes)
    assert model_parameters(job) == run.model_parameters()
    for stage in {0, layout.pipeline - 1}:
        cost = run.count(stage * layout.processes // layout.pipeline)
        memory = stage_memory(job, layout, cluster(layout.processes), stage, OURS)
        assert stage_parameters(job, layout, stage) == cost.parameters
        state = (memory.weights, memory.gradients, memory.master, memory.moments)
        names = ("weights", "gradients", "master weights", "moments")
        assert state == pytest.approx([cost.memory[kind] for kind in names], rel=2e-3)
        assert memory.activations == pytest.approx(cost.memory["activations"], rel=0.1)
        assert memory.total == pytest.approx(
            cost.memory["peak"], rel=0.02 if layout.sharded_gradients else 0.01
        )
        if layout.tensor * layout.pipeline == 1:
            shape_of = {"seq_length": 128, "padded_vocab_size": 512, "num_logits": 128, "causal": False}
            flops = exact_flops_per_sample(job.model, **shape_of, recompute=NO_RECOMPUTE, chunks=[range(8)])
            scores = 8 * 2 * 128 * 128 * 256  # which FlashAttention recomputes
            assert layout.data * cost.flops == 8 * (flops + scores)


@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("recompute", ["", pytest.param("--moe-layer-recompute", marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("biases", ["", "--add-expert-bias"])
def test_memory_of_layers_with_many_rows(expert: int, recompute: str, whole: str, biases: str) -> None:
    """Two layers whose experts hold most of the memory: 1,024 tokens, of which each has three experts."""
    sizes = GATED.replace("--num-layers 8", "--num-layers 2").replace("--seq-length 128", "--seq-length 1024")
    sizes += f"--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 384 --moe-grouped-gemm {recompute} {biases} "
    layout = Layout(data=expert, expert=expert, recompute=whole)
    job = Job(config_of(sizes).model, 1024, vocab_size=512, global_batch_size=8)
    config = config_of(sizes + " ".join(layout.flags(job)))
    counted = DryRun.from_config(config, GPT, expert).count(0).memory["activations"]
    planned = stage_memory(job, layout, cluster(expert), 0, OURS).activations
    assert planned == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_and_their_state_are_divided(shape: str) -> None:
    """E4T2 on 16 ranks: an eighth of the experts on each, and their optimizer state divided by two ranks."""
    job, alone = job_of(shape), Layout()
    layout = Layout(tensor=2, data=8, expert=4, expert_tensor=2, distributed_optimizer=True)
    model = job.model
    assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
    experts = sum(model.expert_layers(8)) * model.num_experts * 3 * 256 * model.moe_ffn_hidden_size
    whole = dataclasses.replace(layout, expert=1, expert_tensor=1)
    dense = stage_parameters(job, whole, 0) - experts
    assert stage_parameters(job, layout, 0) == dense + experts / 8
    assert owned_parameters(job, layout, 0) == dense / 8 + experts / 16
    assert owned_parameters(job, alone, 0) == stage_parameters(job, alone, 0)


def test_an_all_to_all_sends_to_other_nodes_by_its_own_adapter() -> None:
    """Seven of 16 parts stay in the node at 300 GB/s, eight leave it at 25 GB/s, and one stays on the rank."""
    machine = cluster(16)
    share = machine.efficiency.link
    assert machine.all_to_all(16e9, machine.group(8, 1)) == pytest.approx(14e9 / (300e9 * share), rel=1e-3)
    assert machine.all_to_all(16e9, machine.group(16, 1)) == pytest.approx(8e9 / (25e9 * share), rel=1e-3)
    assert machine.all_to_all(16e9, machine.group(1, 1)) == 0


def test_a_token_is_dispatched_once_to_each_node_and_rank() -> None:
    """Two experts on two nodes of eight: 1.5 nodes of which half is the rank's own, and 1.94 ranks."""
    machine = cluster(16)
    share = machine.efficiency.link
    outside = 2 * (1 - 0.5**2) / 2 * 16e9 / (25e9 * share)
    assert machine.dispatch(16e9, Routing(2), machine.group(16, 1)) == pytest.approx(outside, rel=1e-3)
    inside = 8 * (1 - (7 / 8) ** 2) * 7 / 8 * 16e9 / (300e9 * share)
    assert machine.dispatch(16e9, Routing(2), machine.group(8, 1)) == pytest.approx(inside, rel=1e-3)
    assert machine.dispatch(16e9, Routing(2), machine.group(1, 1)) == 0


def test_node_limited_routing_sends_to_fewer_nodes() -> None:
    """DeepSeek-V3's 8 experts in 4 of 8 groups, on 8 nodes: 3.6 nodes in place of 5.25 (2412.19437 section 2.1.2)."""
    free, limited, machine = Routing(8), Routing(8, 8, 4), cluster(64)
    assert free.distinct(8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert limited.distinct(8) == pytest.approx(4 * (1 - (3 / 4) ** 8))
    everyone = machine.group(64, 1)
    seconds = [machine.dispatch(16e9, routing, everyone) for routing in (limited, free)]
    assert seconds[0] / seconds[1] == pytest.approx(limited.distinct(8) / free.distinct(8), rel=1e-3)
    job = make_job(PlanConfig(model="deepseek-v3"), {})
    assert Routing.of(job.model) == limited
    for nodes in (2, 4, 16, 64):
        assert limited.distinct(nodes) < free.distinct(nodes)
    assert Routing(8, 8, 8).distinct(5) == Routing(8).distinct(5)


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_distinct_places_are_those_of_every_choice(places: int) -> None:
    """Two of four groups of two experts, and three draws among these: every choice is as likely."""
    numbers = [
        len({expert * places // 8 for expert in experts})
        for groups in itertools.combinations(range(4), 2)
        for experts in itertools.product([2 * group + half for group in groups for half in (0, 1)], repeat=3)
    ]
    assert Routing(3, 4, 2).distinct(places) == pytest.approx(np.mean(numbers))


def test_consecutive_experts_are_at_few_places() -> None:
    """AutoModel's FakeBalancedGate: token i takes experts 8 i to 8 i + 7, modulo their number."""
    for number, places in ((128, 8), (256, 64), (384, 32), (384, 4)):
        ranks = (np.arange(number * 8).reshape(-1, 8) % number) // (number // places)
        assert Routing(8, round_robin=number).distinct(places) == np.mean([len(set(row)) for row in ranks])


def test_the_busiest_rank_has_as_many_rows_as_in_random_draws() -> None:
    """4 of 64 experts for each of 2,048 tokens, on 2, 8 or 64 ranks."""
    random = np.random.default_rng(0)
    counts = np.zeros((40, 64))
    for count in counts:
        experts = random.random((2048, 64)).argpartition(4, axis=1)[:, :4]
        count += np.bincount(experts.ravel(), minlength=64)
    for ranks in (2, 8, 64):
        most = counts.reshape(40, ranks, -1).sum(-1).max(-1).mean() * ranks / (2048 * 4)
        assert busiest(2048, 4, 64, ranks) == pytest.approx(most, abs=0.01)
    assert busiest(2048, 4, 64, 1) == busiest(2048, 4, 4, 4) == 1


def test_a_random_number_of_rows_fills_half_a_tile_more() -> None:
    rows = np.random.default_rng(0).normal(1024, 32, 100_000)
    assert mean_tiles(1024, 128, 32) == pytest.approx(8.5)
    assert mean_tiles(1000, 128, 32) == pytest.approx(np.ceil((rows - 24) / 128).mean(), abs=0.01)
    assert mean_tiles(1000, 128, 0) == 8
    assert mean_tiles(20, 128, math.sqrt(20)) == pytest.approx(1, abs=1e-4)


def test_latent_attention_may_keep_its_latents_alone() -> None:
    """Backward then repeats the two up-projections, whose outputs are most of what attention keeps."""
    job = make_job(PlanConfig(model="deepseek-v3"), {})
    model, layout, machine = job.model, Layout(data=256, pipeline=8, expert=32), cluster(2048)
    latents = dataclasses.replace(OURS, latent_recompute=True)
    whole, kept = (layer_activations(job, layout, 2, x, recompute="none") for x in (OURS, latents))
    projected = 128 * (2 * 192 + 128 + 128)
    assert whole - kept == 2 * job.seq_length * projected
    once, twice = (Kernels(job, layout, machine, x).projections for x in (OURS, latents))
    linear = Kernels(job, layout, machine, OURS).layer_linear
    again = sum(
        linear(job.seq_length, rank, 128 * width).forward.total
        for rank, width in ((model.q_lora_rank, 192), (model.kv_lora_rank, 256))
    )
    assert twice.forward == once.forward
    assert twice.backward.total - once.backward.total == pytest.approx(again)


def test_norms_and_activations_may_be_recomputed() -> None:
    """Their outputs are not kept, and backward reads and writes as much as forward again."""
    job, layout, machine = job_of("mixtral"), Layout(), cluster(1)
    again = dataclasses.replace(OURS, module_recompute=True)
    tokens, hidden, ffn, topk = layout.tokens(job), 256, 512, 2
    whole, kept = (
        layer_activations(job, layout, 2, x, recompute="none", has_experts=True) for x in (OURS, again)
    )
    assert whole - kept == 2 * tokens * (2 * hidden + topk * ffn)
    once, twice = (Kernels(job, layout, machine, x).expert_layer for x in (OURS, again))
    assert twice.forward == once.forward
    repeated = tokens * 2 * kernels.NORM * hidden + tokens * topk * 1.5 * ffn * OURS.mlp[0]
    seconds = 2 * repeated / (machine.device.bandwidth * machine.efficiency.memory)
    assert twice.backward.total - once.backward.total == pytest.approx(seconds)


def test_a_gpu_waits_for_its_host() -> None:
    """At each kernel, or for a part of the time of a layer with experts."""
    job, layout, machine = job_of("deepseek"), Layout(), cluster(1)
    alone = Kernels(job, layout, machine, OURS)
    blocked = Kernels(job, layout, machine, dataclasses.replace(OURS, synchronous=0.003)).layers(1, 7)
    assert blocked.total == pytest.approx(alone.layers(1, 7).total + 8 * 0.003)
    starved = Kernels(job, layout, machine, dataclasses.replace(OURS, starved=0.1)).layers(1, 7)
    assert starved.total == pytest.approx(alone.layer.total + 1.1 * 7 * alone.expert_layer.total)
    busy = dataclasses.replace(OURS, starved=0.1, host=(0.0, 1.0))  # the host is the slower one
    assert Kernels(job, layout, machine, busy).layers(0, 7).total == pytest.approx(7)


def test_communication_is_that_of_a_dry_run() -> None:
    """Rows go to their experts and back in both passes, with their weights and numbers."""
    job, layout = job_of("mixtral"), LAYOUTS["T2 E2T2"]
    config = config_of(f"{GATED} {SHAPES['mixtral']} {' '.join(layout.flags(job))}")
    cost = DryRun.from_config(config, GPT, layout.processes).count(0)
    rows, passes = 128 // 2 * 2 * 2, 8 * 4  # of eight layers and four microbatches
    counted = cost.traffic["all-to-all", "expert-parallel"]
    assert counted.bytes == passes * (4 * rows * 256 * 2 + 2 * rows * 4 + 4 * 2 * 8)
    machine = cluster(4)
    # The planner's is that of the rank whose experts have the most rows.
    most = busiest(2 * 64 * 2, 2, 4, 2)
    group = layout.expert_group(machine)
    seconds = 4 * machine.all_to_all(most * rows * 256 * 2, group)
    seconds += 2 * machine.all_to_all(most * rows * 4, group) + machine.all_to_all(4 * 2 * 8, group)
    step = Simulator(job, layout, machine, OURS).step()
    assert step.expert_parallel == pytest.approx(passes * seconds)


def test_experts_are_padded_as_on_a_cpu() -> None:
    """In bf16 the experts' rows are multiples of 16, in fp32 as many as there are."""
    assert kernels.EXPERT_ROWS == linear.EXPERT_ROWS
    assert kernels.MIN_MULTIPLES == experts.MIN_MULTIPLES
    job, layout, gpu = job_of("mixtral"), Layout(), cluster(1)

    def padding(precision: str, rows: float) -> float:
        device = dataclasses.replace(gpu.device, name="cpu", precision=precision)
        machine = dataclasses.replace(gpu, device=device)
        return Kernels(job, layout, machine, OURS).padding_rows(rows)

    assert padding("bf16", 4 * 4 * 16) == sum(-n % 16 for n in range(16)) / 16
    assert padding("bf16", 4 * 4 * 16 - 1) == padding("fp32", 4096) == 0
    assert Kernels(job, layout, gpu, OURS).padding_rows(4096) == 0


def test_small_products_are_less_efficient() -> None:
    """Grouped products share the waves of tiles; one after the other each leaves most of the device idle."""

    def products(experts: int, **fields: bool) -> float:
        model = dataclasses.replace(
            job_of("mixtral").model, num_experts=experts, moe_ffn_hidden_size=512, **fields
        )
        job = Job(model, 4096, vocab_size=512, global_batch_size=8)
        return Kernels(job, Layout(), cluster(1), OURS).routed.forward.matmul

    assert products(64) > 1.2 * products(8)  # as many rows and operations
    assert products(64, moe_grouped_gemm=False) > 2 * products(64)


def test_the_search_divides_experts() -> None:
    job = Job(job_of("deepseek").model, 128, vocab_size=512, global_batch_size=16)
    assert expert_sizes(job, 4) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    result = search(job, cluster(4), num_plans=5, progress=lambda _: None)
    for plan in result.plans:
        words = " ".join(plan.layout.flags(job))
        config = config_of(f"{GATED} {SHAPES['deepseek']} {words}")
        axis_sizes(config.parallel, 4)
        assert config.parallel.expert_size == plan.layout.expert * plan.layout.expert_tensor
    others = list(other_choices(result.plans[0], job, cluster(4)))
    assert {other.expert for _, other in others} != {result.plans[0].layout.expert}


@pytest.mark.parametrize(
    "sizes",
    [
        {},  # T8 routes equal parts of 8,200 tokens, but not of the 4,100 of a context-parallel rank
        {"moe_ffn_hidden_size": 80},  # T4 shares these, but not in rows of 8 elements
        {"hidden_size": 260, "add_expert_bias": True, "moe_grouped_gemm": False},
    ],
)
def test_the_search_has_the_divisions_of_experts_that_training_takes(sizes: dict[str, int]) -> None:
    fields = {"num_attention_heads": 8, "num_query_groups": 8, "max_position_embeddings": 8200} | sizes
    model = dataclasses.replace(job_of("mixtral").model, **fields)
    found = list(shapes(Job(model, 8200, vocab_size=512, global_batch_size=16), cluster(16)))
    for shape in found:
        parallel = ParallelConfig(
            tensor_model_parallel_size=shape.tensor,
            context_parallel_size=shape.context,
            expert_model_parallel_size=shape.expert,
            expert_tensor_parallel_size=shape.expert_tensor,
        )
        check_expert_parallel(model, parallel, 8200)
        if model.moe_grouped_gemm:
            check_grouped_products(model, "bf16", shape.expert_tensor)
    assert {1, 2} <= {shape.context for shape in found} and {1, 2, 8} <= {shape.tensor for shape in found}


@pytest.mark.slow
def test_a_mixture_that_one_device_cannot_hold_is_divided() -> None:
    """141 billion parameters, as Mixtral 8x22B has, on 64 GPUs."""
    model = dataclasses.replace(
        job_of("mixtral").model,
        num_layers=56,
        hidden_size=6144,
        num_attention_heads=48,
        num_query_groups=48,
        kv_channels=128,
        ffn_hidden_size=16384,
        moe_ffn_hidden_size=16384,
        num_experts=8,
        max_position_embeddings=4096,
    )
    job = Job(model, 4096, vocab_size=32768, global_batch_size=256)
    plan = search(job, cluster(64), num_plans=1, progress=lambda _: None).plans[0]
    assert plan.layout.expert * plan.layout.expert_tensor > 1
