"""Linear layers of which some inputs are frozen."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.model.context import ModelContext
from megatron.model.layers import column_linear

FORWARD_FLOPS = 2 * (5 * 2) * 8 * 12  # of the matmul


def gradients(needs_grad: tuple[bool, ...]) -> tuple[list, int]:
    """Gradients of x [5, 2, 8], W [12, 8] and b, and the FLOPs of backward's matmuls."""
    draw = torch.Generator().manual_seed(1)
    inputs: list[Tensor] = [torch.randn(shape, generator=draw) for shape in ((5, 2, 8), (12, 8), (12,))]
    for x, needs in zip(inputs, needs_grad, strict=True):
        x.requires_grad_(needs)
    out = column_linear(*inputs, ModelContext(vocab_size=8, padded_vocab_size=8))
    with FlopCounterMode(display=False) as counter:
        out.square().sum().backward()
    return [x.grad for x in inputs], counter.get_total_flops()


def test_frozen_inputs_cost_no_matmuls() -> None:
    everything, _ = gradients((True, True, True))
    for needs_grad in itertools.product((False, True), repeat=3):
        if not any(needs_grad):
            continue
        found, flops = gradients(needs_grad)
        assert flops == FORWARD_FLOPS * (needs_grad[0] + needs_grad[1])
        for needs, grad, expected in zip(needs_grad, found, everything, strict=True):
            assert torch.equal(grad, expected) if needs else grad is None
