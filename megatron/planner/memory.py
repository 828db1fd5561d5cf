"""Memory of each pipeline stage of a layout, by formulas.

Names: b microbatch size, s sequence length, h hidden size, t tensor-parallel size. The optimizer is AdamW.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from megatron.model.config import ModelConfig
from megatron.model.flops import attention_linears
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES
from megatron.parallel.schedules import BackwardWeight
from megatron.planner.cluster import Cluster
from megatron.planner.held import UNLIMITED, Held, Pass, counted_microbatches, most_held
from megatron.planner.host_copies import (
    USABLE_HOST,
    leaving_bytes,
    leaving_layers,
    piece_bytes,
    returned_layers,
)
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import (
    owned_parameters,
    stage_parameters,
)
from megatron.planner.programs import Program
from megatron.planner.split_passes import ChunkMemory, peak
from megatron.planner.units import sharded_units

# Share of a device's memory that a model can use. The rest is for the driver, NCCL's buffers and fragmentation.
USABLE_MEMORY = 0.92
# Transfers that a stage has under way at once, as in megatron/parallel/transfers.py.
MAX_PENDING_SENDS = 4
ADAM_MOMENTS = 8  # bytes per parameter: two means in fp32
BACKUP = 16  # and of post-validation's copy: those means, the weight and its gradient
INDEX_BYTES = 16  # of a row of an expert: its token, and the row of a token's copy
WEIGHT_BYTES = 4 + 8 + 4  # of a token's copy: its weight, its expert, and the weight of its row


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one process by purpose; `activations` at their peak.

    Attributes:
        backup: copies of what an update changes, for post-validation.
        host: bytes in host memory, which `total` excludes.
    """

    weights: float
    gradients: float
    master: float
    moments: float
    activations: float
    backup: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments + self.activations + self.backup


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
    # Layers that are not compiled also keep the activation of the gate.
    hidden = (2 if model.gated else 1) + (model.gated and not program.compiled)
    ffn = width * (element * hidden + kept) / t
    masks = 2 if model.hidden_dropout else 0
    normed = 0 if program.module_recompute else 2 * kept
    replicated = tokens * h * (2 * residual + normed + masks) / ranks
    sharded = tokens * (element * attention_elements(model, t, latents_only=program.latent_recompute) + ffn)
    if has_experts:
        replicated += tokens * h * element * model.moe_shared_expert_gate / ranks
        routed = routed_activations(model, layout, element, program, kept)
        sharded += 0 if model.moe_layer_recompute else tokens / t * routed
    if program.fused_attention:
        # In fp32 the logarithm of each row's sum of exponentials, and statistics of both norms.
        sharded += 4 * tokens * model.num_attention_heads / t
        replicated += 4 * tokens * 2 * (2 if model.normalization == "LayerNorm" else 1) / ranks
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


def chunk_activations(
    job: Job, layout: Layout, element: int, stage: int, chunk: int, program: Program
) -> float:
    """Bytes that the layers of a chunk keep on the device of a microbatch from forward to backward."""
    kept = layers_keep(job, layout, element, stage, chunk, program)
    return kept - leaving_bytes(job, layout, stage, chunk, kept) + rotary_bytes(job, layout)


def layers_keep(job: Job, layout: Layout, element: int, stage: int, chunk: int, program: Program) -> float:
    """Bytes that the layers of a chunk keep of a microbatch, on the device and in host memory."""
    dense, experts = layout.layers(job)[stage][chunk]
    of_layer = functools.partial(layer_activations, job, layout, element, program, recompute=layout.recompute)
    return dense * of_layer() + (experts * of_layer(has_experts=True) if experts else 0.0)


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


def kept_activations(
    job: Job, layout: Layout, element: int, stage: int, program: Program
) -> tuple[float, float, float]:
    """Bytes that a stage keeps of its microbatches, and how many it holds of the first and of the last chunk."""
    chunks = range(layout.chunks)
    of_chunk = [chunk_activations(job, layout, element, stage, chunk, program) for chunk in chunks]
    waiting = [
        waiting_bytes(job, layout, element, stage, chunk) if layout.splits_backward else 0.0
        for chunk in chunks
    ]
    kept, first, last = most_kept(job, layout, stage, of_chunk, waiting)
    # With 1F1B and interleaving the layers of multi-token prediction have one microbatch in flight.
    mtp = job.model.mtp_num_layers if layout.schedule_name in ("1f1b", "interleaved") else 0
    if stage == layout.last_stage and mtp:
        experts = job.model.all_expert_layers[-1]
        layer = layer_activations(
            job, layout, element, program, recompute=layout.recompute, has_experts=experts
        )
        in_flight = max_in_flight(layout, layout.microbatches(job), stage)
        kept -= mtp * (in_flight / layout.chunks - 1) * layer
    return kept, first, last


def most_kept(
    job: Job, layout: Layout, stage: int, of_chunk: list[float], waiting: list[float]
) -> tuple[float, float, float]:
    """The most bytes that a stage keeps at once, and how many microbatches it then holds of the first and last chunk.

    The interleaved schedule has many passes; its numbers follow from a formula, as those of 1F1B do.

    Args:
        of_chunk, waiting: bytes of each chunk of a microbatch from forward to backward, and from there to its weight
            gradients.
    """
    m = layout.microbatches(job)
    if layout.schedule_name in ("1f1b", "interleaved"):
        in_flight = max_in_flight(layout, m, stage)
        first = layout.pipeline if layout.chunks == 1 else 2 * layout.pipeline - 1
        return in_flight * sum(of_chunk) / layout.chunks, min(m, first), 1
    if layout.schedule_name in UNLIMITED:
        return m * sum(of_chunk), m, m
    of_kind = [*of_chunk, *waiting]

    def kept_at(moment: Sequence[int]) -> float:
        return sum(number * bytes_ for number, bytes_ in zip(moment, of_kind, strict=True))

    # With the microbatch of the pass that runs.
    chunks = layout.chunks
    moments = []
    for (kind, chunk), held in split_moments(job, layout, stage):
        own = chunk + (chunks if kind is BackwardWeight else 0)
        moments.append([number + (i == own) for i, number in enumerate(held)])
    most = max(moments, key=kept_at)
    return kept_at(most), most[0], most[chunks - 1]


def split_moments(job: Job, layout: Layout, stage: int) -> tuple[tuple[Pass, Held], ...]:
    """The most that a stage holds in a pass, with a schedule that splits backward passes."""
    m = counted_microbatches(layout.schedule_name, layout.pipeline, layout.microbatches(job))
    return most_held(layout.schedule(job), layout.pipeline, layout.chunks, m, stage)


def backward_of_a_layer(job: Job, layout: Layout, element: int) -> float:
    """Bytes of the gradients with which backward of a dense layer begins.

    The gradient of the output, gathered along the sequence, and of the activation function's output; then those of its
    output and its input. The kept activations are all still there; a split backward pass keeps the input of the last
    product, too.
    """
    model, tokens, t = job.model, layout.tokens(job), layout.tensor
    whole, ffn = tokens * model.hidden_size, tokens * model.ffn_hidden_size / t
    local = whole / t if layout.sequence_parallel else whole
    gathered = whole if layout.sequence_parallel else 0.0
    return element * (local + max(gathered + ffn, ffn * (1 + model.gated + layout.splits_backward)))


def experts_working(job: Job, layout: Layout, element: int, program: Program) -> float:
    """Bytes that a layer with experts needs beside what it keeps, in this program.

    In backward these are gradients of the hidden layer: of its product with the router's weights, and that product's
    two; or of the rows, in and out, and of one hidden layer. In forward, the outputs of the rows before and after they
    go back, what came, and their sum's terms, with less under way between stages. What
    --moe-layer-recompute recomputes is there when the rows' gradients are not.
    """
    model, tokens = job.model, layout.tokens(job)
    hidden = tokens * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    rows = tokens / layout.tensor * model.moe_router_topk * layout.expert_tensor
    row, ffn = rows * model.hidden_size, rows * (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    waits = layout.splits_backward and not model.moe_grouped_gemm
    backward = hidden + max((2 + waits) * ffn, 2 * row + ffn)
    forward = (4 if layout.expert * layout.expert_tensor > 1 else 2) * row - hidden
    kept = 0.0
    if model.moe_layer_recompute:
        inputs = input_bytes(job, element, program)
        kept = tokens / layout.tensor * routed_activations(model, layout, element, program, inputs)
    return max(kept, element * backward, element * forward)


def transfer_buffers(job: Job, layout: Layout, element: int) -> float:
    """Bytes of what a stage has received and of what it still sends."""
    if layout.pipeline == 1:
        return 0.0
    hidden = layout.tokens(job) * job.model.hidden_size * job.residual_element(element)
    buffers = MAX_PENDING_SENDS + (1 if layout.chunks == 1 else 2)
    return buffers * hidden / (layout.tensor if layout.sequence_parallel else 1)


def stage_memory(job: Job, layout: Layout, cluster: Cluster, stage: int, program: Program) -> Memory:
    """Memory of each process of a stage at the peak of a step."""
    element = cluster.device.element
    kept, first, last = kept_activations(job, layout, element, stage, program)
    experts = sum(experts for _, experts in layout.layers(job)[stage])
    of_layer = functools.partial(layer_activations, job, layout, element, program)
    activations = kept
    working = recomputed_experts(job, layout, element, program) if experts else 0.0
    # Transfers and gradients within a layer are known of this program only.
    if program.chunked_logits:
        activations += transfer_buffers(job, layout, element)
        if experts:
            working = experts_working(job, layout, element, program)
        else:
            working = backward_of_a_layer(job, layout, element)
    if layout.recompute == "full":  # the layer being recomputed, whose input is kept
        working += of_layer(recompute="none", has_experts=experts > 0) - of_layer(recompute="full")
    tokens = layout.tokens(job)
    hidden = tokens * job.model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    if stage == 0 and job.model.hidden_dropout:  # the embeddings' dropout masks (2205.05198 section 4.3)
        activations += first * hidden
    chunks = range(layout.chunks)
    leaving = [leaving_activations(job, layout, element, stage, chunk, program) for chunk in chunks]
    held = 0.0
    if any(leaving):
        held, _, _ = most_kept(job, layout, stage, leaving, [0.0 for _ in chunks])
        number = sum(leaving_layers(job, layout, stage, chunk)[1] for chunk in chunks)
        working += returned_layers(job, layout, stage, held / sum(leaving)) * sum(leaving) / number
    in_layer = working
    units = sharded_units(job, layout, stage, element, program)
    layer = of_layer(recompute=layout.recompute, has_experts=experts > 0)
    microbatch = sum(
        chunk_activations(job, layout, element, stage, chunk, program) for chunk in range(layout.chunks)
    )
    working = max(
        working + units.first_backward, working + units.backward - layer, units.forward - microbatch
    )
    if stage == layout.last_stage:
        residual = job.residual_element(element)
        # The final norm's input, and its output or, after the loss, the output's gradient.
        activations += hidden * (residual + element) * last
        # Multi-token prediction: the embedding, both norms' outputs joined, the final norm's input and output, and
        # the gradient of that output.
        activations += job.model.mtp_num_layers * hidden * (residual + 5 * element)
        # The loss comes before backward of the layers.
        working = max(working, loss_working(job, layout, element, program) + units.loss, units.after_loss)
    activations += working
    if layout.splits_backward:
        activations = split_activations(job, layout, element, stage, program, in_layer)
    state = stage_state(job, layout, element, stage, program)
    return dataclasses.replace(state, activations=activations, host=state.host + held)


def split_activations(
    job: Job, layout: Layout, element: int, stage: int, program: Program, working: float
) -> float:
    """The most bytes of a stage's activations with a schedule that splits backward passes.

    Args:
        working: bytes that backward of a layer needs beside what layers keep.
    """
    model, residual = job.model, job.residual_element(element)
    tokens, ranks = layout.tokens(job), layout.tensor if layout.sequence_parallel else 1
    hidden = tokens * model.hidden_size / ranks
    memory = []
    for chunk, layers in enumerate(layout.layers(job)[stage]):
        kept = chunk_activations(job, layout, element, stage, chunk, program)
        waiting = waiting_bytes(job, layout, element, stage, chunk)
        of_layer = layer_activations(
            job, layout, element, program, recompute=layout.recompute, has_experts=layers[1] > 0
        )
        # The sum of a layer's residual stream and its last product.
        forward = 2 * residual * hidden
        if layout.recompute == "full":  # of the layer that runs; after it only the sum is left
            ffn = tokens * model.ffn_hidden_size / layout.tensor
            forward += element * ffn * (4 if model.gated else 2)
        if layout.is_first(stage, chunk) and model.hidden_dropout:
            kept += hidden
        if layout.is_last(stage, chunk):
            kept += (residual + element) * hidden
            forward = max(forward, loss_working(job, layout, element, program))
        layer = (of_layer, waiting / max(1, sum(layers)))
        memory.append(
            ChunkMemory.make(kept=kept, waiting=waiting, layer=layer, working=working, forward=forward)
        )
    activations = transfer_buffers(job, layout, element) + peak(split_moments(job, layout, stage), memory)
    if stage == layout.last_stage:
        activations += model.mtp_num_layers * hidden * (residual + 5 * element)
    return activations


def state_bytes(element: int) -> int:
    """Bytes of a parameter's optimizer state: its moments, and its master weight unless the weight is in fp32."""
    return ADAM_MOMENTS + (0 if element == 4 else 4)


def stage_state(job: Job, layout: Layout, element: int, stage: int, program: Program) -> Memory:
    """Memory of each process of a stage without activations."""
    owned = owned_parameters(job, layout, stage)
    weights = gradients = stage_parameters(job, layout, stage)
    if layout.sharded_gradients or layout.sharded_parameters:
        gradients = owned
    if layout.sharded_parameters:
        weights = owned
    moments, host = ADAM_MOMENTS * owned, 0.0
    master = state_bytes(element) * owned - moments
    if layout.offload_optimizer:
        host = master + moments
        master, moments = 0.0, piece_bytes(job, layout, stage, host)
    return Memory(
        weights=element * weights,
        gradients=program.gradient * gradients,
        master=master,
        moments=moments,
        activations=0.0,
        backup=BACKUP * owned if layout.post_validation else 0.0,
        host=host,
    )


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


def max_memory(job: Job, layout: Layout, cluster: Cluster, program: Program) -> Memory:
    """Memory of the stage that needs most: the first holds the most activations per layer, the last the logits.

    Host memory is that of the stage that needs most of it.
    """
    stages = [stage_memory(job, layout, cluster, stage, program) for stage in layout.distinct_stages(job)]
    largest = max(stages, key=lambda memory: memory.total)
    return dataclasses.replace(largest, host=max(memory.host for memory in stages))


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Return True if it fits the usable memory of a device, and that of its share of the host."""
    host = cluster.host.memory
    return memory.total <= USABLE_MEMORY * cluster.device.memory and (
        host is None or memory.host <= USABLE_HOST * host
    )
