"""A run of Megatron-LM v2.5, repeated from its initial weights on its data, gives the same log digit for digit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from nvidia import RUN, run_data

from megatron.interop.convert import write_native
from megatron.interop.nvidia.read import open_megatron
from megatron.tokenizer.config import TokenizerConfig

# Iteration, learning rate, loss and gradient norm, as Megatron-LM printed them.
LOG = """
    1  4.902E-04  1.646444E+01  5.923
    2  9.804E-04  1.638678E+01  5.780
    3  8.632E-04  1.581183E+01  5.658
    4  5.129E-04  1.582300E+01  5.177
    5  1.578E-04  1.575407E+01  5.051
    6  1.000E-05  1.536074E+01  5.111
"""
VALIDATION, TEST = "1.566344E+01", "1.526804E+01"


@pytest.mark.parametrize(
    ("start", "replicas", "layout"),
    [
        ("init_tp1", 1, []),
        pytest.param("init_tp2", 2, ["--tensor-model-parallel-size", 2], marks=pytest.mark.slow),
        pytest.param("init_pp2", 2, ["--pipeline-model-parallel-size", 2], marks=pytest.mark.slow),
        pytest.param("init_tp1", 2, [], marks=pytest.mark.slow),
    ],
    ids=["T1", "T2", "P2", "D2"],
)
def test_equals_nvidias_log(
    pretrain: Callable,
    command: Callable,
    shared: Path,
    tmp_path: Path,
    start: str,
    replicas: int,
    layout: list[object],
) -> None:
    checkpoint = open_megatron(shared / "vectors" / "gpt-v2.5" / start, TokenizerConfig())
    write_native(checkpoint, tmp_path / "native", lambda size: None)
    metrics = tmp_path / "metrics.jsonl"
    flags = [*RUN, *run_data(shared, tmp_path / "cache"), *layout, "--metrics-path", metrics]
    flags += ["--load", tmp_path / "native", "--finetune"]
    if replicas == 1:
        pretrain(*flags)
    else:
        command("pretrain_gpt.py", *flags, replicas=replicas)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for expected, record in zip(LOG.split("\n")[1:-1], records, strict=False):
        iteration, rate, loss, norm = expected.split()
        assert record["iteration"] == int(iteration)
        assert f"{record['learning rate']:.3E}" == rate
        assert f"{record['grad norm']:.3f}" == norm
        # The last printed digit may differ by rounding.
        assert record["lm loss"] == pytest.approx(float(loss), abs=1.01e-5)
    assert records[6]["lm loss validation"] == pytest.approx(float(VALIDATION), abs=1.01e-5)
    assert records[7]["lm loss test"] == pytest.approx(float(TEST), abs=1.01e-5)
