"""Offload to host memory in plans: memory as in dry runs, and times by hand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from models import config_of
from planner.test_memory import cluster
from published import cluster as standard

from megatron.commands.plan import main
from megatron.commands.plan_inputs import PlanConfig, make_job
from megatron.optim import offload
from megatron.parallel.schedules import Backward, Forward
from megatron.planner import host_copies
from megatron.planner.cluster import Cluster, Host
from megatron.planner.dry_run import DryRun
from megatron.planner.given import given_run
from megatron.planner.layout import Layout
from megatron.planner.memory import fits, stage_memory
from megatron.planner.our_program import memory_of, our_program, simulator_of
from megatron.planner.report import command_flags
from megatron.planner.search import make_plan, search
from megatron.pretrain_gpt import GPT

SHAPE = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 4 --seq-length 1024 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 1023
    --attention-dropout 0 --hidden-dropout 0 --bf16 --device cuda --micro-batch-size 2 --dry-run
"""
OPTIMIZER, ACTIVATIONS = "--cpu-offload-optimizer", "--cpu-offload-activations"
ONE, TWO = (f"{ACTIVATIONS} --cpu-offload-activations-num-layers {number}" for number in (1, 2))
PIPELINE = "--pipeline-model-parallel-size 2"
SCHEDULE, CHUNKS = f"{PIPELINE} --pipeline-schedule", "--num-layers-per-virtual-pipeline-stage 2"


@pytest.mark.parametrize(
    ("layout", "flags", "ranks"),
    [
        ("", f"{OPTIMIZER} {ACTIVATIONS}", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("", TWO, 1),
                (PIPELINE, ACTIVATIONS, 2),
                (PIPELINE, TWO, 2),
                ("--tensor-model-parallel-size 2 --sequence-parallel", f"{OPTIMIZER} {TWO}", 2),
                ("--use-distributed-optimizer", OPTIMIZER, 2),
                (f"{PIPELINE} {CHUNKS}", OPTIMIZER, 2),
                (f"{PIPELINE} {CHUNKS}", ACTIVATIONS, 2),
                (f"{PIPELINE} {CHUNKS}", ONE, 2),
                (f"{SCHEDULE} zb-h1 --no-torch-compile", OPTIMIZER, 2),
                (f"{SCHEDULE} gpipe", ACTIVATIONS, 2),
                (f"{SCHEDULE} gpipe", TWO, 2),
                (f"{SCHEDULE} breadth-first {CHUNKS}", ACTIVATIONS, 2),
                (f"{SCHEDULE} breadth-first {CHUNKS}", ONE, 2),
                (f"{SCHEDULE} zb-h1 --no-torch-compile", ACTIVATIONS, 2),
                (f"{SCHEDULE} zb-h2 --no-torch-compile", TWO, 2),
                (f"{SCHEDULE} zb-v {CHUNKS} --no-torch-compile", ACTIVATIONS, 2),
                (f"{SCHEDULE} zb-v {CHUNKS} --no-torch-compile", ONE, 2),
                (f"{SCHEDULE} dualpipe-v {CHUNKS} --no-torch-compile", ACTIVATIONS, 2),
                (f"{SCHEDULE} auto --no-torch-compile", ACTIVATIONS, 2),
                (PIPELINE.replace("2", "4"), ACTIVATIONS, 4),
            )
        ),
    ],
)
def test_memory_matches_a_dry_run(layout: str, flags: str, ranks: int) -> None:
    """Bytes that offload saves of each stage, within 0.6% of the stage's memory; the bytes on the host within 0.2%.

    Within 1% with split backward passes.
    """
    batch = "--global-batch-size 16"
    runs = [config_of(f"{SHAPE} {layout} {batch} {more}") for more in ("", flags)]
    (job, plain), (_, planned) = (given_run(run, ranks) for run in runs)
    within = 0.01 if planned.splits_backward else 0.006
    for number in range(planned.pipeline):
        whole, less = (
            DryRun.from_config(run, GPT, ranks).count(number * ranks // planned.pipeline) for run in runs
        )
        of_stage = (number, our_program(job, planned, cluster(ranks)))
        before, memory = (stage_memory(job, layout, cluster(ranks), *of_stage) for layout in (plain, planned))
        saved = whole.memory["peak"] - less.memory["peak"]
        assert before.total - memory.total == pytest.approx(saved, abs=within * whole.memory["peak"])
        assert memory.host == pytest.approx(less.memory["in host memory"], rel=0.002)


LLAMA_8B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192
    --group-query-attention --num-query-groups 8 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128255 --attention-dropout 0
    --hidden-dropout 0 --bf16 --device cuda --micro-batch-size 1 --global-batch-size 64 --dry-run
    --use-distributed-optimizer
"""


def test_the_copies_of_8b() -> None:
    """Llama 3 8B on 8 GPUs: 12 bytes of an eighth of the parameters; and waits where copies are longer than passes."""
    machine = dataclasses.replace(standard(8, "h100-80gb"), host=Host(64e9, 250e9))
    plans, layer = {}, 0.0
    for flags in ("", OPTIMIZER, f"{ACTIVATIONS} --cpu-offload-activations-num-layers 4", ACTIVATIONS):
        job, layout = given_run(config_of(f"{LLAMA_8B} {flags}"), 8)
        plans[flags] = make_plan(job, layout, machine)
    whole, optimizer, few, every = plans.values()
    moved = 12 * 8.03e9 / 8 / (0.8 * 64e9)
    assert optimizer.step.optimizer == pytest.approx(moved, rel=1e-3)
    assert optimizer.step.seconds - whole.step.seconds == pytest.approx(
        moved - whole.step.optimizer, rel=1e-3
    )
    assert optimizer.memory.master == 0 and optimizer.memory.host == pytest.approx(12 * 8.03e9 / 8, rel=1e-3)
    assert few.step.host_copies == 0 and few.step.seconds == whole.step.seconds
    # 31 of 32 layers leave and come back for each of eight microbatches, beside 32 layers.
    layer = few.memory.host / 4
    assert every.memory.host == pytest.approx(31 * layer)
    kernels = simulator_of(job, layout, machine).kernels.layer
    copy = 31 * layer / (0.8 * 64e9)
    waits = sum(max(0.0, copy - 32 * cost.total) for cost in (kernels.forward, kernels.backward))
    assert every.step.host_copies == pytest.approx(8 * waits) and waits > 0
    assert every.step.seconds - whole.step.seconds == pytest.approx(8 * waits)
    assert every.memory.activations < whole.memory.activations / 8


def test_a_pipeline_waits_for_copies_in_its_schedule() -> None:
    """Waits in every pass of the stages lengthen a step as slower passes do; a bubble is idle, not waiting."""
    machine = dataclasses.replace(standard(8, "a100-80gb"), host=Host(1e9))
    gpt = given_run(config_of(f"{LLAMA_8B} {PIPELINE}"), 8)[0]
    plain = Layout(pipeline=2, data=4, distributed_optimizer=True)
    offloaded = dataclasses.replace(plain, offload_layers=8)
    before, after = (make_plan(gpt, layout, machine).step for layout in (plain, offloaded))
    waits = [simulator_of(gpt, offloaded, machine).copy_wait(kind, 0, 0) for kind in (Forward, Backward)]
    microbatches = plain.microbatches(gpt)
    assert after.host_copies == pytest.approx(microbatches * sum(waits))
    assert after.seconds - before.seconds == pytest.approx((microbatches + 1) * sum(waits), rel=0.02)
    assert after.bubble == pytest.approx(before.bubble + sum(waits), rel=0.02)


@pytest.mark.slow
def test_memory_of_a_plan_with_offload_is_that_of_its_dry_run() -> None:
    """Llama 3 70B on 8 H100, which do not hold its optimizer state: 0.5% on the device and 0.2% on the host."""
    gpt, machine = make_job(PlanConfig(model="llama3-70b"), {}), standard(8, "h100-80gb")
    best = search(gpt, machine, num_plans=1, progress=lambda count: None).plans[0]
    flags = " ".join(command_flags(best, gpt, machine, None))
    assert OPTIMIZER in flags
    run = config_of(f"{flags} --vocab-size {gpt.vocab_size - 1} --device cuda --dry-run")
    assert given_run(run, 8)[1] == best.layout
    counted = DryRun.from_config(run, GPT, 8).count(0).memory
    assert best.memory.total == pytest.approx(counted["peak"], rel=0.005)
    assert best.memory.host == pytest.approx(counted["in host memory"], rel=0.002)


def test_pieces_are_those_of_the_optimizer() -> None:
    assert (host_copies.PIECE_SIZE, host_copies.NUM_SLOTS) == (offload.PIECE_SIZE, offload.NUM_SLOTS)


def test_hosts_of_standard_nodes() -> None:
    """DGX H100: 2 TB, PCIe 5, and 16 channels of DDR5 at 4,400 MT/s, which limit copies in both directions."""
    dgx = standard(8, "h100-80gb").host
    assert (dgx.bandwidth, dgx.memory) == (64e9, 250e9)
    assert (dgx.copy, dgx.exchange) == (pytest.approx(0.8 * 64e9), pytest.approx(0.8 * 35.2e9))
    assert standard(8, "gb200-186gb").host.copy > dgx.copy > standard(8).host.copy
    assert standard(1, "gh200-96gb").host.exchange == pytest.approx(0.8 * 256e9)
    assert standard(4, "l40s").host == Host(32e9)


def test_a_run_needs_host_memory() -> None:
    job, layout = given_run(config_of(f"{LLAMA_8B} {OPTIMIZER} {ACTIVATIONS}"), 8)
    machine = standard(8, "h100-80gb")
    needed = memory_of(job, layout, machine)
    assert fits(needed, machine)

    def with_memory(size: float | None) -> Cluster:
        return dataclasses.replace(machine, host=dataclasses.replace(machine.host, memory=size))

    assert needed.host == pytest.approx(12 * 8.03e9 / 8 + 31 * 8192 * 158e3, rel=0.01)
    assert fits(needed, with_memory(None)) and fits(needed, with_memory(needed.host / 0.89))
    assert not fits(needed, with_memory(needed.host / 0.91))


@pytest.mark.parametrize("host", ["", "host: {memory: 40 GB, bandwidth: 20 GB/s}"])
def test_a_plan_prints_host_memory(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"device: h100-80gb\ndevices-per-node: 8\nnodes: 1\nlink: {{bandwidth: 450 GB/s}}\n{host}"
    )
    trace = tmp_path / "trace.json"
    flags = LLAMA_8B.replace("--dry-run", "--train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer")
    main(["--cluster", str(file), "--trace", str(trace), "--", *f"{flags} {ACTIVATIONS}".split()])
    output = capsys.readouterr().out
    assert "waiting for copies of activations" in output and "waiting for copies" in trace.read_text()
    if host:
        assert "of the 36 GB usable for each device" in output and "4.1 GB too many" in output
        assert "assumed: copies at 16 GB/s" in output
    else:
        assert "of the 225 GB usable" in output
    assert re.search(r"activations on the device +does not fit", output)
