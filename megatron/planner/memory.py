"""Memory of each pipeline stage of a layout, by formulas.

Names: b microbatch size, s sequence length, h hidden size, t tensor-parallel size. The optimizer is AdamW.
"""

from __future__ import annotations

import dataclasses
import functools

from megatron.model.config import ModelConfig
from megatron.model.flops import attention_linears, mlp_weights
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import Program

# Share of a device's memory that a model can use. The rest is for the driver, NCCL's buffers and fragmentation.
USABLE_MEMORY = 0.92
ADAM_MOMENTS = 8  # bytes per parameter: two means in fp32
INDEX_BYTES = 16  # of a row of an expert: its token, and the row of a token's copy
WEIGHT_BYTES = 4 + 8 + 4  # of a token's copy: its weight, its expert, and the weight of its row


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one process by purpose; `activations` at their peak."""

    weights: float
    gradients: float
    master: float
    moments: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments + self.activations


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
    dense = _dense_parameters(job, layout.tensor, layout.pipeline, layout.chunks, stage)
    return dense + stage_expert_parameters(job, layout, stage)


@functools.lru_cache(maxsize=4096)
def _dense_parameters(job: Job, tensor: int, pipeline: int, chunks: int, stage: int) -> float:
    """Number of parameters of a stage on one rank without those of experts."""
    parameters = end_parameters(job, tensor, first=stage == 0, last=stage == pipeline - 1)
    for dense, experts in Layout(pipeline=pipeline, chunks=chunks).layers(job)[stage]:
        parameters += dense * layer_parameters(job, tensor)
        parameters += experts * layer_parameters(job, tensor, has_experts=True)
    return parameters


def stage_expert_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of the experts of a stage on one rank."""
    return sum(experts for _, experts in layout.layers(job)[stage]) * expert_parameters(job, layout)


def largest_layer(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of the largest layer of a stage on one rank."""
    if any(experts for _, experts in layout.layers(job)[stage]):
        return layer_parameters(job, layout.tensor, has_experts=True) + expert_parameters(job, layout)
    return layer_parameters(job, layout.tensor)


def owned_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Number of parameters of a stage whose optimizer state one rank holds."""
    parameters = stage_parameters(job, layout, stage)
    if not (layout.distributed_optimizer or layout.sharded_parameters):
        return parameters
    experts = stage_expert_parameters(job, layout, stage)
    return (parameters - experts) / layout.shards + experts / max(1, layout.expert_data // layout.instances)


def model_parameters(job: Job) -> float:
    """Number of parameters of the whole model: for GPT-2's shape 2104.04473 equation 2, plus the final norm."""
    return stage_parameters(job, Layout(), 0)


def max_in_flight(layout: Layout, microbatches: int, stage: int) -> int:
    """Peak number of forward passes of chunks that await their backward pass on a stage (2104.04473 section 2.2)."""
    after = layout.pipeline - stage - 1
    warmup = after if layout.chunks == 1 else 2 * after + (layout.chunks - 1) * layout.pipeline
    return min(microbatches * layout.chunks, warmup + 1)


def layer_activations(
    job: Job,
    layout: Layout,
    element: int,
    program: Program,
    *,
    recompute: str,
    has_experts: bool = False,
) -> float:
    """Bytes that one layer keeps of a microbatch for backward (2205.05198 table 2).

    In units of an element of [s, b, h]: the inputs (residual stream) and outputs of both norms; `attention_elements`;
    the MLP's hidden layer before and after GELU; a byte for each dropout mask; without fused attention, the scores
    before and after dropout.
    """
    model, t = job.model, layout.tensor
    tokens, h = layout.tokens(job), model.hidden_size
    ranks = t if layout.sequence_parallel else 1
    residual = job.residual_element(element)
    if recompute == "full":
        return residual * tokens * h / ranks
    kept = input_bytes(job, element, program)
    width = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    ffn = width * (element * (2 if model.gated else 1) + kept) / t
    masks = 2 if model.hidden_dropout else 0
    replicated = tokens * h * (2 * residual + 2 * kept + masks) / ranks
    sharded = tokens * (element * attention_elements(model, t, latents_only=program.latent_recompute) + ffn)
    if has_experts:
        replicated += tokens * h * element * model.moe_shared_expert_gate / ranks
        routed = routed_activations(model, layout, element, program, kept)
        sharded += 0 if model.moe_layer_recompute else tokens / t * routed
    if program.fused_attention and recompute == "selective":
        return (replicated + sharded) * (1 - program.selective)
    if program.fused_attention or recompute == "selective":
        return replicated + sharded
    scores = layout.micro_batch_size * model.num_attention_heads * job.seq_length**2 / (t * layout.context)
    return replicated + sharded + scores * (2 * element + (1 if model.attention_dropout else 0))


def input_bytes(job: Job, element: int, program: Program) -> int:
    """Bytes of an element of a product's input that is kept for backward: FP8 products may keep it in FP8."""
    return 1 if job.fp8_format and program.fp8_inputs_kept else element


def routed_activations(
    model: ModelConfig, layout: Layout, element: int, program: Program, kept: int
) -> float:
    """Bytes that the router and the experts keep of a token.

    Of each row of an expert these are its input, the hidden layer before and after the activation and, where that is
    another operation, after its product with the router's weight, and indices and weights. The router keeps its scores
    in fp32. Inputs of products have `kept` bytes an element.
    """
    experts, topk, ffn = model.num_experts or 0, model.moe_router_topk, model.moe_ffn_hidden_size or 0
    fc1, products = (2 if model.gated else 1), any(program.weighted)
    hidden = (ffn / layout.expert_tensor) * (element * (fc1 + products) + kept)
    rows = topk * layout.expert_tensor
    exchanged = layout.expert * layout.expert_tensor > 1
    row = kept * model.hidden_size + hidden + (2 if exchanged else 1) * INDEX_BYTES
    weighted = model.moe_router_score_function == "sigmoid" or model.moe_router_pre_softmax
    losses = len([x for x in model.moe_aux_loss_coeff if x > 0])
    scores = weighted + (losses > 0) + losses + (2 if model.moe_z_loss_coeff is not None else 0)
    return rows * row + topk * WEIGHT_BYTES + experts * 4 * scores


def recomputed_experts(job: Job, layout: Layout, element: int, program: Program) -> float:
    """Bytes that backward needs for the experts of one layer beyond what layers keep.

    These are what --moe-layer-recompute recomputes, and with fully recomputed layers, which keep little themselves, the
    gradients of rows and of the hidden layer.
    """
    model, tokens = job.model, layout.tokens(job) / layout.tensor
    hidden = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor * (3 if model.gated else 2)
    rows = model.moe_router_topk * layout.expert_tensor
    kept = 0.0
    if model.moe_layer_recompute:
        kept = routed_activations(model, layout, element, program, input_bytes(job, element, program))
    gradients = element * rows * (2 * model.hidden_size + hidden) if layout.recompute == "full" else 0
    return tokens * (kept + gradients)


def attention_elements(model: ModelConfig, tensor: int, *, latents_only: bool = False) -> float:
    """Elements that attention keeps of a token on one of `tensor` ranks, except scores.

    These are the fused QKV projection's output, kept whole while a view of it is alive, and the weighted sums.
    """
    if model.multi_latent_attention:
        return latent_attention_elements(model, tensor, latents_only=latents_only)
    heads = model.num_attention_heads * model.kv_channels / tensor
    groups = model.kv_heads_per_rank(tensor)
    kv = groups * model.kv_channels
    kept = 2 * heads + 2 * kv
    copied = model.qk_layernorm or model.position_embedding_type == "rope"
    if copied:
        # New queries and keys, and the weighted sums both in the layout of these queries and in that of the output
        # projection's input.
        kept += 2 * heads + kv
    if 1 < groups < model.num_attention_heads / tensor and (model.qk_layernorm or not copied):
        kept += heads  # the queries of several groups, made contiguous
    return kept


def latent_attention_elements(model: ModelConfig, tensor: int, *, latents_only: bool = False) -> float:
    """`attention_elements` with latent attention. With `latents_only` backward recomputes what the latents give.

    These are the latents before and after their norms, the shared key, queries and keys, the output of the projection
    to keys and values, and the weighted sums, which the kernel writes as the output projection reads them.
    """
    heads = model.num_attention_heads / tensor
    latents = (2 if model.qk_layernorm else 1) * ((model.q_lora_rank or 0) + model.kv_lora_rank)
    projected = 0 if latents_only else 2 * model.kv_channels + model.qk_head_dim + model.v_head_dim
    return latents + model.qk_pos_emb_head_dim + heads * (projected + model.v_head_dim)


def rotary_bytes(job: Job, layout: Layout) -> float:
    """Bytes of RoPE's cosines and sines in fp32, which the layers of a chunk share for a microbatch."""
    rope = job.model.position_embedding_type == "rope"
    return 2 * 4 * layout.tokens(job) * job.model.rotary_channels if rope else 0


def chunk_activations(job: Job, layout: Layout, element: int, stage: int, program: Program) -> float:
    """Bytes that the layers of a chunk keep of a microbatch from forward to backward: the mean of a stage's chunks."""
    dense, experts = (
        sum(numbers) / layout.chunks for numbers in zip(*layout.layers(job)[stage], strict=True)
    )
    of_layer = functools.partial(layer_activations, job, layout, element, program, recompute=layout.recompute)
    kept = dense * of_layer()
    if experts:
        kept += experts * of_layer(has_experts=True)
    return kept + rotary_bytes(job, layout)


def stage_memory(job: Job, layout: Layout, cluster: Cluster, stage: int, program: Program) -> Memory:
    """Memory of each process of a stage at the peak of a step."""
    element = cluster.device.element
    parameters, owned = stage_parameters(job, layout, stage), owned_parameters(job, layout, stage)
    in_flight = max_in_flight(layout, layout.microbatches(job), stage)
    experts = sum(experts for _, experts in layout.layers(job)[stage])
    of_layer = functools.partial(layer_activations, job, layout, element, program)
    activations = in_flight * chunk_activations(job, layout, element, stage, program)
    if layout.recompute == "full":  # the layer being recomputed
        activations += of_layer(recompute="none", has_experts=experts > 0)
    working = recomputed_experts(job, layout, element, program) if experts else 0.0
    tokens = layout.tokens(job)
    hidden = tokens * job.model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    if stage == 0 and job.model.hidden_dropout:  # the embeddings' dropout masks (2205.05198 section 4.3)
        first = layout.pipeline if layout.chunks == 1 else 2 * layout.pipeline - 1
        activations += min(layout.microbatches(job), first) * hidden
    if stage == layout.pipeline - 1:
        residual = job.residual_element(element)
        activations += hidden * (residual + element)  # the final norm's input and output
        # Multi-token prediction: the embedding, both norms' outputs joined, the final norm's input and output, and
        # the gradient of that output. Its layers have one microbatch in flight.
        layer = of_layer(recompute=layout.recompute, has_experts=job.model.all_expert_layers[-1])
        others = in_flight / layout.chunks - 1
        activations += job.model.mtp_num_layers * (hidden * (residual + 5 * element) - others * layer)
        logits = tokens * job.padded_vocab_size(layout.tensor) / layout.tensor
        chunk, piece = logits, logits  # and a piece in fp32
        if program.chunked_logits:
            chunk = min(logits, LOGITS_CHUNK_BYTES["cuda"] / element)
            piece = min(logits, LOGITS_PIECE_BYTES["cuda"] / element)
        working = max(working, element * chunk + 4 * piece)  # the loss comes before backward of the layers
    activations += working
    weights = gradients = parameters
    if layout.sharded_parameters:  # of one layer all gradients, and the weights of this and the next
        layer = largest_layer(job, layout, stage)
        weights, gradients = owned + 2 * layer, owned + layer
    return Memory(
        weights=element * weights,
        gradients=program.gradient * gradients,
        master=0 if element == 4 else 4 * owned,
        moments=ADAM_MOMENTS * owned,
        activations=activations,
    )


def max_memory(job: Job, layout: Layout, cluster: Cluster, program: Program) -> Memory:
    """Memory of the stage that needs most: the first holds the most activations per layer, the last the logits."""
    return max(
        (stage_memory(job, layout, cluster, stage, program) for stage in layout.distinct_stages(job)),
        key=lambda memory: memory.total,
    )


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Return True if it fits the usable memory of a device."""
    return memory.total <= USABLE_MEMORY * cluster.device.memory
