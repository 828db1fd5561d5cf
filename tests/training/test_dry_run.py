"""Dry runs, against what real processes allocate and communicate."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import free_port, run_distributed
from models import CPU, FLAGS, config_of
from torch import Tensor

from megatron.data.loader import Batch
from megatron.parallel import collectives
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.training.counting import Counter
from megatron.training.dry_run import Counting, Fields, Needs, count_step, size
from megatron.training.engine import Engine
from pretrain_gpt import GPT

T2, P2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MODEL = "--hidden-size 64 --seq-length 32 --global-batch-size 16"
TWO = [
    T2,
    f"{T2} --sequence-parallel --bf16",
    P2,
    f"{P2} --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full",
    "--bf16",
    "--use-distributed-optimizer --overlap-grad-reduce",
]
FOUR = [f"{T2} {P2} --bf16 --recompute-granularity selective"]


class Wrapped:
    """Counts calls and bytes where torch.distributed is called: by function, and the group's name in the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.names = {id(getattr(mesh, name).group): name for name in ("ends", "world", "pp", "dp", "tp")}
        self.counts: collections.Counter = collections.Counter()
        replaced = [(dist, "all_reduce"), (dist, "isend"), (dist, "irecv"), (dist, "broadcast")]
        replaced += [(collectives, "_gather"), (collectives, "_reduce_scatter")]
        self.originals = [(module, name, getattr(module, name)) for module, name in replaced]

    def __enter__(self) -> Wrapped:
        for module, name, original in self.originals:
            setattr(module, name, self.wrapped(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self.originals:
            setattr(module, name, original)

    def wrapped(self, name: str, original: Callable) -> Callable:
        def call(*tensors: Tensor, group: object = None, **settings: object) -> object:
            key = name.strip("_"), self.names[id(group)]
            self.counts[(*key, "calls")] += 1
            found = [x for x in tensors if isinstance(x, Tensor)]
            self.counts[(*key, "bytes")] += max(x.numel() * x.element_size() for x in found)
            return original(*tensors, group=group, **settings)

        return call


FUNCTIONS = {
    "all-reduce": "all_reduce",
    "all-gather": "gather",
    "reduce-scatter": "reduce_scatter",
    "send": "isend",
    "receive": "irecv",
}
AXES = {"tensor-parallel": "tp", "pipeline": "pp", "data-parallel": "dp", "whole run": "world"}


def as_wrapped(needs: Needs) -> dict[tuple[str, str, str], int]:
    """What a dry run has counted, in the words of `Wrapped`."""
    found = {}
    for (kind, axis), traffic in needs.traffic.items():
        for what in ("calls", "bytes"):
            found[FUNCTIONS[kind], AXES[axis], what] = getattr(traffic, what)
    return found


def real_batches(fields: Fields) -> Iterator[Batch]:
    while True:
        yield {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in fields.items()}


def real_steps(layouts: list[str], ports: list[int], fields: Fields) -> list[tuple[Needs, dict]]:
    """Of each layout what this process really needs: by `Counter`, and by `Wrapped`."""
    found = []
    for flags, port in zip(layouts, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = config_of(f"{MODEL} {flags}")
        with init_mesh(config.parallel, CPU) as mesh:
            microbatches = 16 // (2 * mesh.dp.size)
            with Counter(mesh.activity) as counter:
                engine = Engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=128 * mesh.tp.size)
                engine.buffer.initialize(1)
                with Wrapped(mesh) as wrapped:
                    settings = {"passes": microbatches, "microbatches": microbatches}
                    needs = count_step(engine, counter, real_batches(fields), **settings)
            found.append((needs, dict(wrapped.counts)))
    return found


@pytest.mark.parametrize(("processes", "layouts"), [(2, TWO), (4, FOUR)])
def test_equals_what_real_processes_need(processes: int, layouts: list[str]) -> None:
    countings = [Counting.of(config_of(f"{MODEL} {flags}"), GPT, processes) for flags in layouts]
    ports = [free_port() for _ in layouts]
    by_rank = run_distributed(real_steps, processes, layouts, ports, countings[0].fields)
    for i, counting in enumerate(countings):
        fakes = [counting.rank(rank) for rank in range(processes)]
        for fake, steps in zip(fakes, by_rank, strict=True):
            real, wrapped = steps[i]
            assert as_wrapped(fake) == wrapped and fake.traffic == real.traffic
            assert fake.flops == real.flops and fake.parameters == real.parameters
            for kind, held in real.memory.items():
                assert fake.memory[kind] == pytest.approx(held, rel=0.03), (layouts[i], kind)
        of_a_replica = [needs.counted for needs in fakes if needs.place["dp"] == 0]
        assert sum(of_a_replica) == counting.model_parameters()
