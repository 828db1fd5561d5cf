"""Twenty steps of a mixture of experts are the same in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from megatron.commands.inspect_checkpoint import open_one
from megatron.commands.verify import parse, start_run
from megatron.parallel.slices import whole

from .test_layouts import FLAGS, LAYOUTS, RUNS


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["mixture", "mixtral"])
def test_twenty_steps_of_a_mixture_are_the_same(tmp_path: Path, shape: str) -> None:
    losses, norms, weights = twenty_steps(shape, "one", 1, "", tmp_path)
    for layout in (
        *("T2+SP", "P2V2", "D4E2+ZeRO", "D4E2ET2 all-gather", "T2D2E4+SP", "P2E2 a dense stage"),
        *("everything, E2", "everything, E4"),
    ):
        other = twenty_steps(shape, layout, *LAYOUTS[layout], tmp_path)
        assert other[0] == pytest.approx(losses, rel=1e-5), layout
        assert other[1] == pytest.approx(norms, rel=1e-5), layout
        assert other[2].keys() == weights.keys()
        for name, weight in weights.items():
            difference = (other[2][name] - weight).abs().max()
            assert difference <= 1e-4 * weight.abs().max(), f"{layout}, {name}: {difference}"


def twenty_steps(
    shape: str, name: str, processes: int, flags: str, folder: Path
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of 20 steps, and the weights after them."""
    saved, metrics, label = folder / f"{name} saved", folder / f"{name}.jsonl", name.replace(" ", "-")
    words = [*f"{FLAGS} {RUNS[shape]} {flags} --train-iters 20".split(), "--save", str(saved)]
    config = parse("pretrain_gpt", [*words, "--metrics-path", str(metrics)])
    failure = start_run("pretrain_gpt", 400.0, config, processes, None, folder / label)
    assert failure is None, failure
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "grad norm" in row]
    assert len(rows) == 20
    source = open_one(saved).tensors["model"]
    weights = {key: source.read(key, whole(*row["shape"])) for key, row in source.index.items()}
    return [row["lm loss"] for row in rows], [row["grad norm"] for row in rows], weights
