"""Fake tensors and process groups: tensors with shapes but without values, that behave as on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.context_parallel import attention as context_attention
from megatron.context_parallel.blocks import Block
from megatron.data.zigzag import Zigzag
from megatron.model.moe import dispatch, layer, router
from megatron.model.moe_config import MoEConfig
from megatron.ops import scored_attention
from megatron.ops.attention import MaskSpec
from megatron.ops.cpu import document_attention, norm
from megatron.ops.scored_attention import Pairs, ScoreRules
from megatron.parallel.collectives import Pending
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Axis, Mesh, arrange, axis_sizes
from megatron.planner.counting import tensors_of

aten = torch.ops.aten
Replacements = dict[tuple[Any, str], Callable[..., Any]]


@contextmanager
def fake_mesh(config: ParallelConfig, device: torch.device, *, rank: int, processes: int) -> Iterator[Mesh]:
    """Context with the mesh of one process of a run, without the others.

    Communication returns at once. Its results are fake: an all-gather copies the local input into every chunk.

    Raises:
        InputError: the processes do not fit the layout.
    """
    sizes = axis_sizes(config, processes)
    if processes == 1:
        yield Mesh(device=device)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        world = Axis(rank, processes, ranks=range(processes))
        yield arrange(sizes, Mesh(device, world, heartbeat=world.heartbeat), config)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(*, gpu: bool) -> Iterator[None]:
    """Make tensors within the block fake, except numbers that the host creates and reads.

    Their device is the CPU: autograd rejects fake CUDA tensors if torch was built without CUDA. With `gpu`, operations
    are those that PyTorch chooses on a GPU.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _HostValues(),
        _replaced(BALANCED | (ON_A_GPU if gpu else ON_A_CPU)),
    ):
        yield


class _HostValues(TorchDispatchMode):
    """Keep results of torch.tensor and torch.arange real, and results computed from these only: numbers that processes
    agree on, and the rows of experts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default:
            return args[0]
        found = tensors_of(args)
        if func.overloadpacket is aten.arange or (
            found and not any(isinstance(x, FakeTensor) for x in found)
        ):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _replaced(functions: Replacements) -> Iterator[None]:
    """Replace functions of modules within the block.

    A torch mode would not be active in backward, where layers are recomputed.
    """
    originals = {(module, name): getattr(module, name) for module, name in functions}
    try:
        for (module, name), function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)


def balanced_choice(
    logits_ne: Tensor, config: MoEConfig, bias_e: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights as the router computes them, and indices of experts that all get equally many tokens."""
    assert config.num_experts is not None
    weights_nk, _ = choose_experts(logits_ne, config, bias_e)
    indices = torch.arange(weights_nk.numel(), device=logits_ne.device) % config.num_experts
    return weights_nk, indices.view(weights_nk.shape)


def balanced_drops(
    weights_nk: Tensor,
    indices_nk: Tensor,
    shape: tuple[int, ...],
    capacity: int,
    config: MoEConfig,
    axis: Axis,
    cp: Axis,
    documents: bool,
) -> Tensor:
    """Copies that are dropped if each rank of `axis` drops equally many."""
    weights_nk = torch.ones_like(indices_nk, dtype=weights_nk.dtype)
    dropped_copies(weights_nk, indices_nk, shape, capacity, config, axis, cp, documents)  # communicates
    return dropped_copies(
        weights_nk, indices_nk, shape, capacity // axis.size, config, ALONE, ALONE, documents
    )


def _exchanged_sizes(sizes_rl: Tensor, axis: Axis, *arguments: Any) -> Pending:
    """Sizes from all ranks, which send as many rows as this one."""
    return Pending(start_all_to_all(sizes_rl, axis, *arguments).wait().copy_(sizes_rl[axis.rank]))


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """Stand in for torch's grouped_mm, which fake tensors support in bf16 only."""
    if b.dim() == 3:
        return a @ b[0]
    out = a.new_empty(len(offs), a.shape[0], b.shape[1])
    out[0].addmm_(a, b)
    return out


def _gpu_dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


def _gpu_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)


def _gpu_rms_norm(x: Tensor, shape: torch.Size, weight: Tensor, epsilon: float) -> Tensor:
    return _RMSNorm.apply(x, weight)


class _RMSNorm(torch.autograd.Function):
    """Save what torch's CUDA kernel saves: the input, and one number for each position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _gpu_addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """Stand in for torch.addmm with an output dtype, which fake tensors of torch 2.11 do not support.

    Its factors take the output's dtype, without memory of their own.
    """
    element = torch.empty((), dtype=out_dtype)
    return out.addmm_(element.expand(a.shape), element.expand(b.shape))


def _gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """Attention by the fastest CUDA kernel that accepts the inputs.

    FlashAttention accepts no mask, no fp32 and no values of another width; the memory-efficient kernel accepts no
    grouped-query attention.
    """
    if attn_mask is None and q.shape[-1] == v.shape[-1] and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    if enable_gqa:
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=True
        )[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal
    )[0]


def _gpu_document_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: object, enable_gqa: bool
) -> Tensor:
    """FlexAttention, counted as causal attention without documents, since their lengths are in the data."""
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    assert isinstance(out, Tensor)
    return out


def _one_document(document_ids_bs: Tensor) -> list[list[int]]:
    """Each sequence as one document, since the lengths of documents are in the data."""
    return [[document_ids_bs.shape[1]]] * len(document_ids_bs)


def _kept_pairs(rules: ScoreRules, b: int, n: int, pairs: Pairs) -> Tensor:
    """The memory of `kept_pairs`, without the many small steps of its hash."""
    return torch.empty(b, n, len(pairs.query_s), len(pairs.key_t), dtype=torch.bool)


def _without_documents(spec: MaskSpec, zigzag: Zigzag, rank: int, source: int) -> Iterator[Block]:
    """`blocks` of a sequence that is one document, since their lengths are in the data."""
    spec = dataclasses.replace(spec, document_ids_bs=None)
    return blocks(spec, Zigzag(zigzag.length, zigzag.size), rank, source)


choose_experts, dropped_copies, start_all_to_all, blocks = (
    router.choose_experts,
    layer.dropped_copies,
    dispatch.start_all_to_all,
    context_attention.blocks,
)
# Routing depends on values, which are assumed: all experts get equally many tokens from every rank.
BALANCED: Replacements = {
    (router, "choose_experts"): balanced_choice,
    (layer, "dropped_copies"): balanced_drops,
    (dispatch, "start_all_to_all"): _exchanged_sizes,
    (F, "grouped_mm"): _grouped_mm,
    (context_attention, "blocks"): _without_documents,
}
# Functions for which PyTorch has other operations on a GPU.
ON_A_GPU: Replacements = {
    (F, "dropout"): _gpu_dropout,
    (F, "scaled_dot_product_attention"): _gpu_attention,
    (F, "rms_norm"): _gpu_rms_norm,
    (norm, "half_layer_norm"): _gpu_layer_norm,
    (flex_attention, "flex_attention"): _gpu_document_attention,
    (torch, "addmm"): _gpu_addmm,
}
# oneDNN reorders a weight for one product; fake tensors cannot be reordered.
REORDER = (torch.ops.mkldnn, "_reorder_linear_weight")
ON_A_CPU: Replacements = {
    (scored_attention, "kept_pairs"): _kept_pairs,
    (document_attention, "document_lengths"): _one_document,
    **({REORDER: lambda weight, rows: weight} if hasattr(*REORDER) else {}),
}
