"""Experts in Hugging Face checkpoints: each by itself, as published, or all of a layer in one tensor."""

from __future__ import annotations

import dataclasses
import math
import re

from megatron.errors import InputError
from megatron.interop.huggingface.family import LAYER, Family
from megatron.interop.huggingface.hub_file import HubTensor
from megatron.model.config import ModelConfig
from megatron.parallel.slices import Block

# A parameter of training, with --moe-router-load-balancing-type global_aux_loss.
LOAD = ".mlp.router.load"
# Stays in fp32 in a half-precision model.
BIAS = ".mlp.router.expert_bias"
# A small malicious file could describe far more.
(MAX_EXPERTS,) = (f.metadata["flag"].high for f in dataclasses.fields(ModelConfig) if f.name == "num_experts")
# Families without layers of dense MLPs.
ONLY_EXPERTS = ("mixtral", "olmoe", "gpt_oss")


def unstacked(family: Family, files: dict[str, HubTensor]) -> dict[str, HubTensor]:
    """The tensors of a checkpoint, with those of each expert in place of those that stack them.

    transformers 5 stacks the experts of a layer in memory, and with `save_original_format=False` in files too:
    `mlp.experts.gate_up_proj` [experts, 2f, h] and `mlp.experts.down_proj` [experts, h, f].

    Raises:
        InputError: a stacked tensor has an impossible shape.
    """
    if len(family.modules[LAYER + "mlp.experts.weight1"].names) == 1:  # always stacked
        return files
    gate, up = family.modules[LAYER + "mlp.experts.weight1"].names
    (down,) = family.modules[LAYER + "mlp.experts.weight2"].names
    (router,) = family.modules[LAYER + "mlp.router"].names
    found: dict[str, HubTensor] = {}
    for name, tensor in files.items():
        match = re.fullmatch(
            r"(model\.)?layers\.([0-9]+)\.mlp\.(gate|experts\.(gate_up|down)_proj)(\.weight)?", name
        )
        if match is None:
            found[name] = tensor
            continue
        prefix, layer, module, kind, suffix = match.groups()

        def place(theirs: str, expert: int, prefix: str = prefix, layer: str = layer) -> str:
            named = theirs.format(layer, expert=expert)
            return named if prefix else named.removeprefix(family.prefix)

        if module == "gate":
            found[place(router, 0) + (suffix or "")] = tensor
            continue
        if (
            len(tensor.shape) != 3
            or tensor.shape[0] > MAX_EXPERTS
            or (kind == "gate_up" and tensor.shape[1] % 2)
            or tensor.block is not None
        ):
            raise InputError(
                f"{tensor.file.path}: {name} has the shape {tensor.shape}, not that of stacked experts"
            )
        experts, rows, columns = tensor.shape
        names = (gate, up) if kind == "gate_up" else (down,)
        shape = (rows // len(names), columns)
        for expert in range(experts):
            for i, theirs in enumerate(names):
                width = math.prod(shape)
                block = Block((expert, expert + 1), (i * width, (i + 1) * width))
                found[place(theirs, expert)] = dataclasses.replace(tensor, shape=shape, block=block)
    return found


def moe_family(model: ModelConfig) -> str:
    """The family nearest to a mixture of experts."""
    if model.multi_latent_attention:
        return "deepseek_v3" if model.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if model.add_expert_bias:
        return "gpt_oss"
    if model.qk_layernorm_all_heads:
        return "olmoe"
    if model.qk_layernorm:
        return "qwen3_moe"
    return "mixtral" if model.moe_shared_expert_intermediate_size is None else "qwen2_moe"


def without_unused_sizes(model: ModelConfig) -> ModelConfig:
    """The same model, if all its layers have experts, with the width of experts in place of that of dense MLPs."""
    if model.moe_ffn_hidden_size is None or not all(model.expert_layers(model.num_layers)):
        return model
    return dataclasses.replace(model, ffn_hidden_size=model.moe_ffn_hidden_size)


def next_token_layer(names: set[str], layers: int) -> set[str]:
    """The tensors of the layer for multi-token prediction, which follows the `layers` of DeepSeek-V3."""
    match = re.compile(rf"(model\.)?layers\.{layers}\.(.+)")
    found = {name: matched[2] for name in names if (matched := match.fullmatch(name))}
    return set(found) if "eh_proj.weight" in found.values() else set()
