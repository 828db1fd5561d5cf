"""FP8 in the linear layers of transformer layers (--fp8-format).

Parameters, saved activations, gradients and communication stay as they are without it, and so do checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from megatron.errors import InputError
from megatron.model.layers import ColumnParallelLinear, RowParallelLinear
from megatron.model.transformer import TransformerLayer
from megatron.performance.config import Fp8Config
from megatron.training.config import RunConfig
from megatron.training.stage import StageModel

if TYPE_CHECKING:
    from megatron.performance.fp8_products import Fp8Products

logger = logging.getLogger(__name__)

# The first GPUs with FP8 products: Ada.
MIN_CAPABILITY = (8, 9)


def use_fp8(config: RunConfig, model: StageModel, device: torch.device) -> None:
    """Let the model's linear layers compute in FP8, if the run has --fp8-format, and log it.

    Raises:
        InputError: the GPU has no FP8 products, or torchao is not installed.
    """
    fp8, on_cpu = config.plugin(Fp8Config), device.type == "cpu"
    products = make_products(fp8, emulate=on_cpu)
    if products is None:
        return
    if not on_cpu and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise InputError(
            f"--fp8-format: {torch.cuda.get_device_name(device)} has no FP8 products, which need compute capability "
            "8.9 (Ada, Hopper or newer); leave the flag out"
        )
    set_products(config, model, products)
    kept = fp8.bf16_layers(config.model.num_layers)
    logger.info(
        "fp8: %s, recipe: %s, products: %s%s",
        fp8.fp8_format,
        fp8.fp8_recipe,
        "emulated in fp32 on the CPU" if on_cpu else "torch._scaled_mm",
        f", layers in bf16: {', '.join(map(str, kept))}" if kept else "",
    )


def make_products(config: Fp8Config, *, emulate: bool) -> Fp8Products | None:
    """The FP8 products of a run; None without --fp8-format.

    Raises:
        InputError: torchao is not installed.
    """
    if config.fp8_format is None:
        return None
    try:
        from megatron.performance.fp8_products import Fp8Products, recipe
    except ImportError as error:
        raise InputError(
            f"--fp8-format needs torchao, which cannot be imported ({error}): pip install 'torchao>=0.18'"
        ) from error
    gradients = "e5m2" if config.fp8_format == "hybrid" else "e4m3"
    return Fp8Products(recipe(config.fp8_recipe, gradients=gradients, emulate=emulate))


def set_products(config: RunConfig, model: StageModel, products: Fp8Products) -> None:
    """Set the products of the layers that are not kept in bf16."""
    ops = dataclasses.replace(
        model.context.ops,
        matmul=products.matmul,
        dgrad=products.dgrad,
        accumulate_wgrad=model.wgrads.deferring(products.accumulate_wgrad),
    )
    kept = config.plugin(Fp8Config).bf16_layers(config.model.num_layers)
    for layer in (layer for chunk in model.modules for layer in chunk.modules()):
        if isinstance(layer, TransformerLayer) and layer.layer not in kept:
            for linear in layer.modules():
                if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    linear.context = dataclasses.replace(linear.context, ops=ops)
