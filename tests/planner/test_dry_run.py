"""Dry runs against the allocations and the traffic of real processes."""

from __future__ import annotations

import collections
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import free_port, run_distributed
from models import CPU, config_of
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.data.batch import Batch
from megatron.errors import InputError
from megatron.model.flops import flops_per_sample
from megatron.model.moe import layer, router
from megatron.ops.cpu import linear
from megatron.parallel import collectives
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.planner import dry_run
from megatron.planner.activations import layer_activations
from megatron.planner.count_step import PhaseRecorder, count_step
from megatron.planner.counting import Counter, Traffic
from megatron.planner.dry_run import DryRun
from megatron.planner.dry_run_report import RankCost, size
from megatron.planner.fakes import balanced_choice, balanced_drops
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import OURS
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_model, choose_run_ops
from megatron.training.engine import Engine

T2, P2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
GQA = "--group-query-attention --num-query-groups 2"
ZERO = "--data-parallel-sharding-strategy"
ROOT = Path(__file__).resolve().parents[2]
MODEL = "--num-layers 2 --hidden-size 64 --seq-length 32 --global-batch-size 8"
TWO = [
    T2,
    f"{T2} --sequence-parallel --bf16",
    P2,
    f"{P2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 4 --recompute-granularity full",
    "--bf16",
    "--use-distributed-optimizer --overlap-grad-reduce",
    "--use-distributed-optimizer --optimizer muon",
    f"{ZERO} optim_grads --bf16 --overlap-grad-reduce",
    f"{ZERO} optim_grads_params --bf16 --overlap-grad-reduce --overlap-param-gather",
    f"{ZERO} optim_grads_params --recompute-granularity full --untie-embeddings-and-output-weights",
]
# Bytes of tensors that a gloo thread may release shortly after their transfer: an fp32 activation, a number of targets.
RELEASE_SLACK = {"activations": 4 * 32 * 2 * 64, "peak": 4 * 32 * 2 * 64, "buffers": 4}
MOE = "--num-experts 4 --moe-ffn-hidden-size 48 --disable-bias-linear --swiglu"
AUX = (
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1 "
    "--moe-z-loss-coeff 0.1"
)
E2 = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate --moe-layer-freq [0,1]"
FEW = [f"{P2} --bf16 --recompute-granularity selective", f"{MOE} {E2} --use-distributed-optimizer"]
FOUR = [
    f"{T2} {P2} --bf16 --recompute-granularity selective",
    f"{T2} {MOE} {SHARED} --expert-model-parallel-size 2 --use-distributed-optimizer",
]
MIXTURES = [
    f"{MOE} {AUX} {E2} --moe-grouped-gemm",
    f"{MOE} {E2} --bf16 --use-distributed-optimizer --moe-layer-recompute",
    f"{T2} {MOE} {SHARED}",
    f"{T2} {MOE} {AUX} {E2} --sequence-parallel --moe-token-dispatcher-type allgather",
    f"{T2} {MOE} {E2} --moe-expert-capacity-factor 0.5",
    f"{MOE} {E2} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
    f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --recompute-granularity full",
]
CP = "--attention-dropout 0 --context-parallel-size"
CONTEXT = [
    f"{CP} 2 {GQA}",
    f"{CP} 2 --cp-comm-type all_gather --bf16",
    f"{CP} 2 --cp-comm-type a2a",
    f"{CP} 2 --cp-comm-type a2a --recompute-granularity full --bf16",
]


AXES = ("embedding", "world", "expert", "expert_dp", "tp_cp", "dp_cp", "tp", "cp", "dp", "pp")


class TrafficCounter:
    """Counts calls and bytes of torch.distributed by function and mesh axis."""

    def __init__(self, mesh: Mesh) -> None:
        axes = [axis for name in AXES if (axis := getattr(mesh, name)).size > 1]
        self.names = {id(axis.group): axis.name for axis in axes}
        # Several axes may be of all processes, with their group.
        self.same = {axis.name: self.names[id(axis.group)] for axis in axes}
        self.counts: collections.Counter = collections.Counter()
        replaced = [(dist, "all_reduce"), (dist, "isend"), (dist, "irecv"), (dist, "broadcast")]
        replaced += [
            (dist, "all_to_all_single"),
            (dist, "reduce"),
            (collectives, "_gather"),
            (collectives, "_reduce_scatter"),
        ]
        self.originals = [(module, name, getattr(module, name)) for module, name in replaced]

    def __enter__(self) -> TrafficCounter:
        for module, name, original in self.originals:
            setattr(module, name, self.wrapped(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self.originals:
            setattr(module, name, original)

    def wrapped(self, name: str, original: Callable) -> Callable:
        def call(*tensors: object, group: object = None, **settings: object) -> object:
            key = name.strip("_"), self.names[id(group)]
            self.counts[(*key, "calls")] += 1
            found = [x for x in tensors if isinstance(x, Tensor)]
            self.counts[(*key, "bytes")] += max(x.numel() * x.element_size() for x in found)
            return original(*tensors, group=group, **settings)

        return call


FUNCTIONS = {
    "all-reduce": "all_reduce",
    "shift": "all_to_all_single",
    "all-gather": "gather",
    "all-to-all": "all_to_all_single",
    "reduce-scatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "send": "isend",
    "receive": "irecv",
}


def traffic_counts(needs: RankCost, same: dict[str, str]) -> collections.Counter:
    """Traffic that a dry run counted, with the keys of `TrafficCounter`; `same` is its field."""
    found: collections.Counter = collections.Counter()
    for (kind, axis), traffic in needs.traffic.items():
        for what in ("calls", "bytes"):
            found[FUNCTIONS[kind], same[axis], what] += getattr(traffic, what)
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_changes_neither_operations_nor_traffic_nor_state(device: str, recipe: str) -> None:
    pytest.importorskip("torchao", reason="needs pip install torchao")
    costs = []
    for fp8 in ("", f"--fp8-format hybrid --fp8-recipe {recipe}"):
        config = config_of(f"{MODEL} {T2} --sequence-parallel --bf16 --device {device} {fp8}")
        costs.append(DryRun.from_config(config, GPT, 2).count(1))
    plain, fp8_cost = costs
    assert fp8_cost.flops == plain.flops and fp8_cost.traffic == plain.traffic
    assert fp8_cost.memory["weights"] == plain.memory["weights"]
    # Casts have temporary copies, and nothing of them is saved for backward.
    assert plain.memory["peak"] <= fp8_cost.memory["peak"] < 1.5 * plain.memory["peak"]


def real_batches(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch.map(torch.ones_like)


def real_steps(layouts: list[str], ports: list[int], batch: Batch) -> list[tuple[RankCost, dict, dict]]:
    """Measure the costs of each layout on this rank, by `Counter` and by `TrafficCounter`. Routing is uniform."""
    linear.MIN_REORDER_ROWS = 1
    router.choose_experts, layer.dropped_copies = balanced_choice, balanced_drops
    found = []
    for flags, port in zip(layouts, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = config_of(f"{MODEL} {flags}")
        with init_mesh(config.parallel, CPU) as mesh:
            microbatches = 8 // (2 * mesh.dp.size)
            phases = PhaseRecorder(Counter(mesh.heartbeat))
            with phases.counter:
                sizes = {"vocab_size": 60, "padded_vocab_size": 128 * mesh.tp.size}
                ops = choose_run_ops(config, mesh, sizes["padded_vocab_size"])
                engine = Engine(config, GPT, mesh, build_model(config, GPT, mesh, ops, **sizes), phases)
                engine.buffer.initialize(1)
                with TrafficCounter(mesh) as wrapped:
                    settings = {"simulated": microbatches, "microbatches": microbatches}
                    needs = count_step(engine, phases, real_batches(batch), **settings)
            found.append((needs, dict(wrapped.counts), wrapped.same))
    return found


@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (2, FEW),
        pytest.param(2, TWO, marks=pytest.mark.slow),
        pytest.param(2, MIXTURES, marks=pytest.mark.slow),
        pytest.param(2, CONTEXT, marks=pytest.mark.slow),
        pytest.param(4, FOUR, marks=pytest.mark.slow),
    ],
)
def test_equals_real_processes(processes: int, layouts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are in oneDNN's layout, as they are for many tokens."""
    monkeypatch.setattr(linear, "MIN_REORDER_ROWS", 1)
    countings = [DryRun.from_config(config_of(f"{MODEL} {flags}"), GPT, processes) for flags in layouts]
    ports = [free_port() for _ in layouts]
    by_rank = run_distributed(real_steps, processes, layouts, ports, countings[0].batch)
    for i, counting in enumerate(countings):
        fakes = [counting.count(rank) for rank in range(processes)]
        for fake, steps in zip(fakes, by_rank, strict=True):
            real, wrapped, same = steps[i]
            assert traffic_counts(fake, same) == wrapped and fake.traffic == real.traffic
            assert fake.flops == real.flops and fake.parameters == real.parameters
            for kind, held in real.memory.items():
                # An all-to-all sends up to three times as many rows, and keys and values are gathered together.
                several = "--num-experts" in layouts[i] or CP in layouts[i]
                more = RELEASE_SLACK.get(kind, 0) * (3 if several else 1)
                assert -0.001 * held <= held - fake.memory[kind] <= 0.001 * held + more, (layouts[i], kind)
        assert sum(needs.unique_parameters for needs in fakes) == counting.model_parameters()


@pytest.mark.parametrize(
    ("flags", "simulated"),
    [
        ("--num-layers 2 --pipeline-model-parallel-size 2 --global-batch-size 24 --overlap-grad-reduce", 10),
        (f"{P2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16 --world-size 2", 6),
        ("--num-layers 1 --global-batch-size 16", 2),
        ("--num-layers 1 --global-batch-size 16 --use-distributed-optimizer --recompute-granularity full", 2),
    ],
)
def test_omitted_microbatches_change_nothing(
    flags: str, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = DryRun.from_config(config_of(f"{flags} --bf16 --dry-run --hidden-size 8"), GPT, 2)
    assert counting.simulated == simulated < counting.microbatches
    some = counting.count(0)
    monkeypatch.setattr(dry_run, "distinct_microbatches", lambda config, microbatches: microbatches)
    assert counting.simulated == counting.microbatches
    assert counting.count(0) == some


S, B, H, A = 128, 2, 256, 4


def saved(flags: str, processes: int) -> float:
    """Activations that a layer saves for backward on a GPU, in units of s b h bytes."""
    sizes = f"--seq-length {S} --micro-batch-size {B} --hidden-size {H} --num-attention-heads {A} --bf16"
    settings = "--device cuda --dry-run"
    configs = [config_of(f"{sizes} {settings} --num-layers {layers} {flags}") for layers in (3, 2)]
    more, less = (
        DryRun.from_config(config, GPT, processes).count(0).memory["activations"] for config in configs
    )
    return (more - less) / (S * B * H)


@pytest.mark.parametrize(
    ("flags", "tensor", "paper"),
    [
        # arXiv 2205.05198, equations 1, 2 and 4 and table 2, without 5 a s / h, which FlashAttention does not save
        ("", 1, 34),
        (T2, 2, 10 + 24 / 2),
        (f"{T2} --sequence-parallel", 2, 34 / 2),
        ("--recompute-granularity full", 1, 2),
        (f"{T2} --recompute-granularity full --distribute-saved-activations", 2, 2 / 2),
        # two dropout masks, one byte per element
        ("--hidden-dropout 0", 1, 34 - 2),
        # a fused kernel on a GPU, too, which saves one fp32 number per position, as large as two in bf16
        ("--normalization RMSNorm", 1, 34),
    ],
)
def test_saved_activations_on_a_gpu_match_the_paper(flags: str, tensor: int, paper: float) -> None:
    # The paper omits statistics: two bf16 numbers per position for each normalization, and one fp32 number per position
    # and head for softmax.
    parts = tensor if "sequence" in flags else 1
    statistics = 0 if "full" in flags else (2 * 2 * 2 / parts + 4 * A / tensor) / H
    assert saved(flags, tensor) == pytest.approx(paper + statistics, abs=1e-3)


@pytest.mark.parametrize(
    ("communication", "size"),
    [("p2p", 4), ("a2a", 4)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("p2p", 2), ("all_gather", 2), ("all_gather", 4), ("a2a", 2))
    ],
)
def test_activations_fall_with_the_context_parallel_size(communication: str, size: int) -> None:
    flags = f"{CP} {size} --cp-comm-type {communication}"
    assert saved(flags, size) == pytest.approx(saved("--attention-dropout 0", 1) / size, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["p2p", "all_gather", "a2a"])
def test_activations_of_real_processes_fall_with_the_context_parallel_size(communication: str) -> None:
    """Four processes keep half of what two do for a layer. One process keeps the output of attention twice."""
    by_size = {}
    for processes in (1, 2, 4):
        flags = "--seq-length 256 --ops-backend plain --attention-dropout 0"
        if processes > 1:
            flags += f" --context-parallel-size {processes} --cp-comm-type {communication}"
        layouts = [f"{flags} --num-layers {layers}" for layers in (8, 2)]
        batch = DryRun.from_config(config_of(f"{MODEL} {layouts[0]}"), GPT, processes).batch
        ranks = run_distributed(real_steps, processes, layouts, [free_port() for _ in layouts], batch)
        held = [[cost.memory["activations"] for cost, *_ in steps] for steps in ranks]
        by_size[processes] = max(more - less for more, less in held) / 6
    assert by_size[4] == pytest.approx(by_size[2] / 2, rel=0.05)
    assert 0.85 * by_size[1] < 2 * by_size[2] <= by_size[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_long_context_of_a_large_model(tmp_path: Path) -> None:
    """docs/long-context.md: 70 billion parameters, 128k tokens, 512 GPUs. Its first stage, which holds the most."""
    page = (ROOT / "docs" / "long-context.md").read_text(encoding="utf-8")
    command = page[page.index("python pretrain_gpt.py --dry-run") :].partition("```")[0]
    words, file = command.replace("\\\n", " ").split(), tmp_path / "counts.json"
    subprocess.run(
        [sys.executable, *words[1:], "--dry-run-ranks", "0", "--dry-run-json", file], check=True, cwd=ROOT
    )
    (rank,) = json.loads(file.read_text())["ranks"]
    assert rank["memory"]["activations"] / 1e9 == pytest.approx(48.7, rel=0.005)
    assert rank["memory"]["peak"] / 1e9 == pytest.approx(64.1, rel=0.005)
    # Keys and values of a rank's group, 128 wide, go around twice in bf16, and their gradients once in fp32.
    context, positions, layers, microbatches = 8, 131072 // 8, 20, 32
    passed = 2 * 128 * positions * (2 * (context - 1) * 2 + context * 4)
    (ring,) = (row for row in rank["traffic"] if row["kind"] == "shift")
    assert ring["axis"] == "context-parallel" and ring["bytes"] == passed * layers * microbatches


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["p2p", "all_gather", "a2a"])
def test_activations_with_rope_fall_at_least_as_much(communication: str) -> None:
    """One process keeps more than the formulas: values share the memory of queries and keys before RoPE, and the layer
    after attention keeps a copy of its output in another order."""
    one = saved(f"--attention-dropout 0 {LLAMA} --hidden-dropout 0", 1)
    two = saved(f"{CP} 2 --cp-comm-type {communication} {LLAMA} --hidden-dropout 0", 2)
    assert 0.4 * one < two <= one / 2


LLAMA = f"--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear {GQA}"


@pytest.mark.parametrize(
    ("flags", "tensor"),
    [
        ("--normalization RMSNorm", 1),
        ("--position-embedding-type rope", 1),
        (GQA, 1),
        (LLAMA, 1),
        (f"{LLAMA} --qk-layernorm", 1),
        (f"{LLAMA} --qk-layernorm --fp32-residual-connection --hidden-dropout 0", 2),
    ],
)
def test_planned_activations_match_a_dry_run(flags: str, tensor: int) -> None:
    flags = f"{flags} {T2 if tensor == 2 else ''}"
    job = Job(config_of(f"--hidden-size {H} --num-attention-heads {A} {flags}").model, S, 128, 8)
    planned = layer_activations(job, Layout(tensor=tensor, micro_batch_size=B), 2, OURS, recompute="none")
    assert planned / (S * B * H) == pytest.approx(saved(flags, tensor), rel=0.01)


@pytest.mark.parametrize(
    ("flags", "recomputes_scores"),
    # On a CPU with dropout, attention saves its scores.
    [("--device cuda --bf16", True), ("--device cuda", True), ("--device cpu", False)],
)
def test_flops_match_the_formula(flags: str, recomputes_scores: bool) -> None:
    config = config_of(f"--ops-backend plain {flags} --dry-run --global-batch-size 4 --vocab-size 127")
    per_sample = flops_per_sample(config.model, seq_length=16, padded_vocab_size=128, num_logits=16)
    # Fused attention recomputes the scores in backward, which is one more matmul.
    recomputed = recomputes_scores * config.model.num_layers * 2 * 16 * 16 * config.model.hidden_size
    assert DryRun.from_config(config, GPT, 1).count(0).flops == 4 * (per_sample + recomputed)


def test_gpu_patches_are_removed() -> None:
    before = F.dropout, F.rms_norm, F.scaled_dot_product_attention
    assert saved("--recompute-granularity selective", 1) < 34.5
    assert (F.dropout, F.rms_norm, F.scaled_dot_product_attention) == before
    assert type(torch.ones(1)) is Tensor and torch.ones(1).item() == 1


SMALL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 20
    --lr 2e-3 --vocab-size 59 --dry-run
"""


def test_the_command(pretrain: Callable[..., str], tmp_path: Path) -> None:
    """Runs without data, vocabulary files and the processes of the layout."""
    file = tmp_path / "counts.json"
    flags = f"{SMALL} --pipeline-model-parallel-size 4 {T2} --world-size 24 --data-path none --dry-run-json {file}"
    printed = pretrain(*flags.split(), "--vocab-file", "none", "--merge-file", "none")
    lines = printed.splitlines()
    assert (
        lines[0] == f"dry run of GPT with {4 * (12 * 32**2 + 13 * 32) + (59 + 16) * 32 + 2 * 32:,} parameters"
    )
    assert lines[1:4] == [
        "precision: fp32, operations: GPU",
        "processes: tensor 2 x data 3 x pipeline 4 = 24",
        "microbatches per replica: 1, micro batch size: 2",
    ]
    assert "rank 12 counted in" in printed and "all-reduce, embedding" in printed
    record = json.loads(file.read_text())
    assert [(r["rank"], r["coordinates"]["pp"]) for r in record["ranks"]] == [(0, 0), (12, 2), (18, 3)]
    assert {"kind": "send", "axis": "pipeline", "calls": 1, "bytes": 2048} in record["ranks"][0]["traffic"]


def test_the_progress_bar_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    totals, updates = [], []

    class Bar:
        def __init__(self, *, total: int, **_: object) -> None:
            totals.append(total)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self) -> None:
            updates.append(1)

    monkeypatch.setattr("megatron.planner.count_step.tqdm", Bar)
    DryRun.from_config(config_of(f"--num-layers 2 {P2} --dry-run --global-batch-size 4"), GPT, 2).count(0)
    assert totals == [2 * 2] and len(updates) == 4  # forward and backward of two microbatches


def test_documents_are_counted_as_one_for_each_sequence() -> None:
    """The report says so."""
    runs = [
        DryRun.from_config(config_of(f"--dry-run --global-batch-size 4 {flags}"), GPT, 1)
        for flags in ("", "--reset-attention-mask")
    ]
    assert runs[0].count(0).flops == runs[1].count(0).flops
    assert [("each sample counts as one document" in run.describe()) for run in runs] == [False, True]


def test_bert_uses_its_longest_batches() -> None:
    config = parse_run_config(f"{SMALL} --seq-length 128".split(), description="", defaults=DEFAULTS)
    counting = DryRun.from_config(config, bert(binary_head=True), 1)
    assert counting.batch.tokens.shape == (2, 128) and counting.batch.positions.shape == (2, 18)
    needs = counting.count(0)
    assert needs.unique_parameters == counting.model_parameters() and needs.flops > 0 and not needs.traffic


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dry-run-ranks 0 2", "--dry-run-ranks: 2 is not a rank of this run; its 2 ranks"),
        ("--world-size 3", "--world-size: 3 is not a multiple of 2, .*; choose 2 or 4$"),
        (
            "--dry-run-json /none/x.json",
            "--dry-run-json: /none/x.json cannot be written: there is no directory /none",
        ),
        ("--tokenizer-type GPT2BPETokenizer", "with --vocab-size a dry run needs no tokenizer files"),
    ],
)
def test_bad_input(flags: str, message: str) -> None:
    words = SMALL.replace("--vocab-size 59", "") if "tokenizer" in flags else SMALL
    with pytest.raises(InputError, match=message):
        dry_run.dry_run(
            parse_run_config(f"{words} {T2} {flags}".split(), description="", defaults=DEFAULTS), GPT
        )


def test_dry_run_flags_need_dry_run() -> None:
    with pytest.raises(InputError, match=r"^--world-size needs --dry-run$"):
        config_of("--world-size 8")


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="start it with python instead of torchrun"):
        dry_run.dry_run(config_of("--dry-run"), GPT)


def test_size_formats_bytes() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 16.4e9)] == [
        "0 B",
        "999 B",
        "1 KB",
        "1.23 MB",
        "16.4 GB",
    ]


@pytest.mark.slow
def test_a_trillion_parameters(command: Callable, tmp_path: Path) -> None:
    """3,072 GPUs, within 2 minutes of CPU time and 8 GB of memory."""
    before, file = resource.getrusage(resource.RUSAGE_CHILDREN), tmp_path / "1t.json"
    command(
        *"pretrain_gpt.py --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048".split(),
        *"--tokenizer-type NullTokenizer --vocab-size 50256 --micro-batch-size 1 --global-batch-size 3072".split(),
        *"--tensor-model-parallel-size 8 --pipeline-model-parallel-size 64 --recompute-granularity full".split(),
        *"--bf16 --lr 5e-5 --train-iters 1 --dry-run --world-size 3072 --dry-run-json".split(),
        file,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 120
    assert after.ru_maxrss < 8 * 2**20
    record = json.loads(file.read_text())
    assert record["parameters"] / 1e9 == pytest.approx(1008, abs=0.5)
    first, middle, _ = record["ranks"]
    # Weight matrices of 12 h² and vectors of two layers; each rank holds an eighth, and all of the replicated vectors.
    h = 25600
    assert middle["parameters"] == 2 * (12 * h**2 // 8 + (3 + 4) * h // 8 + 6 * h)
    for rank in record["ranks"]:
        assert rank["memory"]["peak"] < 80e9  # memory of the paper's GPUs
        # With 1F1B, stage p saves the inputs of two layers for 64 - p microbatches; backward recomputes one layer at a
        # time.
        saved = (64 - rank["coordinates"]["pp"]) * 2 * 2 * 2048 * h
        assert saved < rank["memory"]["activations"] < saved + 6e9
    # Per layer and microbatch: two in forward, two in recomputation, two in backward.
    sums = {(row["kind"], row["axis"]): row["calls"] for row in middle["traffic"]}
    assert sums["all-reduce", "tensor-parallel"] == 512 * 2 * 6 + 1  # for the gradient norm
    assert first["memory"]["weights"] == 2 * (first["parameters"])


def test_a_mixture_names_its_axes(capsys: pytest.CaptureFixture) -> None:
    """Uniform routing: every rank sends the same rows, and gradients of experts are reduced over half of the ranks."""
    flags = f"{SMALL} {MOE} {E2} --bf16 --use-distributed-optimizer --world-size 4 --num-layers 2"
    words = f"{flags} --dry-run-ranks 3".split()
    config = parse_run_config(words, description="", defaults=DEFAULTS)
    assert dry_run.dry_run(config, GPT) == 0
    experts, dense = 2 * 4 * 3 * 32 * 48, 2 * (4 * 32**2 + 2 * 2 * 32 + 4 * 32) + (59 + 16) * 32 + 2 * 32
    printed = capsys.readouterr().out
    assert f"with {experts + dense:,} parameters, {experts // 2 + dense:,} active\n" in printed
    assert "experts: expert 2 x tensor 1 x data 2; tokens are assumed" in printed
    cost = DryRun.from_config(config, GPT, 4).count(3)
    rows = 2 * 16 * 2  # two sequences, each token twice
    sizes, forward, backward = 8 * 4, (2 * 32 + 4) * rows + 2 * 32 * rows, (2 * 32 + 4) * rows + 2 * 32 * rows
    expected = Traffic(2 * (1 + 3 + 3), 2 * (sizes + forward + backward))
    assert cost.traffic["all-to-all", "expert-parallel"] == expected
    assert cost.traffic["reduce-scatter", "expert-data-parallel"] == Traffic(1, 4 * experts // 2)
    assert cost.traffic["all-gather", "expert-data-parallel"] == Traffic(1, 2 * experts // 2)
