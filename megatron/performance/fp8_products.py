"""FP8 products of a linear layer by torchao's recipes. Importing this module requires torchao.

Each product casts both operands to FP8, scaled by their current values: by tensor (`tensorwise`), or by row of the
first and column of the second operand (`rowwise`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import e4m3_dtype, e5m2_dtype
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_utils import pad_tensor_for_matmul, tensor_to_scale, to_fp8_saturated

from megatron.ops.linear import matmul
from megatron.performance.config import FP8_MULTIPLE


def recipe(name: str, *, gradients: str, emulate: bool) -> Float8LinearConfig:
    """torchao's recipe `name`.

    Args:
        gradients: format of the output gradients, "e4m3" or "e5m2"; activations and weights are e4m3.
        emulate: compute products in fp32, of the operands rounded to FP8.
    """
    if not emulate:
        # Changes no layer, and applies torchao's workaround for the code that Inductor generates (triton issue 11111).
        convert_to_float8_training(torch.nn.Identity())
    config = Float8LinearConfig.from_recipe_name(name)
    dtype = {"e4m3": e4m3_dtype, "e5m2": e5m2_dtype}[gradients]
    grad = dataclasses.replace(config.cast_config_grad_output, target_dtype=dtype)
    return dataclasses.replace(
        config,
        cast_config_grad_output=grad,
        cast_config_grad_output_for_grad_weight=grad,
        emulate=emulate,
    )


@dataclasses.dataclass(frozen=True)
class Fp8Products:
    """The three products of a linear layer, as `Ops` has them."""

    config: Float8LinearConfig

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""
        if x.numel() == 0:  # a replica at the end of an evaluation; an empty tensor has no maximum
            return matmul(x, weight, bias)
        c = self.config
        casts = c.cast_config_input, c.cast_config_weight
        y = self.product(x.flatten(0, -2), weight.t(), casts, c.gemm_config_output, x.dtype, bias)
        return y.view(*x.shape[:-1], -1)

    def dgrad(self, grad: Tensor, weight_t: Tensor, _: None) -> Tensor:
        """Gradient of x: grad [..., outputs] and Wᵀ [inputs, outputs] to [..., inputs]."""
        c = self.config
        casts = c.cast_config_grad_output, c.cast_config_weight_for_grad_input
        y = self.product(grad.flatten(0, -2), weight_t.t(), casts, c.gemm_config_grad_input, grad.dtype)
        return y.view(*grad.shape[:-1], -1)

    def accumulate_wgrad(self, main_grad: Tensor, a: Tensor, b: Tensor) -> None:
        """main_grad += a b: a [outputs, tokens] is the transposed output gradient, b [tokens, inputs] the input."""
        c = self.config
        casts = c.cast_config_grad_output_for_grad_weight, c.cast_config_input_for_grad_weight
        main_grad.add_(self.product(a, b, casts, c.gemm_config_grad_weight, main_grad.dtype))

    def product(
        self,
        a: Tensor,
        b: Tensor,
        casts: tuple[CastConfig, CastConfig],
        gemm: Float8GemmConfig,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """a b + bias in `dtype`: a [m, k], b [k, n] and bias [n] to [m, n]."""
        a8, a_scale = self.quantize(a, casts[0], -1)
        b8, b_scale = self.quantize(b, casts[1], 0)
        if self.config.emulate:
            y = torch.mm(a8.float() / a_scale, b8.float() / b_scale).to(dtype)
            return y if bias is None else y + bias
        if a8.shape[1] % FP8_MULTIPLE:  # a number of tokens; the dimensions of weights are multiples
            a8, b8 = pad_tensor_for_matmul(a8, dims=1), pad_tensor_for_matmul(b8, dims=0)
        # The kernels read rows of the first and columns of the second operand.
        a8, b8 = a8.contiguous(), b8.t().contiguous().t()
        return addmm_float8_unwrapped(
            a8, a_scale, b8, b_scale, dtype, bias=bias, use_fast_accum=gemm.use_fast_accum
        )

    def quantize(self, x: Tensor, cast: CastConfig, dim: int) -> tuple[Tensor, Tensor]:
        """`x` in FP8 times a scale, and the fp32 scale: of the whole tensor, or of each vector along `dim`."""
        scale = tensor_to_scale(
            x,
            cast.target_dtype,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=dim,
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return to_fp8_saturated(x.float() * scale, cast.target_dtype), scale
