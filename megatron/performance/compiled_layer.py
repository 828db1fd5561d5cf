"""Transformer layers that torch.compile compiles as a whole: what they need besides the core's operations.

Everything within a layer must be a function of tensors: the masks of dropout, and the addition of each gradient to
`main_grad`, which hooks on parameters do elsewhere.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.data.zigzag import Zigzag
from megatron.ops.activation import activation
from megatron.ops.backend import Ops
from megatron.ops.compiler import CompileFn, Compiler, eager
from megatron.ops.document_attention import attention_by_documents, make_block_mask
from megatron.ops.host_memory import upload
from megatron.ops.linear import fused_accumulate_wgrad
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import main_grad
from megatron.parallel.random import DropoutKey, stable_hash

# Lower 32 bits of a number.
MASK = 2**32 - 1
# Blocks of tokens whose gradients are summed separately (`backward_sums.py`).
BLOCKS = 64
# Sites of a layer, or outside of the layers, that drop elements of activations.
SITES = ("embedding", "attended", "mlp", "pooled")


def layer_ops(compiler: CompileFn, device: torch.device) -> dict[str, Any]:
    """Fields of `Ops` with which whole layers are compiled."""
    if isinstance(compiler, Compiler):
        compiler.settings["options"] |= inductor_options()
        compiler.settings["dynamic"] = None  # as on a GPU
    fields: dict[str, Any] = {
        "run": compiler,
        # Compiled code calls it eagerly, between two graphs.
        "communicate": torch.compiler.disable(eager),
        "recomputes_attention": False,
        "activation": activation_by_blocks,
        "accumulating": accumulating,
        "device_keys": device_keys,
    }
    if device.type == "cpu":  # as on a GPU that has the fused kernel
        fields["accumulate_wgrad"] = fused_accumulate_wgrad
    else:  # FlexAttention has no gradient on a CPU
        fields |= {"attention": attention_by_documents, "make_mask": make_block_mask}
    return fields


def inductor_options() -> dict[str, Any]:
    """Options of torch.compile for layers."""
    # These import torch's compiler.
    from megatron.performance.backward_sums import BackwardSums
    from megatron.performance.saved_activations import SaveNormInputs

    return {"joint_custom_post_pass": SaveNormInputs(), "post_grad_custom_pre_pass": BackwardSums(BLOCKS)}


def uncompiled(ops: Ops) -> AbstractContextManager[object]:
    """Context in which layers run uncompiled: compiled code calls no hooks of the modules in it."""
    return nullcontext() if ops.device_keys is None else torch.compiler.set_stance("force_eager")


@dataclasses.dataclass(frozen=True)
class CounterKey(DropoutKey):
    """Key whose masks come from a counter-based generator, so that they can be compiled.

    Attributes:
        words: int64 [1 + layers, 2] on the device, keys of the generator outside of the layers and for each layer;
            within a layer its row [2].
    """

    words: Tensor | None = None

    def at_layer(self, layer: int) -> CounterKey:
        assert self.words is not None
        # A copy, since code compiled for one view of a tensor would not serve another.
        return dataclasses.replace(self, layer=layer, words=self.words[1 + layer].clone())

    def drop(self, x: Tensor, p: float, site: str, rank: int | None, cp: Axis) -> Tensor:
        """`DropoutKey.drop`; ranks hold equal parts of the first dimension."""
        assert self.words is not None
        in_layer = self.words.dim() == 1
        words = self.words if in_layer else self.words[0]
        # Inductor computes with plain indices in too few bits. `|` makes this an ordinary number of 64 bits.
        index = torch.arange(x.numel(), device=x.device).view(x.shape) | 0
        if cp.size > 1:
            rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.dim() - 1)) | 0
            zigzag = Zigzag.of(len(x) * cp.size, cp.size, documents=self.documents)
            index = index + (zigzag.positions(cp.rank, rows) - rows) * x[0].numel()
        counter = (index + (rank or 0) * x.numel()) ^ words[0]
        bits, _ = philox(counter, words.new_full((), SITES.index(site)), words[1])
        kept, shape = bits >= round(p * 2**32), x.shape
        if in_layer:  # the gradient of x is also that of a bias
            kept, x = by_blocks(kept), by_blocks(x)
        return torch.where(kept, x * (1 / (1 - p)), 0.0).view(shape)


def device_keys(keys: list[DropoutKey], layers: int, device: torch.device) -> list[DropoutKey]:
    """The same keys as `CounterKey`, with their words on a device, copied at once."""
    hashes = [stable_hash("dropout", key.seed, key.sample, bits=64) for key in keys]
    high, low = (torch.tensor([h >> shift & MASK for h in hashes]).unsqueeze(1) for shift in (32, 0))
    words = torch.stack(philox(torch.arange(1 + layers), high, low), dim=-1)
    words = upload(words, device)
    return [
        CounterKey(key.seed, key.sample, documents=key.documents, words=part)
        for key, part in zip(keys, words, strict=True)
    ]


def philox(c0: Tensor, c1: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Philox-2x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., SC 2011, "Parallel random numbers: as
    easy as 1, 2, 3"): counter and key to two random words. All are 32-bit numbers in int64 tensors, which broadcast."""
    for _ in range(7):
        product = c0 * 0xD256D193  # modulo 2^64, as unsigned numbers
        c0, c1 = (product >> 32 & MASK) ^ key ^ c1, product & MASK
        key = key + 0x9E3779B9 & MASK
    return c0, c1


def by_blocks(x: Tensor) -> Tensor:
    """View activations [..., h] as [BLOCKS, tokens of a block, h] if BLOCKS divides the tokens."""
    return x.reshape(BLOCKS, -1, x.shape[-1]) if x.numel() % (BLOCKS * x.shape[-1]) == 0 else x


def activation_by_blocks(x: Tensor, name: str) -> Tensor:
    """`activation`, whose gradient is computed in blocks of tokens."""
    y = activation(by_blocks(x), name)
    return y.view(*x.shape[:-1], y.shape[-1])


def accumulating(*params: Tensor) -> tuple[Tensor, ...]:
    """Return `params`. In compiled code one operation adds their gradients to `main_grad`, and not hooks on them."""
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled() or main_grad(params[0]) is None:
        return params
    return _Accumulating.apply(*params)


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.main_grads = [main_grad(p) for p in params]
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        if len(grads) == 1:  # a sum that the addition can be part of
            ctx.main_grads[0].add_(grads[0])
        else:
            torch._foreach_add_(ctx.main_grads, list(grads))
        return (None,) * len(grads)
