"""The planner's memory formulas against the papers, the schedules and dry runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from models import config_of
from published import cluster, job
from training.test_layouts import LAYOUTS, SHAPES

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.flops import attention_flops, attention_linears, joining_flops
from megatron.model.gpt import GPTModel
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES
from megatron.parallel.mesh import Axis
from megatron.parallel.recompute import NO_RECOMPUTE, Recompute
from megatron.parallel.stages import split_layers
from megatron.planner.activations import layer_activations
from megatron.planner.dry_run import DryRun
from megatron.planner.given import given_run
from megatron.planner.held import counted_microbatches, most_held
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import fits, max_in_flight, max_memory, stage_memory
from megatron.planner.models import A100_MODELS, MODELS
from megatron.planner.parameters import model_parameters, stage_parameters
from megatron.planner.programs import NVIDIA_2021, OURS
from megatron.planner.schedule_costs import peak_in_flight
from megatron.pretrain_gpt import GPT
from megatron.reports.flops import exact_flops_per_sample
from megatron.training.config import RunConfig
from megatron.variants.multi_token_prediction import with_mtp
from megatron.variants.named_schedules import NAMED, V_SHAPES


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_tables(name: str):
    billions = (
        float(name[:-1]) / 1000 if name.endswith("m") else float(name[:-1]) * (1008 if name == "1t" else 1)
    )
    assert model_parameters(MODELS[name].job()) / 1e9 == pytest.approx(billions, rel=0.05)


def test_equation_2_of_2104_04473():
    """P = 12 l h² (1 + 13 / 12h + (V + s) / 12 l h), plus 2h for the final normalization."""
    for model in A100_MODELS.values():
        l, h = model.layers, model.hidden  # noqa: E741
        formula = 12 * l * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * l * h))
        assert model_parameters(model.job()) == pytest.approx(formula + 2 * h, rel=1e-12)


@pytest.mark.parametrize(("parallel", "recompute", "expected"), [
    (False, "none", lambda t, share: 10 + 24 / t + 5 * share / t),
    (True, "none", lambda t, share: (34 + 5 * share) / t),
    (False, "selective", lambda t, share: 10 + 24 / t),
    (True, "selective", lambda t, share: 34 / t),
    (False, "full", lambda t, share: 2),
])  # fmt: skip
def test_layer_activations_match_2205_05198_table_2(parallel: bool, recompute: str, expected):
    gpt = job(96, 12288, 96, 64)
    layout = Layout(tensor=8, micro_batch_size=1, sequence_parallel=parallel)
    s, h, heads = 2048, 12288, 96
    saved = layer_activations(gpt, layout, 2, NVIDIA_2021, recompute=recompute)
    assert saved == pytest.approx(s * h * expected(8, heads * s / h))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_gradient_of_a_large_embedding_takes_no_memory_of_its_own(recompute: str):
    """It is added to the sum over microbatches, row by row."""
    layout = Layout(pipeline=2, micro_batch_size=2, recompute=recompute)
    sizes = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 16383 --bf16"
    )
    model = config_of(sizes).model
    gpt = Job(model, 128, vocab_size=16384, global_batch_size=8)
    flags = " ".join(layout.flags(gpt))
    counted = (
        DryRun.from_config(config_of(f"{sizes} {flags} --device cuda --dry-run"), GPT, 2).count(0).memory
    )
    planned = stage_memory(gpt, layout, cluster(2), 0, OURS)
    assert planned.total == pytest.approx(counted["peak"], rel=0.03)
    assert planned.activations < 6 * 16384 * 256


def test_microbatches_in_flight_match_the_schedules():
    for layout in (Layout(pipeline=p, chunks=v) for p in (2, 3, 4, 8) for v in (1, 2, 3)):
        for m in (layout.pipeline, 3 * layout.pipeline):
            schedule = layout.schedule(job(24, 64, 2, m))(layout.pipeline, layout.chunks, m)
            assert [max_in_flight(layout, m, p) for p in range(layout.pipeline)] == [
                peak_in_flight(actions) for actions in schedule
            ]


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 57.5), (32, 43.6), (63, 40.0)])
def test_stage_memory_matches_a_dry_run(stage: int, gigabytes: float):
    """One trillion parameters with full recomputation: the three stages of docs/dry-run.md."""
    model = MODELS["1t"]
    memory = stage_memory(model.job(), model.layout(), cluster(3072), stage, OURS)
    assert memory.total / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 64])
def test_a_chunk_of_the_logits(micro_batch_size: int):
    """As in ops/linear_cross_entropy.py."""
    small, layout = job(2, 64, 2, 4), Layout(micro_batch_size=micro_batch_size)
    logits = micro_batch_size * small.seq_length * small.padded_vocab_size(1)
    chunk, all_of_them = (
        stage_memory(small, layout, cluster(1), 0, dataclasses.replace(OURS, chunked_logits=chunked))
        for chunked in (True, False)
    )
    # The gradient of the output layer's input is there with the chunk, and once more where ranks sum it.
    held = min(2 * logits, LOGITS_CHUNK_BYTES["cuda"]) + 2 * 2 * micro_batch_size * small.seq_length * 64
    assert all_of_them.activations - chunk.activations == 6 * logits - held
    compiled = dataclasses.replace(OURS, compiled=False)
    pieces = stage_memory(small, layout, cluster(1), 0, compiled).activations - chunk.activations
    assert pieces == 2 * 2 * min(2 * logits, LOGITS_PIECE_BYTES["cuda"])


def test_bytes_of_a_parameter():
    """18 with fp32 gradients, of which the distributed optimizer shards 12 over the replicas (arXiv 1910.02054)."""
    gpt, layout = job(4, 1024, 16, 64), Layout(tensor=2, pipeline=2, data=2)
    parameters = stage_parameters(gpt, layout, 0)
    for sharded, expected in ((False, 18), (True, 12)):
        memory = stage_memory(
            gpt, dataclasses.replace(layout, distributed_optimizer=sharded), cluster(8), 0, OURS
        )
        state = memory.weights + memory.gradients + memory.master + memory.moments
        assert state / parameters == pytest.approx(expected)


@pytest.mark.parametrize("name", A100_MODELS)
def test_the_papers_runs_fit_their_gpus(name: str):
    model = A100_MODELS[name]
    machine = cluster(model.gpus)
    assert fits(max_memory(model.job(), model.layout(), machine, NVIDIA_2021), machine)


@pytest.mark.parametrize(
    "biases",
    [
        {},
        {"add_attention_bias": True},
        {"add_mlp_bias": True},
        {"sandwich_norm": True, "softmax_type": "learnable", "window_size": "7,0"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parameters_of_llama_match_the_model(tensor: int, biases: dict[str, Any]):
    """Llama's shape: unsharded, sharded, and with more tensor-parallel ranks than query groups."""
    config = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=8,
        group_query_attention=True,
        num_query_groups=2,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
        max_position_embeddings=32,
        **biases,
    )
    tp, kv = Axis(rank=1 % tensor, size=tensor), Axis(rank=1 % tensor, size=max(tensor // 2, 1))
    model = GPTModel(config, ModelContext(vocab_size=512, padded_vocab_size=512, tp=tp, kv=kv))
    planned = stage_parameters(Job(config, 32, vocab_size=512, global_batch_size=8), Layout(tensor=tensor), 0)
    assert planned == sum(p.numel() for p in model.parameters())


ONE_DEVICE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 511 --bf16 "
    "--micro-batch-size 1 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
)
# Layouts outside the planner's search, which has no formulas for GPipe or partial recomputation, and chooses which
# stages are shorter.
UNPLANNED_FLAGS = (
    "--expert",
    "--moe",
    "-layout",
    "--account-for",
    "zb-",
    " v-",
    "dualpipe",
    "gpipe",
    "breadth",
    "auto",
)
UNPLANNED = {
    "P2 uneven",
    "P4 uneven",
    "P2 layout",
    "P2V2 layout",
    "P4 ends counted",
    "P2 a dense stage",
    "block recomputed",
    "T2 distributed activations",
    "C4 two levels",
}
# The planner plans GPTs that AdamW trains, and refuses ALiBi and zero-centered norms.
PLANNED_SHAPES = [
    shape
    for shape, flags in SHAPES.items()
    if not shape.startswith("bert")
    and shape != "deepseek without query latent"
    and not any(x in flags for x in ("--optimizer", "alibi", "--apply-layernorm-1p"))
]
PLANNED = [
    (shape, layout)
    for shape in PLANNED_SHAPES
    for layout, (_, flags) in LAYOUTS.items()
    if layout not in UNPLANNED and not any(x in flags for x in UNPLANNED_FLAGS)
    # Ranks that exchange heads divide the groups of queries.
    if not ("a2a" in flags and "--num-query-groups" in SHAPES[shape])
]
TENSOR = "--tensor-model-parallel-size"
WIDE = f"""
    --bf16 {TENSOR} 2 --sequence-parallel --num-layers 3 --hidden-size 1024 --num-attention-heads 8
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --seq-length 1024 --max-position-embeddings 1024
    --vocab-size 4095 --global-batch-size 8
"""
DRY_RUNS = {("gpt2", "P4V2"), ("llama", "P4"), ("qwen2", "P4"), ("qwen3", "P4V2"), ("deepseek", "T2P2+SP")}


def planned(shape: str, name: str) -> tuple[RunConfig, int, Job, Layout]:
    """Return a layout of tests/training/test_layouts.py as a run's configuration and as the planner's layout."""
    processes, flags = LAYOUTS[name]
    config = config_of(f"{ONE_DEVICE} --device cuda --dry-run {SHAPES[shape]} {flags}")
    layout = given_run(config, processes)[1]
    return config, processes, Job(config.model, 128, vocab_size=512, global_batch_size=8), layout


@pytest.mark.parametrize(("first", "last", "pipeline"), [(None, 2, 3), (1, 1, 5)])
def test_memory_of_uneven_stages_matches_a_dry_run(first: int | None, last: int, pipeline: int):
    flags = f"--decoder-first-pipeline-num-layers {first} " if first is not None else ""
    flags += f"--decoder-last-pipeline-num-layers {last}"
    layout, machine = Layout(pipeline=pipeline), cluster(pipeline)
    config = config_of(
        f"{ONE_DEVICE} --pipeline-model-parallel-size {pipeline} {flags} --device cuda --dry-run"
    )
    gpt = Job(config.model, 128, vocab_size=512, global_batch_size=8)
    assert flags.split() == [word for flag in layout.flags(gpt) if "decoder" in flag for word in flag.split()]
    last_stage = pipeline - 1
    memory = stage_memory(gpt, layout, machine, last_stage, OURS)
    counted = DryRun.from_config(config, GPT, pipeline).count(last_stage).memory
    assert memory.weights == counted["weights"]
    assert memory.total == pytest.approx(counted["peak"], rel=0.03)


@pytest.mark.parametrize(
    "sharding",
    [
        "no_shard",
        "optim_grads_params --recompute-num-layers 2",
        "optim_grads_params --overlap-grad-reduce --overlap-param-gather",
        pytest.param(
            "optim_grads_params --overlap-grad-reduce --overlap-param-gather --recompute-num-layers 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_with_full_recomputation_matches_a_dry_run(sharding: str):
    """Layers that weigh more than their activations, two at a time too, and an output layer that is in use for long."""
    flags = f"{WIDE} --data-parallel-sharding-strategy {sharding} --recompute-granularity full"
    config = config_of(f"--device cuda --dry-run {flags}")
    layout = given_run(config, 8)[1]
    gpt = Job(config.model, 1024, vocab_size=4096, global_batch_size=8)
    counted = DryRun.from_config(config, GPT, 8).count(0).memory
    assert stage_memory(gpt, layout, cluster(8), 0, OURS).total == pytest.approx(counted["peak"], rel=1e-3)


@pytest.mark.parametrize("norms", ["", "--sandwich-norm"])
@pytest.mark.parametrize(
    "recompute",
    [
        "",
        "--recompute-granularity full",
        pytest.param("--recompute-granularity selective", marks=pytest.mark.slow),
        pytest.param("--recompute-granularity full --recompute-num-layers 2", marks=pytest.mark.slow),
        pytest.param("--recompute-granularity full --fp32-residual-connection", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "tensor",
    ["1", "2 --sequence-parallel", *(pytest.param(size, marks=pytest.mark.slow) for size in ("2", "4"))],
)
def test_memory_of_further_norms_matches_a_dry_run(tensor: str, recompute: str, norms: str):
    """Norms of the outputs of attention and MLP, as in Gemma 2, keep their inputs, and recomputation frees them."""
    wide = WIDE.replace(f"{TENSOR} 2 --sequence-parallel", f"{TENSOR} {tensor}")
    config = config_of(f"--device cuda --dry-run {wide} --micro-batch-size 4 {recompute} {norms}")
    gpt, layout = given_run(config, int(tensor[0]))
    counted = DryRun.from_config(config, GPT, layout.processes).count(0).memory["activations"]
    planned = stage_memory(gpt, layout, cluster(layout.processes), 0, OURS).activations
    assert planned == pytest.approx(counted, rel=0.015 if layout.sequence_parallel else 2e-3)


@pytest.mark.parametrize(("shape", "name"), PLANNED)
def test_parameters_of_every_layout_match_the_model(shape: str, name: str):
    config, _, gpt, layout = planned(shape, name)
    tp = Axis(rank=layout.tensor - 1, size=layout.tensor)
    context = ModelContext(vocab_size=512, padded_vocab_size=gpt.padded_vocab_size(layout.tensor), tp=tp)
    for stage, chunks in enumerate(split_layers(config.parallel, 8)):
        models = [with_mtp(config, GPT).build_model(config, context, chunk) for chunk in chunks]
        expected = sum(p.numel() for model in models for p in model.parameters())
        assert stage_parameters(gpt, layout, stage) == expected


ONE_STAGE_DRY_RUNS = {("gpt2", "selectively recomputed"), ("llama", "T4"), ("deepseek", "T2+SP")}


def cases(quick: set[tuple[str, str]]) -> list:
    """All layouts of the planner; those that are not `quick` run with the slow tests."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in PLANNED]


@pytest.mark.parametrize(("shape", "name"), cases(DRY_RUNS))
def test_memory_of_every_layout_matches_a_dry_run(shape: str, name: str):
    """Exact for weights, gradients and optimizer state; the formulas omit buffers and statistics of norms."""
    config, processes, gpt, layout = planned(shape, name)
    run = DryRun.from_config(config, with_mtp(config, GPT), processes)
    stage = layout.pipeline - 1
    counted = run.count(stage * processes // layout.pipeline).memory
    memory = stage_memory(gpt, layout, cluster(processes), stage, OURS)
    state = (memory.weights, memory.gradients, memory.master, memory.moments)
    names = ("weights", "gradients", "master weights", "moments")
    # The distributed optimizer pads each bucket to equal shards.
    rel = 1e-3 if layout.distributed_optimizer else 0
    assert state == pytest.approx([counted[kind] for kind in names], rel=rel)
    # A rank of a context-parallel run has so few positions that its activations are below a megabyte.
    small = layout.context > 1
    assert memory.activations == pytest.approx(counted["activations"], rel=0.25 if small else 0.16)
    assert memory.total == pytest.approx(counted["peak"], rel=0.02)


@pytest.mark.parametrize(("shape", "name"), cases(ONE_STAGE_DRY_RUNS))
def test_flops_of_every_layout_match_a_dry_run(shape: str, name: str):
    """Summed over the ranks of a replica, they are those of the formula, whatever the layout."""
    config, processes, gpt, layout = planned(shape, name)
    model, s, t = config.model, gpt.seq_length, layout.tensor
    run = DryRun.from_config(config, with_mtp(config, GPT), processes)
    counted = t * sum(run.count(p * processes // layout.pipeline).flops for p in range(layout.pipeline))
    # A GPU's fused attention keeps no scores, and compiled layers ignore selective recomputation.
    selective = config.parallel.recompute_granularity == "selective"
    recompute = NO_RECOMPUTE if selective else Recompute.from_config(config.parallel, Axis(size=t))
    expected = exact_flops_per_sample(
        model,
        seq_length=s,
        padded_vocab_size=gpt.padded_vocab_size(t),
        num_logits=s,
        causal=False,  # a dry run counts the whole square
        recompute=recompute,
        chunks=[chunk.layers for stage in split_layers(config.parallel, model.num_layers) for chunk in stage],
    )
    # FlashAttention recomputes the scores in backward.
    expected += model.num_all_layers * 2 * s * s * model.num_attention_heads * model.kv_channels
    # With more ranks than key and value heads, several ranks compute the same ones.
    copies = model.kv_heads_per_rank(t) * t - model.num_query_groups
    passes = 4 if recompute.granularity == "full" else 3
    expected += model.num_all_layers * passes * 2 * s * model.hidden_size * 2 * copies * model.kv_channels
    if not layout.sequence_parallel:  # every rank computes the latents of all tokens, and joins all of them
        expected += 3 * (t - 1) * joining_flops(model, s)
        latents = sum(inputs * outputs for inputs, outputs, split in attention_linears(model) if not split)
        expected += model.num_layers * passes * 2 * s * (t - 1) * latents
    # Context parallelism divides it, but a dry run counts the whole square only of a rank's own positions, and half of
    # such a square with each other rank, and values there are as wide as keys; ranks that exchange heads have whole
    # sequences.
    c, square = layout.context, 2 * s * s * model.num_attention_heads * model.kv_channels
    saved = 0.0
    if c > 1 and config.parallel.cp_comm_type != "a2a":
        saved = (passes * attention_flops(model, pairs=s * s) + square) / c
        saved -= (2 * passes + 1) * square * (c + 1) / (2 * c * c)
    expected = expected / c - model.num_all_layers * saved
    assert counted == pytest.approx(expected * gpt.global_batch_size / layout.data, rel=1e-12)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_further_groups_of_microbatches_hold_no_more(name: str):
    """A stage holds as much in the counted microbatches as in twice as many."""
    for stages in (2, 3, 6):
        chunks, counted = (2 if name in V_SHAPES else 1), counted_microbatches(name, stages, 1000)
        for stage in range(stages):
            fewer, more = (most_held(NAMED[name], stages, chunks, m, stage) for m in (counted, 2 * counted))
            assert set(fewer) == set(more)
