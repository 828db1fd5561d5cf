"""Shrink the mixtures of experts of a run, and patterns of layers."""

from __future__ import annotations

import math
from typing import Any

from megatron.model.config import ModelConfig
from megatron.variants.layer_pattern import has_rope

# Experts of a layer, unless groups and ranks need more, and their width.
NUM_EXPERTS, EXPERT_WIDTH = 8, 16


def shrunk_experts(model: ModelConfig, num_layers: int, *, owners: int, parts: int) -> dict[str, Any]:
    """Flags of fewer and narrower experts, with dense layers if the run has some. Empty for a dense model.

    Args:
        owners: groups of ranks that the experts are divided among.
        parts: number that divides the widths.
    """
    if model.num_experts is None:
        return {}
    topk = min(model.moe_router_topk, 2)
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is not None and group_topk is not None:
        all_groups = group_topk == groups
        topk = min(model.moe_router_topk // group_topk, 2)  # of each group
        groups = min(groups, 4)
        group_topk = groups if all_groups else min(group_topk, groups - 1)
        topk *= group_topk
    unit = math.lcm(groups or 1, owners)
    width = math.lcm(8, parts)
    shared = model.moe_shared_expert_intermediate_size
    chosen = shrunk_pattern(model.expert_layers(model.num_layers), num_layers)
    return {
        "num_experts": min(model.num_experts, unit * math.ceil(max(NUM_EXPERTS, 2 * topk) / unit)),
        "moe_layer_freq": "1" if all(chosen) else bits(chosen),
        "moe_ffn_hidden_size": width * math.ceil(EXPERT_WIDTH / width),
        "moe_shared_expert_intermediate_size": shared and width * math.ceil(EXPERT_WIDTH / width),
        "moe_router_topk": topk,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": group_topk,
    }


def shrunk_windows(model: ModelConfig, num_layers: int, length: int) -> dict[str, Any]:
    """Flags of layers with windows, which are shorter than a quarter of `length`, and of layers without RoPE."""
    flags: dict[str, Any] = {}
    windows = [window for window in model.windows if window is not None]
    if model.window_size is not None:
        chosen = shrunk_pattern([window is not None for window in model.windows], num_layers)
        flags["window_size"] = f"{min(max(windows, default=0), length // 4)},0"
        flags["window_attn_skip_freq"] = bits(chosen)
    if model.no_rope_freq is not None:
        flags["no_rope_freq"] = bits([not has for has in shrunk_pattern(has_rope(model), num_layers)])
    return flags


def shrunk_pattern(pattern: list[bool], num_layers: int) -> list[bool]:
    """Pick `num_layers` bits evenly from a pattern, at least one of each kind that it has."""
    chosen = [pattern[i * (len(pattern) - 1) // max(num_layers - 1, 1)] for i in range(num_layers)]
    if len(set(chosen)) < len(set(pattern)):
        chosen[-1] = not chosen[-1]
    return chosen


def bits(pattern: list[bool]) -> str:
    """The pattern as the value of a flag."""
    return f"[{','.join(str(int(bit)) for bit in pattern)}]"
