"""Programs that the planner knows: the properties of an implementation that its time and memory depend on."""

from __future__ import annotations

import dataclasses

# Reads and writes of an element in memory: in forward, in backward.
Accesses = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Program:
    """Properties of an implementation that its time and memory depend on.

    `scores`, `residual`, `heads`, `mlp`, `logits`, `rows`, `regrouped` and `weighted` count reads and writes per
    element by element-wise operations: one that reads two tensors and writes one has 3.

    Attributes:
        fused_attention: scores never reach memory (FlashAttention).
        scores: accesses of an attention score, without fused attention.
        residual: accesses of an element of the residual stream: norms, dropout, additions.
        heads: accesses of an element of the attention heads: biases, transposes.
        rotary: accesses of an element of queries and keys by RoPE; with latent attention also of the values, which are
            written anew with the keys.
        qk_norm: those by QK normalization.
        mlp: accesses of an element of the MLP's hidden layer: bias and activation.
        rows: accesses of an element of the experts' inputs and outputs.
        regrouped: those of regrouping the rows of other ranks by expert.
        weighted: accesses of an element of the experts' hidden layer by the product with the router's weights.
        logits: accesses of a logit by the loss.
        chunked_logits: the loss and its gradients are computed together, by chunks of the logits.
        gradient: bytes of an element of a gradient when it is accumulated, and reduced without `reduced`.
        reduced: bytes of an element of a gradient when replicas reduce it, if others.
        whole_gradients: gradients are all-reduced even if the optimizer is sharded.
        blocking_transfers: a stage does not compute while it sends or receives.
        fp8_cast: accesses of an element of an FP8 product's operand, in elements of bf16, to convert it.
        expert_cast: the same for products of experts, if other: nothing is fused with these casts.
        fp8_weights_kept: weights are converted once a step, not for each microbatch.
        fp8_inputs_kept: FP8 products keep their inputs in FP8 for backward.
        selective: share of a layer's forward pass, and of what it keeps, that selective recomputation repeats with
            fused attention.
        stops_recomputing: full recomputation of a layer stops before its last product, whose output backward does not
            need (XLA, and torch's non-reentrant checkpoints since 2.1).
        keeps_queries: full recomputation keeps queries, keys and values and does not repeat their projections (not of
            latent attention).
        fp32_shards: sharded parameters are kept in fp32 only, as their own master weights.
        ring_joins: ring attention joins the parts of its output and gradients in fp32 by operations of their own.
        tensor_overlap: share of tensor-parallel communication that runs beside matrix products.
        latent_recompute: backward recomputes the up-projections of latent attention, of which only the latents are kept
            (mla_up_proj among the modules that NVIDIA's recipes recompute).
        module_recompute: backward recomputes norms and the experts' activation (layernorm and moe_act among these
            modules).
        expert_copies_once: a token is sent once to a rank that has several of its experts (DeepEP, HybridEP).
        expert_overlap: share of the all-to-alls of experts that runs beside other work.
        parameter_overlap: the distributed optimizer's parameters can be gathered during the next forward pass.
        compiled: layers are compiled as a whole.
        host: seconds that a process needs to start the kernels of a dense layer, and of one with experts, in forward
            and backward together. A GPU that is faster waits.
        pipeline_host: the same in a pipeline, if it differs.
        round_robin: tokens take the experts in turn, so all experts have the same number of rows.
        synchronous: seconds that it adds to a layer, where the host waits for the end of each kernel
            (CUDA_LAUNCH_BLOCKING=1).
        starved: time for which the GPU waits for the host in a layer with experts, over that of the layer's kernels,
            where the host waits for the numbers of rows and then starts the experts' kernels one by one.
    """

    fused_attention: bool
    scores: Accesses
    residual: Accesses
    heads: Accesses
    mlp: Accesses
    rows: Accesses
    regrouped: Accesses
    weighted: Accesses
    chunked_logits: bool
    gradient: int
    blocking_transfers: bool
    logits: Accesses = (10, 8)
    rotary: Accesses = (2, 2)
    qk_norm: Accesses = (2, 3)
    reduced: int | None = None
    whole_gradients: bool = False
    fp8_cast: float = 1.45
    expert_cast: float | None = None
    fp8_weights_kept: bool = False
    fp8_inputs_kept: bool = False
    selective: float = 0.0
    stops_recomputing: bool = False
    keeps_queries: bool = False
    fp32_shards: bool = False
    ring_joins: bool = True
    tensor_overlap: float = 0.0
    latent_recompute: bool = False
    module_recompute: bool = False
    expert_copies_once: bool = False
    expert_overlap: float = 0.0
    parameter_overlap: bool = False
    host: tuple[float, float] = (0.0, 0.0)
    pipeline_host: tuple[float, float] | None = None
    round_robin: bool = False
    synchronous: float = 0.0
    starved: float = 0.0
    compiled: bool = True


# Accesses as (forward; backward), as `tests/gpu_path/golden.py` counts them in a compiled layer of GPT-2 with dropout.
#
# Residual stream: norm (2; 4 with the residual's gradient), dropout with a mask of half an element, addition and second
# norm (4.5; 2.5 and 4), dropout and addition (3.5; 2.5). Heads: gradients of queries, keys and values into one matrix
# (6), its sum for the bias (3). MLP: GELU with bias (2; 3), with a gate 3 and 5 for one and a half elements. Logits:
# maximum and sum in one pass (1), then the gradient in their place (2). Rows of experts are read and written (2) and
# summed by token (2), read and written again to group them by expert (4), and multiplied by the router's weights (2;
# 4). FP8: 2.9 bytes, which torch.compile's kernels of a GPT-2 layer read and write more for each element of a product's
# operands; not fused these were 5: read for the maximum, read, write.
OURS = Program(
    fused_attention=True,
    scores=(0, 0),
    residual=(10, 13),
    heads=(0, 9),
    mlp=(2, 10 / 3),
    logits=(3, 0),
    rows=(4, 4),
    regrouped=(4, 4),
    weighted=(2, 4),
    chunked_logits=True,
    gradient=4,
    blocking_transfers=False,
    parameter_overlap=True,
)
# 2104.04473 section 4.2. The backward of a bias reads the gradient (1); that of splitting queries, keys and values
# writes them as one tensor (2 each). Scores: fused scale, mask and softmax (2; 3), dropout with a mask of half an
# element (2.5; 2.5). Residual stream, twice: norm (2; 3), fused bias, dropout and addition (3.5; 2.5 and 1), addition
# of the branch's gradient (3). Heads: bias (6; 3), transpose of the result (2; 2), split (6). MLP: GELU with bias (2; 3
# and 1). Logits: cast to fp32, maximum, exponentials and their sum (10); their product with the gradient, and a cast
# back (8). Gradients are fp16; transfers block.
NVIDIA_2021 = dataclasses.replace(
    OURS,
    fused_attention=False,
    scores=(4.5, 5.5),
    residual=(11, 19),
    heads=(8, 11),
    mlp=(2, 4),
    logits=(10, 8),
    chunked_logits=False,
    gradient=2,
    blocking_transfers=True,
    parameter_overlap=False,
)
# Megatron-DeepSpeed in fp16, as BLOOM's layouts were tuned with (bigscience-workshop/bigscience,
# train/tr11-176B-ml/chronicles-prequel.md). Whole gradients are all-reduced, though the optimizer is sharded: ZeRO
# stage 1 ignores contiguous_gradients, and without it reduces so (DeepSpeed 0.5.10, runtime/zero/stage_1_and_2.py).
# Runs on many nodes needed CUDA_LAUNCH_BLOCKING=1, which on 80 GPUs took the speed from 97.20 to 91.04 TFLOP/s: 14.5 s
# of a step of 521 microbatches in stages of 8 layers.
MEGATRON_DEEPSPEED_FP16 = dataclasses.replace(NVIDIA_2021, whole_gradients=True, synchronous=0.0035)
# The same in bf16, whose optimizer accumulates and reduces gradients in fp32 (there, "Rebalancing layers").
MEGATRON_DEEPSPEED_BF16 = dataclasses.replace(MEGATRON_DEEPSPEED_FP16, gradient=4)
# The implementation of 1909.08053, without those fusions. Scores: scale (2; 2), mask by a product and a difference
# (4; 2), softmax (2; 3), dropout (2.5; 2.5). Residual stream, twice: norm (2; 3), bias (2; 1), dropout (2.5; 2.5),
# addition (3; 3). Heads: bias (6; 3), transposes of queries, keys, values and result (8; 2), split (6). MLP: bias
# (2; 1), GELU (2; 3).
NVIDIA_2019 = dataclasses.replace(
    NVIDIA_2021, scores=(10.5, 9.5), residual=(19, 19), heads=(14, 11), mlp=(4, 4)
)
# Models without biases and dropout: norm (2; 3) and addition (3; 3) twice, no bias of queries, keys and values.
_NO_BIAS = dataclasses.replace(
    OURS,
    residual=(10, 12),
    heads=(2, 8),
    mlp=(2, 3),
    logits=(10, 8),
    chunked_logits=False,
    parameter_overlap=False,
)
# Megatron-Core with Transformer Engine as NVIDIA's recipes of 2025 run it: gradients in bf16, parameters gathered
# during forward, half of the tensor-parallel collectives beside products; corrections of a ring's outputs in few
# kernels, which are not counted; casts to FP8 within the kernels before, but those of experts' rows, which one kernel
# reads and writes in two layouts (4 bytes for two casts); the product with the router's weights within the activation.
# Recipes recompute the up-projections of latent attention. Without a capacity the host waits for the numbers of rows:
# 9 ms a layer, by a run whose GPU has a quarter of that to do. A GPU that has more to do still waits at the experts,
# which graphs of parts of a layer leave out: without that a run would be 10% faster (NVIDIA's guide "Optimizing
# DeepSeek-V3 Training Performance on NVIDIA GB200 NVL72", section 3.1).
MEGATRON_CORE_2025 = dataclasses.replace(
    _NO_BIAS,
    weighted=(0, 0),
    gradient=2,
    fp8_cast=0.5,
    expert_cast=1.0,
    fp8_weights_kept=True,
    fp8_inputs_kept=True,
    ring_joins=False,
    tensor_overlap=0.5,
    parameter_overlap=True,
    latent_recompute=True,
    host=(0.0, 0.009),
    starved=0.1,
)
# The same in the spring of 2025, from which NVIDIA's guide starts: kernels are started slower than a GPU runs them, at
# 494 TFLOP/s, which without the bubble are 35 ms for 4,096 tokens of a layer.
MEGATRON_CORE_SPRING_2025 = dataclasses.replace(MEGATRON_CORE_2025, host=(0.0, 0.035))
# The same on hosts with x86 processors. In a pipeline, where the host cannot run ahead over several microbatches, each
# layer of experts takes about 16 ms in every run whose GPU has less to do: Qwen3 30B and 235B on H100 and B300.
MEGATRON_CORE_2025_X86 = dataclasses.replace(MEGATRON_CORE_2025, pipeline_host=(0.0, 0.0156))
# The same from the summer of 2026: HybridEP, which groups rows by expert, fused grouped MLPs (cutedsl), and CUDA graphs
# of whole iterations.
MEGATRON_CORE = dataclasses.replace(
    MEGATRON_CORE_2025,
    regrouped=(0, 0),
    expert_cast=None,
    expert_copies_once=True,
    expert_overlap=0.6,
    host=(0.0, 0.0),
    starved=0.0,
)
# Sharded parameters (FSDP) in PyTorch. torchtitan's selective recomputation repeats every second product.
FSDP = dataclasses.replace(_NO_BIAS, selective=0.5, stops_recomputing=True, fp32_shards=True)
