"""Memory of the programs that benchmarks/gpu.sh trains, counted without a GPU: each fits an H100 with 80 GB."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.train_sides import SIZES, Meter, baseline, run_flags
from megatron.arguments import parse_run_config
from megatron.parallel.mesh import Heartbeat
from megatron.planner.counting import Counter
from megatron.planner.device_specs import data_sheet
from megatron.planner.dry_run import DryRun
from megatron.pretrain_gpt import DEFAULTS, GPT

# Bytes that tensors may take; a fifth is left to CUDA's context, the libraries' workspaces and fragmentation.
CAPACITY = 0.8 * data_sheet("h100-80gb", where="").memory * 2**20
EACH_SIZE = pytest.mark.parametrize(
    "size", [pytest.param(s, marks=() if s == "7b" else pytest.mark.slow) for s in ("355m", "1.3b", "7b")]
)


@EACH_SIZE
@pytest.mark.parametrize("backend", ["auto", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_run_fits(size: str, backend: str) -> None:
    flags = [*run_flags("cuda", SIZES[size], "bf16"), "--ops-backend", backend]
    config = parse_run_config(flags, description="", defaults=DEFAULTS)
    assert DryRun.from_config(config, GPT, 1).count(0).memory["peak"] < CAPACITY


@EACH_SIZE
def test_what_it_is_compared_with_fits(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers, uncompiled, which keeps more than it does compiled, and more than nanoGPT."""
    monkeypatch.setattr(Meter, "time", lambda self, step: step())  # fake tensors have no values to read
    monkeypatch.setattr(nn.Module, "_apply", lambda self, *_: self)
    monkeypatch.setattr(F, "scaled_dot_product_attention", gpu_attention)
    counter = Counter(Heartbeat())
    with FakeTensorMode(), counter:
        steps = baseline("cpu", SIZES[size], "bf16", "transformers", None, False)
        next(steps)
        next(steps)
    shape = SIZES[size]
    matrices = 12 * shape.layers * shape.hidden**2 + (shape.vocab + shape.length) * shape.hidden
    assert 4 * 4 * matrices < counter.peak < CAPACITY  # weights, gradients and two moments in fp32


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
