"""Throughput of a run with several processes."""

from __future__ import annotations

import pytest
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.model.flops import flops_per_sample
from megatron.parallel.mesh import init_mesh
from megatron.reports.throughput import take_work


def work(flags: str) -> tuple[list[float], list[float]]:
    """Return what `take_work` returns after one step of this rank's replica, and after nothing."""
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        # The second replica has read fewer samples, some of which are shorter.
        engine.samples.update({(16, 16): 4} if mesh.dp.rank == 0 else {(16, 16): 1, (8, 2): 2})
        return [list(take_work(engine)) for _ in range(2)]


@pytest.mark.parametrize(
    ("flags", "samples"),
    [
        ("", {(16, 16): 4 + 1, (8, 2): 2}),
        ("--tensor-model-parallel-size 2", {(16, 16): 4}),
        ("--pipeline-model-parallel-size 2", {(16, 16): 4}),
    ],
    ids=["D2", "T2", "P2"],
)
def test_work_of_all_replicas(flags: str, samples: dict[tuple[int, int], int]) -> None:
    """Ranks that share a replica count its tokens once."""
    model = config_of("").model
    shapes = [{"seq_length": s, "padded_vocab_size": 64, "num_logits": n} for s, n in samples]
    flops = sum(
        n * flops_per_sample(model, **shape) for n, shape in zip(samples.values(), shapes, strict=True)
    )
    tokens = sum(s * n for (s, _), n in samples.items())
    for first, second in run_distributed(work, 2, flags):
        assert first[:2] == [tokens, pytest.approx(flops, rel=1e-12)]
        assert 0.9 * flops < first[2] < flops  # causal attention needs half of the products
        assert second == [0, 0, 0]
