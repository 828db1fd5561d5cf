"""Flags of forks of Megatron-LM: Megatron-DeepSpeed, BigScience's and epfLLM's."""

from __future__ import annotations

from megatron.interop.nvidia.flag_table import NvidiaFlag, accept, refuse, rename

FORK_FLAGS: tuple[NvidiaFlag, ...] = (
    *accept(
        "DeepSpeed is not used; --use-distributed-optimizer shards the optimizer state",
        "--deepspeed",
        "--zero-stage N",
        "--zero-reduce-scatter",
        "--zero-contigious-gradients",
        "--zero-reduce-bucket-size N",
        "--zero-allgather-bucket-size N",
        "--remote-device NAME",
        "--use-pin-memory",
        "--cpu-optimizer",
        "--cpu_torch_adam",
    ),
    *refuse(
        "not read; give its batch sizes, precision and clipping as flags instead",
        "--deepspeed_config FILE",
    ),
    *accept(
        "use --recompute-granularity",
        "--deepspeed-activation-checkpointing",
        "--partition-activations",
        "--contigious-checkpointing",
        "--checkpoint-in-cpu",
        "--synchronize-each-layer",
        "--profile-backward",
    ),
    *accept("use --pipeline-model-parallel-size for more than one stage", "--no-pipeline-parallel"),
    *accept(
        "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        "--pp-partition-method TEXT",
    ),
    *accept("replicated parameters are always equal", "--sync-tp-duplicated-parameters"),
    *accept("SIGTERM saves a checkpoint and exits", "--kill-switch-path FILE"),
    *accept("energy is not measured", "--codecarbon-dir DIR"),
    *accept("fused kernels have no constraints", "--abort-on-unmet-fused-kernel-constraints"),
    *refuse("DeepSpeed's checkpoints are not read", "--universal-checkpoint"),
    *refuse(
        "use --swiglu or --activation-function geglu; no others are implemented",
        "--glu-activation NAME",
    ),
    *refuse(
        "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
        "--tokenizer-name-or-path NAME",
    ),
    *refuse("use --make-vocab-size-divisible-by", "--pad-vocab-size-to N"),
    *refuse("use --skip-train", "--no-train"),
    *refuse(
        "use --train-data-path",
        "--train-weighted-split-paths TEXT...",
        "--train-weighted-split-paths-path FILE",
    ),
    *refuse(
        "use --valid-data-path",
        "--valid-weighted-split-paths TEXT...",
        "--valid-weighted-split-paths-path FILE",
    ),
    *refuse(
        "use --test-data-path",
        "--test-weighted-split-paths TEXT...",
        "--test-weighted-split-paths-path FILE",
    ),
    *refuse(
        "not implemented",
        "--curriculum-learning",
        "--skip-train-iteration-range TEXT...",
        "--loss-on-targets-only",
        "--reweight-loss-based-on-position-frequency",
        "--use-bnb-optimizer",
    ),
    *rename("--normalization RMSNorm", "--use_rms_norm"),
    *rename("--untie-embeddings-and-output-weights", "--no_tie_embed_logits"),
    *rename("--group-query-attention --num-query-groups", "--num_attention_heads_kv N"),
    *rename("--rotary-base", "--rope_theta N"),
    *rename("--use-rope-scaling --rope-scaling-type linear --rope-scaling-factor", "--rope_scaling_factor X"),
)
