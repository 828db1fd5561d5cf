"""Parts of attention by the kernel of a GPU, against formulas."""

from __future__ import annotations

import pytest
import torch
from flash_attention import on_a_gpu
from torch import Tensor

from megatron.context_parallel.blocks import Block, blocks
from megatron.context_parallel.kernels import (
    partial_attention,
    partial_attention_backward,
    plain_partial_attention,
    plain_partial_attention_backward,
)
from megatron.data.zigzag import Zigzag
from megatron.ops.attention import MaskSpec


def inputs(d: int, w: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys and values together as ranks send them, and the gradient of the output; all of 8 positions."""
    torch.manual_seed(0)
    shapes = (2, 4, 8, d), (2, 2, 8, d + w), (2, 4, 8, w)
    q, kv, grad = (torch.randn(shape).to(dtype) for shape in shapes)
    return [q, kv[..., :d], kv[..., d:], grad]


def test_a_part_of_the_queries_has_its_own_lse() -> None:
    """The second half of a rank's queries meets the keys of the next rank: a view of the lse with gaps."""
    spec = MaskSpec(length=16, device=torch.device("cpu"))
    (block,) = blocks(spec, Zigzag(16, 2), 0, 1)
    assert block == Block(None, (4, 8), (0, 8))
    q, k, v, grad = inputs(16, 16)
    out, lse = plain_partial_attention(q, k, v, None, causal=False)
    half_q, half_grad, half_out, half_lse = (x[:, :, 4:8] for x in (q, grad, out, lse))
    arguments = half_grad, half_q, k, v, half_out, half_lse, None
    with on_a_gpu() as (_, backward):
        found = partial_attention_backward(*arguments, causal=False)
    assert backward.call_count == 1
    for x, y in zip(found, plain_partial_attention_backward(*arguments, causal=False), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("d", "w", "dtype", "capability", "flash"),
    [
        (128, 128, torch.bfloat16, (9, 0), True),
        (128, 128, torch.float16, (8, 0), True),
        (256, 256, torch.bfloat16, (8, 0), True),
        (192, 128, torch.bfloat16, (8, 0), True),  # latent attention
        (128, 128, torch.float32, (8, 0), False),
        (128, 128, torch.float16, (7, 0), False),  # V100
        (128, 128, torch.float16, (7, 5), False),  # T4
        (264, 264, torch.bfloat16, (8, 0), False),
        (224, 224, torch.bfloat16, (8, 6), False),  # RTX 3090, whose backward does not take them
        (224, 224, torch.bfloat16, (9, 0), True),
        (20, 20, torch.bfloat16, (8, 0), False),
        (24, 12, torch.bfloat16, (8, 0), False),
        (16, 24, torch.bfloat16, (8, 0), False),
    ],
)
def test_flash_attention_gets_what_it_takes(
    d: int, w: int, dtype: torch.dtype, capability: tuple[int, int], flash: bool
) -> None:
    q, k, v, grad = inputs(d, w, dtype)
    plain = plain_partial_attention(q, k, v, None, causal=True)
    arguments = grad, q, k, v, *plain, None
    with on_a_gpu(capability) as calls:
        found = partial_attention(q, k, v, None, causal=True)
        grads = partial_attention_backward(*arguments, causal=True)
    assert [call.called for call in calls] == [flash, flash]
    plain += plain_partial_attention_backward(*arguments, causal=True)
    for x, y in zip(found + grads, plain, strict=True):
        torch.testing.assert_close(x, y)
