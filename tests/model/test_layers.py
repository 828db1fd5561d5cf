"""Linear layers whose inputs do not all want a gradient."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.model.context import ModelContext
from megatron.model.layers import column_linear

FORWARD = 2 * (5 * 2) * 8 * 12  # floating-point operations of the product


def gradients(wanted: tuple[bool, ...]) -> tuple[list, int]:
    """Of x [5, 2, 8], W [12, 8] and b, and the operations of backward's products."""
    draw = torch.Generator().manual_seed(1)
    inputs: list[Tensor] = [torch.randn(shape, generator=draw) for shape in ((5, 2, 8), (12, 8), (12,))]
    for x, wants in zip(inputs, wanted, strict=True):
        x.requires_grad_(wants)
    out = column_linear(*inputs, ModelContext(vocab_size=8, padded_vocab_size=8))
    with FlopCounterMode(display=False) as counter:
        out.square().sum().backward()
    return [x.grad for x in inputs], counter.get_total_flops()


def test_what_is_frozen_costs_no_products() -> None:
    everything, _ = gradients((True, True, True))
    for wanted in itertools.product((False, True), repeat=3):
        if not any(wanted):
            continue
        found, flops = gradients(wanted)
        assert flops == FORWARD * (wanted[0] + wanted[1])
        for wants, grad, expected in zip(wanted, found, everything, strict=True):
            assert torch.equal(grad, expected) if wants else grad is None
