"""Numbers of parameters of the parts of a model on one rank, and of those that it owns."""

from __future__ import annotations

import functools

from megatron.model.config import ModelConfig
from megatron.model.flops import attention_linears, mlp_weights
from megatron.planner.division import Parts, stage_layers
from megatron.planner.layout import Job, Layout


def norm_parameters(model: ModelConfig, size: int) -> int:
    """Number of parameters of a norm over `size` channels."""
    return size * (2 if model.normalization == "LayerNorm" else 1)


@functools.lru_cache(maxsize=4096)
def layer_parameters(job: Job, tensor: int, *, has_experts: bool = False) -> float:
    """Number of parameters of one layer on one of `tensor` ranks, without those of its experts."""
    model = job.model
    h, heads, ffn = model.hidden_size, model.num_attention_heads * model.kv_channels, model.ffn_hidden_size
    kv = 2 * model.kv_heads_per_rank(tensor) * tensor * model.kv_channels
    fc1 = ffn * (2 if model.gated else 1)
    sharded, replicated = h * fc1 + ffn * h, (4 if model.sandwich_norm else 2) * norm_parameters(model, h)
    if has_experts:
        sharded = mlp_weights(model, model.moe_shared_expert_intermediate_size or 0)
        vectors = model.moe_router_enable_expert_bias + uses_last_load(model) + model.add_expert_bias
        replicated += (model.num_experts or 0) * (h + vectors) + h * model.moe_shared_expert_gate
    for inputs, outputs, split in attention_linears(model, tensor):
        sharded += inputs * outputs if split else 0
        replicated += 0 if split else inputs * outputs
    if model.softmax_type == "learnable":
        sharded += model.num_attention_heads
    attention_bias = model.add_bias_linear or model.add_attention_bias
    if (attention_bias or model.add_qkv_bias) and not model.multi_latent_attention:
        sharded += heads + kv
    if attention_bias:
        replicated += h
    if model.add_bias_linear or model.add_mlp_bias:
        sharded += fc1
        replicated += h
    if model.multi_latent_attention and model.qk_layernorm:
        replicated += norm_parameters(model, model.kv_lora_rank + (model.q_lora_rank or 0))
    elif model.qk_layernorm_all_heads:
        sharded += heads + kv // 2
    elif model.qk_layernorm:
        replicated += 2 * norm_parameters(model, model.kv_channels)
    return sharded / tensor + replicated


def uses_last_load(model: ModelConfig) -> bool:
    """True if the router keeps the load of the last global batch."""
    return "global_aux_loss" in model.moe_router_load_balancing_type


def expert_parameters(job: Job, layout: Layout) -> float:
    """Number of parameters of the experts of one layer on one rank."""
    model = job.model
    if model.num_experts is None or model.moe_ffn_hidden_size is None:
        return 0
    each = mlp_weights(model, model.moe_ffn_hidden_size)
    if model.add_expert_bias:
        each += model.moe_ffn_hidden_size * (2 if model.gated else 1) + model.hidden_size
    total = model.num_experts * each
    return total / (layout.expert * layout.expert_tensor)


def end_parameters(job: Job, tensor: int, *, first: bool, last: bool) -> float:
    """Number of parameters beside the layers on one rank: embeddings if `first`, final norm and head if `last`."""
    model, table = job.model, job.padded_vocab_size(tensor) / tensor * job.model.hidden_size
    parameters = 0.0
    if first:
        parameters += table
        if model.position_embedding_type == "learned_absolute":
            parameters += model.max_position_embeddings * model.hidden_size
        if model.embed_layernorm:
            parameters += norm_parameters(model, model.hidden_size)
    if last:
        parameters += norm_parameters(model, model.hidden_size)
        if not first or model.untie_embeddings_and_output_weights:
            parameters += table
        if not first and model.untie_embeddings_and_output_weights and model.mtp_num_layers:
            parameters += table  # a copy of the word embeddings
        joining = 2 * model.hidden_size**2 + 3 * norm_parameters(model, model.hidden_size)
        parameters += model.mtp_num_layers * joining
    return parameters


def stage_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of a stage on one rank."""
    dense, layers = _dense_parameters(job, layout.tensor, layout.divided(job))[stage]
    return dense + layers * expert_parameters(job, layout) if layers else dense


@functools.lru_cache(maxsize=4096)
def _dense_parameters(job: Job, tensor: int, parts: Parts) -> tuple[tuple[float, int], ...]:
    """Number of parameters of each stage on one rank without those of experts, and its number of layers with these."""
    found = []
    for stage, chunks in enumerate(stage_layers(job, parts)):
        ends = {parts.of(stage, chunk) for chunk in range(parts.chunks)}
        parameters = end_parameters(job, tensor, first=0 in ends, last=parts.number - 1 in ends)
        for dense, experts in chunks:
            parameters += dense * layer_parameters(job, tensor)
            parameters += experts * layer_parameters(job, tensor, has_experts=True)
        found.append((parameters, sum(experts for _, experts in chunks)))
    return tuple(found)


def stage_expert_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of the experts of a stage on one rank."""
    if job.model.num_experts is None:
        return 0.0
    _, layers = _dense_parameters(job, layout.tensor, layout.divided(job))[stage]
    return layers * expert_parameters(job, layout)


def largest_stage(job: Job, layout: Layout) -> int:
    """The stage with the most parameters, of `layout.distinct_stages`."""
    experts, sizes = (
        expert_parameters(job, layout),
        _dense_parameters(job, layout.tensor, layout.divided(job)),
    )
    return max(layout.distinct_stages(job), key=lambda stage: sizes[stage][0] + sizes[stage][1] * experts)


def largest_layer(job: Job, layout: Layout, stage: int, *, replicated: bool = False) -> float:
    """Number of parameters of the largest layer of a stage on one rank.

    If `replicated`, without experts that one rank alone has, which are neither gathered nor reduced.
    """
    sizes = [layer_parameters(job, layout.tensor)]
    if any(experts for _, experts in layout.layers(job)[stage]):
        alone = replicated and layout.expert_shards == 1
        routed = 0.0 if alone else expert_parameters(job, layout)
        sizes.append(layer_parameters(job, layout.tensor, has_experts=True) + routed)
    return max(sizes)


def owned_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of a stage whose optimizer state one rank holds."""
    parameters = stage_parameters(job, layout, stage)
    if not (layout.distributed_optimizer or layout.sharded_gradients or layout.sharded_parameters):
        return parameters
    experts = stage_expert_parameters(job, layout, stage)
    return (parameters - experts) / layout.shards + experts / layout.expert_shards


def model_parameters(job: Job) -> float:
    """Number of parameters of the whole model: for GPT-2's shape 2104.04473 equation 2, plus the final norm."""
    return stage_parameters(job, Layout(), 0)
