"""Activations of the layers of a stage, of its transfers and of the loss, by formulas.

Names: b microbatch size, s sequence length, h hidden size, t tensor-parallel size.
"""

from __future__ import annotations

import functools

from megatron.model.config import ModelConfig
from megatron.model.flops import attention_linears
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES
from megatron.planner.host_copies import input_stays, leaving_bytes
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import Program

# Transfers that a stage has under way at once, as in megatron/parallel/transfers.py.
MAX_PENDING_SENDS = 4
INDEX_BYTES = 16  # of a row of an expert: its token, and the row of a token's copy
WEIGHT_BYTES = 4 + 8 + 4  # of a token's copy: its weight, its expert, and the weight of its row


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
        queries = attention_linears(model, t)[0][1] if program.keeps_queries else 0
        return tokens * (residual * h / ranks + element * queries / t)
    kept = input_bytes(job, element, program)
    width = (model.moe_shared_expert_intermediate_size or 0) if has_experts else model.ffn_hidden_size
    # Layers that are not compiled also keep the activation of the gate.
    hidden = (2 if model.gated else 1) + (model.gated and not program.compiled)
    ffn = width * (element * hidden + kept) / t
    masks = 2 if model.hidden_dropout else 0
    normed = 0 if program.module_recompute else 2 * kept
    inputs = 1 if model.use_parallel_residual else 2  # of the residual stream
    # Norms of the outputs of attention and MLP keep their inputs, too.
    after = 2 if model.sandwich_norm else 0
    replicated = tokens * h * (inputs * residual + after * element + normed + masks) / ranks
    sharded = tokens * (
        element * attention_elements(model, t, ranks, latents_only=program.latent_recompute) + ffn
    )
    if model.position_embedding_type == "rope" and not model.multi_latent_attention:
        # One of the two copies of the weighted sums is the output projection's input.
        sharded -= tokens * (element - kept) * model.num_attention_heads * model.kv_channels / t
    if has_experts:
        replicated += tokens * h * element * model.moe_shared_expert_gate / ranks
        routed = routed_activations(model, layout, element, program, kept)
        sharded += 0 if model.moe_layer_recompute else tokens / t * routed
    if program.fused_attention:
        # In fp32 the logarithm of each row's sum of exponentials, and statistics of the norms.
        sharded += 4 * tokens * model.num_attention_heads / t
        replicated += 4 * tokens * (2 + after) * (2 if model.normalization == "LayerNorm" else 1) / ranks
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
    activation = 0 if program.module_recompute else kept
    gate = model.gated and not program.compiled  # its activation
    hidden = (ffn / layout.expert_tensor) * (element * (fc1 + products + gate) + activation)
    rows = topk * layout.expert_tensor
    exchanged = layout.expert * layout.expert_tensor > 1
    row = kept * model.hidden_size + hidden + (2 if exchanged else 1) * INDEX_BYTES
    if model.add_expert_bias:  # that of the output, for the gradient of the router's weight
        row += element * model.hidden_size / layout.expert_tensor
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


def attention_elements(
    model: ModelConfig, tensor: int, ranks: int = 1, *, latents_only: bool = False
) -> float:
    """Elements that attention keeps of a token on one of `tensor` ranks, except scores; `ranks` divide the sequence.

    These are the fused QKV projection's output, kept whole while a view of it is alive, and the weighted sums.
    """
    if model.multi_latent_attention:
        return latent_attention_elements(model, tensor, ranks, latents_only=latents_only)
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


def latent_attention_elements(
    model: ModelConfig, tensor: int, ranks: int, *, latents_only: bool = False
) -> float:
    """`attention_elements` with latent attention. With `latents_only` backward recomputes what the latents give.

    These are the latents before and after their norms, the shared key, queries and keys, the output of the projection
    to keys and values, and the weighted sums, which the kernel writes as the output projection reads them.
    """
    heads = model.num_attention_heads / tensor
    latents = (2 if model.qk_layernorm else 1) * ((model.q_lora_rank or 0) + model.kv_lora_rank)
    projected = 0 if latents_only else 2 * model.kv_channels + model.qk_head_dim + model.v_head_dim
    return latents / ranks + model.qk_pos_emb_head_dim + heads * (projected + model.v_head_dim)


def rotary_bytes(job: Job, layout: Layout) -> float:
    """Bytes of RoPE's cosines and sines in fp32, which the layers of a chunk share for a microbatch."""
    rope = job.model.position_embedding_type == "rope"
    return 2 * 4 * layout.tokens(job) * job.model.rotary_channels if rope else 0


def chunk_activations(
    job: Job, layout: Layout, element: int, stage: int, chunk: int, program: Program
) -> float:
    """Bytes that the layers of a chunk keep on the device of a microbatch from forward to backward."""
    kept = layers_keep(job, layout, element, stage, chunk, program)
    kept -= leaving_bytes(job, layout, stage, chunk, kept)
    if input_stays(job, layout, stage, chunk):
        hidden = layout.tokens(job) * job.model.hidden_size
        kept += job.residual_element(element) * hidden / (layout.tensor if layout.sequence_parallel else 1)
    return kept + rotary_bytes(job, layout)


def layers_keep(job: Job, layout: Layout, element: int, stage: int, chunk: int, program: Program) -> float:
    """Bytes that the layers of a chunk keep of a microbatch, on the device and in host memory."""
    dense, experts = layout.layers(job)[stage][chunk]
    of_layer = functools.partial(layer_activations, job, layout, element, program, recompute=layout.recompute)
    if layout.recompute == "full":
        return len(recomputed_groups(job, layout, stage, chunk)) * of_layer()
    return dense * of_layer() + (experts * of_layer(has_experts=True) if experts else 0.0)


def recomputed_groups(job: Job, layout: Layout, stage: int, chunk: int) -> list[int]:
    """Numbers of layers of a chunk that full recomputation recomputes at a time, first to last.

    Layers of multi-token prediction are recomputed one at a time.
    """
    alone = job.model.mtp_num_layers if layout.is_last(stage, chunk) else 0
    whole, rest = divmod(sum(layout.layers(job)[stage][chunk]) - alone, layout.recompute_layers)
    return [layout.recompute_layers] * whole + [rest] * (rest > 0) + [1] * alone


def recomputed_together(job: Job, layout: Layout, stage: int) -> tuple[int, int, int]:
    """Numbers of layers that backward recomputes together.

    Returns:
        The layers of the first group in backward; those of the largest group after it; and after how many groups the
        first such one comes.
    """
    if layout.recompute != "full":
        return 1, 1, 1
    chunks = (recomputed_groups(job, layout, stage, chunk) for chunk in range(layout.chunks))
    *later, first = max(chunks, key=sum) or [1]
    largest = max(later, default=1)
    return first, largest, later[::-1].index(largest) + 1 if later else 1


def leaving_activations(
    job: Job, layout: Layout, element: int, stage: int, chunk: int, program: Program
) -> float:
    """Bytes of a microbatch that a chunk copies to host memory."""
    kept = layers_keep(job, layout, element, stage, chunk, program)
    return leaving_bytes(job, layout, stage, chunk, kept)


def waiting_bytes(job: Job, layout: Layout, element: int, stage: int, chunk: int) -> float:
    """Bytes that a chunk keeps of a microbatch from a split backward pass to its weight gradients.

    These are the inputs of its linear layers, gathered along the sequence, and the gradients of their outputs. Grouped
    products of experts do not wait.
    """
    model, t, tokens = job.model, layout.tensor, layout.tokens(job)
    dense, experts = layout.layers(job)[stage][chunk]
    *before, (inputs, h, _) = attention_linears(model, t)
    attention = tokens * (inputs / t + h)
    for inputs, outputs, split in before:
        rows = tokens if split or not layout.sequence_parallel else tokens / t
        attention += rows * (inputs + outputs / (t if split else 1))

    def mlp(rows: float, ffn: float) -> float:
        return rows * (2 * h + ffn * (3 if model.gated else 2))

    total = (dense + experts) * attention + dense * mlp(tokens, model.ffn_hidden_size / t)
    if experts:
        total += (
            experts
            * mlp(tokens, (model.moe_shared_expert_intermediate_size or 0) / t)
            * (model.moe_shared_expert_intermediate_size is not None)
        )
        if not model.moe_grouped_gemm:
            rows = tokens / t * model.moe_router_topk * layout.expert_tensor
            total += experts * mlp(rows, (model.moe_ffn_hidden_size or 0) / layout.expert_tensor)
    return element * total


def backward_of_a_layer(job: Job, layout: Layout, element: int) -> float:
    """Bytes of the gradients with which backward of a dense layer begins.

    The gradient of the output, gathered along the sequence, and of the activation function's output; then those of its
    output and its input. The kept activations are all still there, except the input of a norm of the MLP's output; a
    split backward pass keeps the input and the output's gradient of the last product, too. Recomputation of a layer
    ends with the gradient, the MLP's output and the layer's.
    """
    model, tokens, t = job.model, layout.tokens(job), layout.tensor
    whole, ffn = tokens * model.hidden_size, tokens * model.ffn_hidden_size / t
    local = whole / t if layout.sequence_parallel else whole
    gathered = whole if layout.sequence_parallel else 0.0
    freed = local if model.sandwich_norm and not layout.splits_backward else 0.0
    working = element * max(gathered + ffn, ffn * (1 + model.gated + layout.splits_backward) - freed)
    residual = job.residual_element(element) * local
    if layout.recompute == "full":
        working = max(working, residual + element * local)
    return residual + working


def ring_working(job: Job, layout: Layout, element: int, program: Program) -> float:
    """Bytes that backward of ring attention needs beside what a dense layer keeps, whose MLP's are free by then.

    Counted on `megatron/context_parallel/attention.py`: sums of the gradients of keys and values in fp32, of which one
    is computed, one leaves and one arrives; keys and values joined, in use and arriving; the gradients of queries in
    fp32, and those of a block; and that of the output and of the residual stream. 0 without a ring.
    """
    model, t = job.model, layout.tensor
    if layout.context == 1 or layout.context_exchange != "p2p" or model.multi_latent_attention:
        return 0.0
    queries = model.num_attention_heads * model.kv_channels / t
    pairs = 2 * model.kv_heads_per_rank(t) * model.kv_channels
    hidden = model.hidden_size / (t if layout.sequence_parallel else 1)
    kept = input_bytes(job, element, program)
    ffn = model.ffn_hidden_size / t * (element * (2 if model.gated else 1) + kept)
    used = (3 * 4 + 3 * element) * pairs + (4 + 2 * element) * queries + element * hidden
    return layout.tokens(job) * (used - ffn - kept * hidden)


def experts_working(job: Job, layout: Layout, element: int, program: Program) -> float:
    """Bytes that a layer with experts needs beside what it keeps, in this program.

    Counted on the module (`megatron/model/moe`): backward begins with the gradient of the output, all kept. Then there
    are gradients of the hidden layer: of its product with the router's weights, and that product's two; or of the rows
    and of one hidden layer, once more of the rows if they came from other ranks. In forward, the rows of output, those
    gathered to be summed, and the sum, and for other ranks what came and what goes back; less is under way between
    stages. Recomputation has the gradient of the output in forward, too, and --moe-layer-recompute beside both what it
    recomputed.
    """
    model, tokens = job.model, layout.tokens(job)
    hidden = tokens * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    rows = tokens / layout.tensor * model.moe_router_topk * layout.expert_tensor
    row, ffn = rows * model.hidden_size, rows * (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    waits = layout.splits_backward and not model.moe_grouped_gemm
    exchanged = layout.expert * layout.expert_tensor > 1
    biases = (3 + exchanged) * row * model.add_expert_bias
    backward = hidden + max((2 + waits) * ffn, (1 + exchanged) * row + ffn, biases)
    forward = (4 if exchanged else 2) * row + (hidden if layout.pipeline == 1 else -hidden)
    if model.moe_layer_recompute or layout.recompute == "full":
        forward += hidden
    if not model.moe_layer_recompute:
        return element * max(backward, forward)
    inputs = input_bytes(job, element, program)
    kept = tokens / layout.tensor * routed_activations(model, layout, element, program, inputs)
    return kept + element * max(backward, forward)


def dense_after_experts(job: Job, layout: Layout, stage: int) -> int:
    """Dense layers of a stage after its last layer with experts, which are freed when backward reaches that one."""
    if layout.v_shaped:
        return 0
    sizes = layout.layers(job)
    parts = [sum(sizes[s][chunk]) for chunk in range(layout.chunks) for s in range(layout.pipeline)]
    part = (layout.chunks - 1) * layout.pipeline + stage
    pattern = job.model.all_expert_layers[sum(parts[:part]) : sum(parts[: part + 1])]
    return pattern[::-1].index(True) if any(pattern) else 0


def transfer_buffers(job: Job, layout: Layout, element: int) -> float:
    """Bytes of what a stage has received and of what it still sends."""
    if layout.pipeline == 1:
        return 0.0
    hidden = layout.tokens(job) * job.model.hidden_size * job.residual_element(element)
    buffers = MAX_PENDING_SENDS + (1 if layout.chunks == 1 else 2)
    return buffers * hidden / (layout.tensor if layout.sequence_parallel else 1)


def loss_working(job: Job, layout: Layout, element: int, program: Program) -> float:
    """Bytes that the output layer and the loss need.

    These are the logits, the input, gathered along the sequence, and its gradient, whole and reduced; layers that are
    not compiled have pieces in fp32, too.
    """
    tokens = layout.tokens(job)
    logits = tokens * job.padded_vocab_size(layout.tensor) / layout.tensor
    if not program.chunked_logits:
        return (element + 4) * logits
    chunk = min(logits, LOGITS_CHUNK_BYTES["cuda"] / element)
    piece = 0.0 if program.compiled else 2 * 4 * min(logits, LOGITS_PIECE_BYTES["cuda"] / element)
    hidden = (3 if layout.sequence_parallel else 2) * tokens * job.model.hidden_size
    return element * (chunk + hidden) + piece
