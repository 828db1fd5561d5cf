"""What each stage of a layout keeps in memory, by formulas.

Names: b microbatch, s sequence, h hidden, t tensor-parallel processes.
"""

from __future__ import annotations

import dataclasses

from megatron.model.config import ModelConfig
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout, Program

# Of a device's memory, what a model can have: the rest is the driver's, the communication library's buffers and
# what an allocator cannot use between tensors.
USABLE = 0.92
ADAM_MOMENTS = 8  # bytes of a parameter's two means in fp32
LOGITS_AT_ONCE = 1 << 28  # bytes, as of ops/projected_loss.py on a GPU, where they are not kept


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that one process keeps, by kind; of activations the most at a time."""

    weights: float
    gradients: float
    master: float
    moments: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments + self.activations


def layer_parameters(job: Job, tensor: int) -> float:
    """Of one layer on one of `tensor` processes."""
    model = job.model
    h, heads = model.hidden_size, model.num_attention_heads * model.kv_channels
    # Of fewer groups than processes each holds all.
    groups = model.num_query_groups
    keys = 2 * groups * model.kv_channels * (1 if groups >= tensor else tensor)
    fc1, f = model.ffn_hidden_size * (2 if model.swiglu else 1), model.ffn_hidden_size
    divided = h * (heads + keys) + heads * h + h * fc1 + f * h
    whole = 2 * h * (2 if model.normalization == "LayerNorm" else 1)
    if model.add_bias_linear or model.add_qkv_bias:
        divided += heads + keys
    if model.add_bias_linear:
        divided += fc1
        whole += 2 * h
    if model.qk_layernorm:
        whole += 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1)
    return divided / tensor + whole


def end_parameters(job: Job, tensor: int, *, first: bool, last: bool) -> float:
    """Of the embeddings, if `first`, and of the final normalisation and output layer, if `last`, on one process."""
    model, table = job.model, job.padded_vocab_size(tensor) / tensor * job.model.hidden_size
    found = 0.0
    if first:
        found += table
        if model.position_embedding_type == "learned_absolute":
            found += model.max_position_embeddings * model.hidden_size
    if last:
        found += model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
        if not first or model.untie_embeddings_and_output_weights:
            found += table
    return found


def stage_parameters(job: Job, layout: Layout, stage: int) -> float:
    """Of a stage, on one of its tensor-parallel processes."""
    layers = layout.layers_per_chunk(job) * layout.chunks
    ends = end_parameters(job, layout.tensor, first=stage == 0, last=stage == layout.pipeline - 1)
    return layers * layer_parameters(job, layout.tensor) + ends


def model_parameters(job: Job) -> float:
    """Of the whole model: for GPT-2's shape equation 2 of 2104.04473, with the final normalisation."""
    return job.model.num_layers * layer_parameters(job, 1) + end_parameters(job, 1, first=True, last=True)


def held_chunks(layout: Layout, microbatches: int, stage: int) -> int:
    """Forwards whose backward is still to come, at most: that of `parallel.schedules`' lists (2104.04473 section
    2.2)."""
    after = layout.pipeline - stage - 1
    warmup = after if layout.chunks == 1 else 2 * after + (layout.chunks - 1) * layout.pipeline
    return min(microbatches * layout.chunks, warmup + 1)


def layer_activations(job: Job, layout: Layout, element: int, program: Program, *, recompute: str) -> float:
    """Bytes that one layer keeps of a microbatch for backward: 2205.05198 table 2.

    In units of one element of [s, b, h]: both normalisations' inputs, which are the residual stream, and outputs;
    `attention_elements`; the MLP's middle before and after GELU; a byte for each mask of dropout; without fused
    attention scores before and after dropout.
    """
    model, t = job.model, layout.tensor
    tokens, h = layout.micro_batch_size * job.seq_length, model.hidden_size
    divided = t if layout.sequence_parallel else 1
    residual = job.residual_element(element)
    if recompute == "full":
        return residual * tokens * h / divided
    middle = model.ffn_hidden_size * (3 if model.swiglu else 2) / t
    masks = 2 if model.hidden_dropout else 0
    stream = tokens * h * (2 * residual + 2 * element + masks) / divided
    inside = element * tokens * (attention_elements(model, t) + middle)
    if program.fused_attention or recompute == "selective":
        return stream + inside
    scores = layout.micro_batch_size * model.num_attention_heads * job.seq_length**2 / t
    return stream + inside + scores * (2 * element + (1 if model.attention_dropout else 0))


def attention_elements(model: ModelConfig, tensor: int) -> float:
    """What attention keeps of a token on one of `tensor` processes, beside scores: what the projection to queries, keys
    and values gives, whole as long as one of them refers to it, and the weighted sums."""
    heads = model.num_attention_heads * model.kv_channels / tensor
    groups = max(model.num_query_groups / tensor, 1)
    keys = groups * model.kv_channels
    kept = 2 * heads + 2 * keys
    changed = model.qk_layernorm or model.position_embedding_type == "rope"
    if changed:
        # New queries and keys; and the sums, in the order of those queries, once more in that of the next product.
        kept += 2 * heads + keys
    if 1 < groups < model.num_attention_heads / tensor and (model.qk_layernorm or not changed):
        kept += heads  # the queries of several groups, put together
    return kept


def stage_memory(job: Job, layout: Layout, cluster: Cluster, stage: int, program: Program) -> Memory:
    """What each process of a stage keeps, at the peak of a step."""
    element = cluster.device.element
    parameters = stage_parameters(job, layout, stage)
    owned = parameters / (layout.data if layout.distributed_optimizer else 1)
    held = held_chunks(layout, layout.microbatches(job), stage) * layout.layers_per_chunk(job)
    kept = layer_activations(job, layout, element, program, recompute=layout.recompute)
    activations = held * kept
    if layout.recompute == "full":  # and the layer that is computed again
        activations += layer_activations(job, layout, element, program, recompute="none")
    if stage == 0:
        # Or when a chunk is through backward: the gradient of the embeddings, summed in fp32 and then rounded.
        table = job.padded_vocab_size(layout.tensor) / layout.tensor * job.model.hidden_size
        others = (held - layout.layers_per_chunk(job)) * kept
        activations = max(activations, others + (4 if element == 4 else 4 + element) * table)
    tokens = layout.micro_batch_size * job.seq_length
    if stage == 0 and job.model.hidden_dropout:  # the embeddings' masks (2205.05198 section 4.3)
        first = layout.pipeline if layout.chunks == 1 else 2 * layout.pipeline - 1
        divided = layout.tensor if layout.sequence_parallel else 1
        activations += min(layout.microbatches(job), first) * tokens * job.model.hidden_size / divided
    if stage == layout.pipeline - 1:
        logits = tokens * job.padded_vocab_size(layout.tensor) / layout.tensor
        kept = logits * element <= program.kept_logits
        activations += logits * (element + 4) if kept else LOGITS_AT_ONCE
    return Memory(
        weights=element * parameters,
        gradients=program.gradient * parameters,
        master=0 if element == 4 else 4 * owned,
        moments=ADAM_MOMENTS * owned,
        activations=activations,
    )


def most_memory(job: Job, layout: Layout, cluster: Cluster, program: Program) -> Memory:
    """That of the stage that keeps the most: the first holds the most activations, the last the logits."""
    stages = {0, layout.pipeline - 1}
    return max((stage_memory(job, layout, cluster, p, program) for p in stages), key=lambda m: m.total)


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Whether a device holds it."""
    return memory.total <= USABLE * cluster.device.memory
