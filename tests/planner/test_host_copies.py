"""Offload to host memory in plans: memory as in dry runs, and times by hand."""

from __future__ import annotations

import dataclasses

import pytest
from models import config_of
from planner.test_memory import cluster

from megatron.errors import InputError
from megatron.performance.config import OffloadConfig
from megatron.planner.dry_run import DryRun
from megatron.planner.given import given_run
from megatron.planner.host_copies import Stage, host_bandwidth, with_offload
from megatron.planner.search import make_plan
from megatron.pretrain_gpt import GPT

SHAPE = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 4 --seq-length 1024 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 1023
    --attention-dropout 0 --hidden-dropout 0 --bf16 --device cuda --micro-batch-size 2 --dry-run
"""
OPTIMIZER, ACTIVATIONS = "--cpu-offload-optimizer", "--cpu-offload-activations"
TWO = f"{ACTIVATIONS} --cpu-offload-activations-num-layers 2"
PIPELINE = "--pipeline-model-parallel-size 2"


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
            )
        ),
    ],
)
def test_memory_matches_a_dry_run(layout: str, flags: str, ranks: int) -> None:
    """Bytes that offload saves of each stage, within 0.6% of the stage's memory; the bytes on the host within 0.2%."""
    batch = "--global-batch-size 16"
    runs = [config_of(f"{SHAPE} {layout} {batch} {more}") for more in ("", flags)]
    job, planned = given_run(runs[1], ranks)
    offload, state = runs[1].plugin(OffloadConfig), runs[1].optimizer.cpu_offload_optimizer
    for number in range(planned.pipeline):
        whole, less = (
            DryRun.from_config(run, GPT, ranks).count(number * ranks // planned.pipeline) for run in runs
        )
        stage = Stage(job, planned, cluster(ranks), number, offload)
        memory = stage.memory(offload_state=state)
        saved = whole.memory["peak"] - less.memory["peak"]
        assert stage.whole.total - memory.total == pytest.approx(saved, abs=0.006 * whole.memory["peak"])
        on_host = stage.held + (stage.state if state else 0)
        assert on_host == pytest.approx(less.memory["in host memory"], rel=0.002)


def test_the_copies_of_8b() -> None:
    """Llama 3 8B on 8 GPUs: 12 bytes of an eighth of the parameters; and waits where copies are longer than passes."""
    llama = """
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192
        --group-query-attention --num-query-groups 8 --position-embedding-type rope --normalization RMSNorm --swiglu
        --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128255 --attention-dropout 0
        --hidden-dropout 0 --bf16 --device cuda --micro-batch-size 1 --global-batch-size 64 --dry-run
        --use-distributed-optimizer
    """
    machine = dataclasses.replace(cluster(8), device=dataclasses.replace(cluster(8).device, name="h100-80gb"))
    plans = {}
    for flags in (OPTIMIZER, f"{ACTIVATIONS} --cpu-offload-activations-num-layers 4", ACTIVATIONS):
        run = config_of(f"{llama} {flags}")
        job, layout = given_run(run, 8)
        whole = make_plan(job, layout, machine)
        plan, copies = with_offload(whole, run, job, machine)
        assert copies is not None and copies.bandwidth == 0.8 * 64e9
        plans[flags] = plan, copies
        moved = copies.optimizer / copies.bandwidth if flags == OPTIMIZER else whole.step.optimizer
        extra = copies.waits + moved - whole.step.optimizer
        assert plan.step.seconds == pytest.approx(whole.step.seconds + extra)
    (optimizer, moved), (_, few), (every, all_of_them) = plans.values()
    assert moved.optimizer == pytest.approx(12 * 8.03e9 / 8, rel=1e-3) and optimizer.memory.master == 0
    assert few.waits == 0 < all_of_them.waits
    # Eight microbatches of 31 layers.
    assert all_of_them.activations == pytest.approx(8 * all_of_them.memory)
    assert every.memory.activations < whole.memory.activations / 8


def test_links_to_the_host() -> None:
    assert host_bandwidth("gb200-186gb") > host_bandwidth("h100-80gb") > host_bandwidth("a100-80gb")


def test_what_is_not_planned() -> None:
    run = config_of(f"{SHAPE} {PIPELINE} {ACTIVATIONS} --pipeline-schedule zb-h1 --global-batch-size 16")
    other = config_of(f"{SHAPE} {PIPELINE} --global-batch-size 16")
    job, layout = given_run(other, 2)
    with pytest.raises(InputError, match="with --pipeline-schedule zb-h1 it is not planned"):
        with_offload(make_plan(job, layout, cluster(2)), run, job, cluster(2))
