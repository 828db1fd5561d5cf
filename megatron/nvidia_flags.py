"""Flags of Megatron-LM's that this code base does not have and what it does about each, and where those differ that
both have.

A flag is accepted, with one line that says so, where leaving it out cannot change what is trained: at most the
time or the memory that it takes. Every other one is refused, with what to use instead. One table serves the
parser and `docs/coming-from-megatron.md`. It covers v2.5, v3.0 and what the examples of 2026 use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class NvidiaFlag:
    """A flag that is known but not ours.

    Attributes:
        usage: the flag and, where it takes a value, a word for it, which ends in "..." if it takes several.
        refused: leaving it out could change what is trained, so the run must not start.
        note: why it has no effect, or what to use in its place.
        harmless: values that ask for nothing, accepted without a word.
    """

    usage: str
    refused: bool
    note: str
    harmless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.usage.split()[0]

    @property
    def nargs(self) -> int | str:
        """How many values follow, as argparse counts them."""
        return "*" if self.usage.endswith("...") else len(self.usage.split()) - 1


def _accept(note: str, *usages: str) -> tuple[NvidiaFlag, ...]:
    return tuple(NvidiaFlag(usage, False, note) for usage in usages)


def _refuse(note: str, *usages: str, harmless: Sequence[str] = ()) -> tuple[NvidiaFlag, ...]:
    return tuple(NvidiaFlag(usage, True, note, tuple(harmless)) for usage in usages)


# Flags of this code base that Megatron-LM does not have.
OURS_ALONE = frozenset(
    "--bf16-optimizer-states --check-weight-replicas-interval --cuda-graph --data-order --device --dry-run "
    "--dry-run-json --dry-run-ranks --eval-tasks --eval-tasks-data --hang-timeout --keep-last --metrics-path "
    "--no-mask-padded-vocab --no-progress --no-torch-compile --on-non-finite --ops-backend --pipeline-schedule "
    "--spike-skip --verify-checkpoint --world-size".split()
)

# Flags that both have and that differ in what they mean or in what leaving them out means; v2.5 and today's.
DEPARTURES = {
    "--checkpoint-activations": "as in v2.5; today's refuses it",
    "--data-path": "blends in v2.5's order; --data-order head has today's",
    "--distributed-backend": "by default nccl on GPUs and gloo on CPUs; there nccl",
    "--eod-mask-loss": "the loss is a mean over all tokens of the global batch; there of the means of microbatches",
    "--eval-interval": "1000 by default, as in v2.5; today's has no default",
    "--eval-iters": "every evaluation reads the same samples; there each one reads on",
    "--fp16": "gradients are accumulated in fp32; a step that is skipped moves the schedules on, there it does not",
    "--load": "a folder without a checkpoint is an error, unless it is that of --save; there training starts anew",
    "--log-memory-to-tensorboard": "of the process with the most; on a CPU what it has in memory",
    "--mask-prob": "the loss is a mean over all masked words of the global batch; there of the means of microbatches",
    "--max-position-embeddings": "by default --seq-length; there it must be given",
    "--num-layers-per-virtual-pipeline-stage": "two stages will do; v2.5 needs three",
    "--overlapping-eval": "a flag of its tasks/main.py, by default 32; as here in tools/evaluate.py",
    "--pipeline-model-parallel-size": "more than there are processes is an error; v2.5 takes as many as there are",
    "--profile": "always torch's profiler, and a page on where the time goes; there by default for nsys",
    "--rampup-batch-size": "as in v2.5; today's reads it and ignores it",
    "--save-interval": "may be left out, to save where the run ends; there --save needs it",
    "--seed": "other initial weights and dropout than there, the same ones in every layout",
    "--split": "969,30,1 by default, as in v2.5; today's has no default, and rounds as --data-order head",
    "--strict-lambada": "a flag of its tasks/main.py",
    "--tensor-model-parallel-size": "more than there are processes is an error; v2.5 takes as many as there are",
    "--tiktoken-pattern": "also patterns of OpenAI's; it must be given, while today's default is v2",
    "--timing-log-level": "reading data is timed from level 1 on, there from 2; no barriers, no waiting for the GPU",
    "--tokenizer-type": "Llama2Tokenizer puts no token before a document, as today's; until core 0.14 it did",
    "--use-checkpoint-args": "all of the architecture is the checkpoint's; there some flags of the command line win",
    "--use-checkpoint-opt_param-scheduler": "without it the command line's schedule wins; there the two must agree",
    "--vocab-size": "a NullTokenizer has one id more, to end documents; today's takes the last of them for it",
}

_NO_CP = "context parallelism is not available in this version"
_NOT_SUPPORTED = "this code base does not have it"

NVIDIA_FLAGS: tuple[NvidiaFlag, ...] = (
    # Names that Megatron-LM itself has given up.
    *_refuse("use --micro-batch-size, and --global-batch-size", "--batch-size N"),
    *_refuse("use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples", "--warmup N"),
    *_refuse("use --tensor-model-parallel-size", "--model-parallel-size N"),
    *_refuse("use --use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    *_accept(
        "the command line's schedule wins already when a run resumes",
        "--override-lr-scheduler",
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
    ),
    *_refuse(
        "use --recompute-granularity full --recompute-method NAME",
        "--activations-checkpoint-method NAME",
    ),
    *_refuse(
        "use --recompute-granularity full --recompute-num-layers N",
        "--activations-checkpoint-num-layers N",
    ),
    *_refuse("use --data-path WEIGHT PREFIX WEIGHT PREFIX", "--data-path2 PREFIX..."),
    *_refuse("use --keep-last", "--most-recent-k N"),
    *_refuse("use --rampup-batch-size START INCREMENT SAMPLES", "--step-batch-size-schedule TEXT"),
    *_refuse("use --position-embedding-type rope", "--use-rotary-position-embeddings"),
    *_refuse("use --position-embedding-type rope, or none", "--no-position-embedding"),
    *_refuse("use --load DIR --finetune", "--pretrained-checkpoint DIR"),
    *_refuse("use --config", "--yaml-cfg FILE"),
    *_refuse("use --data-path, in the file of --config if it is long", "--data-args-path FILE"),
    *_refuse(
        "use --train-data-path, --valid-data-path and --test-data-path",
        "--per-split-data-args-path FILE",
    ),
    *_refuse("use --metrics-path", "--log-progress"),
    *_refuse("set the environment variable WANDB_DIR", "--wandb-save-dir DIR"),
    # Kernels and fusions: the same mathematics, faster or slower.
    *_accept(
        "the kernel of attention is chosen by device, dtype and shape",
        "--attention-backend NAME",
        "--use-flash-attn",
        "--export-force-local-attention",
        "--no-masked-softmax-fusion",
    ),
    *_accept(
        "--ops-backend chooses the implementation of the operations",
        "--transformer-impl NAME",
        "--use-mcore-models",
        "--use-legacy-models",
        "--no-bias-dropout-fusion",
        "--no-bias-swiglu-fusion",
        "--no-rope-fusion",
        "--no-persist-layer-norm",
        "--no-gradient-accumulation-fusion",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl NAME",
    ),
    *_accept("attention is causal without a mask being made", "--no-create-attention-mask-in-dataloader"),
    *_accept(
        "--cuda-graph captures what a microbatch does, as one graph",
        "--cuda-graph-impl NAME",
        "--enable-cuda-graph",
    ),
    *_accept("no dropout is captured in a CUDA graph", "--te-rng-tracker"),
    *_accept("there are no experimental features to admit", "--enable-experimental"),
    # Number formats.
    *_refuse("the loss is always taken in fp32", "--fp16-lm-cross-entropy"),
    *_accept(
        "the factor cancels out; attention is fp32 within, so that it need not guard fp16",
        "--no-query-key-layer-scaling",
        "--apply-query-key-layer-scaling",
    ),
    *_accept("it is always so", "--attention-softmax-in-fp32", "--accumulate-allreduce-grads-in-fp32"),
    *_refuse(
        "use --bf16; fp8 is not available in this version",
        "--fp8-format NAME",
        "--fp8-recipe NAME",
        "--fp8-margin N",
        "--fp8-interval N",
        "--fp8-amax-history-len N",
        "--fp8-amax-compute-algo NAME",
        "--fp8-param-gather",
    ),
    *_refuse(
        "master weights and the gradients that are summed are always fp32",
        "--main-grads-dtype NAME",
        "--main-params-dtype NAME",
        harmless=("fp32",),
    ),
    *_refuse(
        "use --bf16-optimizer-states",
        "--exp-avg-dtype NAME",
        "--exp-avg-sq-dtype NAME",
        harmless=("fp32",),
    ),
    # Parallel layouts.
    *_refuse(f"{_NO_CP}; leave it at 1", "--context-parallel-size N", harmless=("1",)),
    *_accept(
        "communication runs beside computation wherever it can",
        "--no-async-tensor-model-parallel-allreduce",
        "--tp-comm-overlap",
        "--no-overlap-p2p-communication",
        "--overlap-p2p-communication-warmup-flush",
        "--use-ring-exchange-p2p",
    ),
    *_accept(_NO_CP, "--cp-comm-type NAME..."),
    *_accept(
        "give --num-layers-per-virtual-pipeline-stage in its place",
        "--num-virtual-stages-per-pipeline-rank N",
    ),
    *_accept(
        "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        "--standalone-embedding-stage",
        "--pipeline-model-parallel-layout TEXT",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *_accept(
        "gradients always lie in one contiguous buffer, and are summed over replicas",
        "--DDP-impl NAME",
        "--use-contiguous-buffers-in-ddp",
        "--no-contiguous-buffers-in-local-ddp",
        "--ddp-average-in-collective",
        "--use-nccl-ub",
    ),
    *_accept("use --ddp-bucket-size, which counts elements", "--ddp-num-buckets N"),
    *_accept(
        "not available; --use-distributed-optimizer divides the optimizer's state",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy NAME",
        "--fsdp-double-buffer",
        "--fsdp-manual-registration",
        "--optimizer-cpu-offload",
    ),
    *_accept("parameters are always laid out before they take memory", "--init-model-with-meta-device"),
    *_accept("a process learns its rank from the environment", "--local_rank N", "--local-rank N"),
    *_accept("process groups are always set up at the start", "--lazy-mpu-init X"),
    *_accept("gloo only carries a few numbers that the host acts on", "--disable-gloo-process-groups"),
    # Memory.
    *_accept("selective recomputation recomputes attention, and nothing else", "--recompute-modules NAME..."),
    *_accept("memory is left to PyTorch", "--empty-unused-memory-level N"),
    # Initial weights and random numbers.
    *_accept("initial weights are the same on every device and layout", "--use-cpu-initialization"),
    *_accept("weights are always initialised, then loaded if --load says so", "--no-initialization"),
    *_refuse("all replicas start from the same weights", "--data-parallel-random-init"),
    *_accept(
        "random numbers follow from the seed and the sample; there is no state",
        "--no-save-rng",
        "--no-load-rng",
    ),
    *_refuse("runs are reproducible on CPUs; on GPUs it is not promised", "--deterministic-mode"),
    # Loss and optimizer.
    *_accept("the loss is always a mean over tokens", "--calculate-per-token-loss"),
    *_accept(
        "a step that is not finite never changes weights; --on-non-finite says what then",
        "--no-check-for-nan-in-loss-and-grad",
    ),
    *_refuse(
        "all parameters share one learning rate",
        "--decoupled-lr X",
        "--decoupled-min-lr X",
        "--head-lr-mult X",
    ),
    *_refuse(_NOT_SUPPORTED, "--use-precision-aware-optimizer", "--iterations-to-skip N..."),
    # Variants of the model.
    *_accept(
        "a norm's weight, which never decays, is kept as it is, not less 1",
        "--apply-layernorm-1p",
    ),
    *_refuse(
        _NOT_SUPPORTED,
        "--squared-relu",
        "--quick-geglu",
        "--glu-linear-offset X",
        "--activation-func-clamp-value X",
        "--softmax-type NAME",
        "--enable-gpt-oss",
        "--disable-bf16-reduced-precision-matmul",
        "--window-size TEXT",
        "--window-attn-skip-freq TEXT",
        "--rotary-interleaved",
        "--rope-type NAME",
    ),
    *_refuse(_NOT_SUPPORTED, "--rotary-seq-len-interpolation-factor N", harmless=("1",)),
    *_refuse("use --no-bias-gelu-fusion for its exact GELU", "--onnx-safe X"),
    *_refuse(
        "multi-latent attention is not part of this code base",
        "--multi-latent-attention",
        "--q-lora-rank N",
        "--kv-lora-rank N",
        "--qk-head-dim N",
        "--qk-pos-emb-head-dim N",
        "--v-head-dim N",
    ),
    *_refuse(
        "multi-token prediction is not part of this code base",
        "--mtp-num-layers N",
        "--mtp-loss-scaling-factor X",
    ),
    *_refuse(
        "only transformers can be built",
        "--spec NAME...",
        "--hybrid-layer-pattern TEXT",
        "--hybrid-override-pattern TEXT",
    ),
    *_refuse(
        "mixture of experts is not part of this code base",
        "--num-experts N",
        "--moe-layer-freq TEXT",
        "--moe-ffn-hidden-size N",
        "--moe-shared-expert-intermediate-size N",
        "--moe-shared-expert-overlap",
        "--moe-grouped-gemm",
        "--moe-layer-recompute",
        "--moe-permute-fusion",
        "--moe-router-topk N",
        "--moe-router-load-balancing-type NAME...",
        "--moe-router-num-groups N",
        "--moe-router-group-topk N",
        "--moe-router-topk-scaling-factor X",
        "--moe-router-score-function NAME",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate X",
        "--moe-router-dtype NAME",
        "--moe-router-pre-softmax",
        "--moe-aux-loss-coeff X...",
        "--moe-z-loss-coeff X",
        "--moe-token-dispatcher-type NAME",
        "--moe-token-drop-policy NAME",
        "--moe-expert-capacity-factor X",
        "--moe-pad-expert-input-to-capacity",
        "--moe-per-layer-logging",
    ),
    *_refuse(
        "mixture of experts is not part of this code base; leave it at 1",
        "--expert-model-parallel-size N",
        "--expert-tensor-parallel-size N",
        harmless=("1",),
    ),
    *_refuse("T5 is not available in this version; GPT takes --num-layers", "--encoder-num-layers N"),
    *_refuse(
        "T5 is not available in this version",
        "--decoder-num-layers N",
        "--decoder-seq-length N",
        "--pipeline-model-parallel-split-rank N",
    ),
    *_refuse("T5 is not available in this version", "--vocab-extra-ids N", harmless=("0",)),
    *_refuse(
        "retrieval models are not part of this code base",
        "--ict-head-size N",
        "--biencoder-projection-dim N",
        "--biencoder-shared-query-context-model",
        "--ict-load DIR",
        "--bert-load DIR",
        "--titles-data-path PREFIX",
        "--query-in-block-prob X",
        "--use-one-sent-docs",
        "--evidence-data-path FILE",
        "--retriever-seq-length N",
        "--retriever-report-topk-accuracies N...",
        "--retriever-score-scaling",
        "--block-data-path FILE",
        "--embedding-path FILE",
        "--indexer-batch-size N",
        "--indexer-log-interval N",
    ),
    *_refuse(
        "vision models are not part of this code base",
        "--num-classes N",
        "--img-dim N",
        "--img-h N",
        "--img-w N",
        "--num-channels N",
        "--patch-dim N",
        "--classes-fraction X",
        "--data-per-class-fraction X",
        "--vision-pretraining",
        "--vision-pretraining-type NAME",
        "--vision-backbone-type NAME",
        "--swin-backbone-type NAME",
        "--mask-type NAME",
        "--mask-factor X",
        "--iter-per-epoch N",
        "--dino-local-img-size N",
        "--dino-local-crops-number N",
        "--dino-head-hidden-size N",
        "--dino-bottleneck-size N",
        "--dino-freeze-last-layer X",
        "--dino-norm-last-layer",
        "--dino-warmup-teacher-temp X",
        "--dino-teacher-temp X",
        "--dino-warmup-teacher-temp-epochs N",
    ),
    # Data and tokenizers.
    *_refuse(
        "only the mmap format is read; tools/preprocess_data.py writes it",
        "--data-impl NAME",
        harmless=("mmap", "infer"),
    ),
    *_accept("files are mapped and left to the system's cache", "--mmap-warmup", "--no-mmap-bin-files"),
    *_accept("sample indices are built by one process of a node", "--num-dataset-builder-threads N"),
    *_refuse("with --dataloader-type cyclic each replica shuffles its own share", "--no-data-sharding"),
    *_refuse("all samples are read", "--sample-rate X", harmless=("1", "1.0")),
    *_refuse("fill-in-the-middle data is not supported", "--fim-data"),
    *_refuse("supervised fine-tuning is not supported", "--sft"),
    *_refuse(
        "the special tokens of a tokenizer are those of its files",
        "--tiktoken-special-tokens TEXT...",
        "--tokenizer-special-tokens TEXT...",
        "--tokenizer-hf-no-include-special-tokens",
        "--null-tokenizer-eod-id N",
        "--null-tokenizer-pad-id N",
    ),
    *_refuse(
        "it is always as today's default has it", "--tokenizer-sentencepiece-legacy", "--legacy-tokenizer"
    ),
    *_refuse("only the tokenizer's own files are read, which cannot run code", "--trust-remote-code"),
    *_refuse("use --make-vocab-size-divisible-by", "--padded-vocab-size N"),
    # Checkpoints.
    *_accept(
        "checkpoints are always safetensors and JSON",
        "--ckpt-format NAME",
        "--dist-ckpt-format NAME",
        "--use-dist-ckpt",
        "--auto-detect-ckpt-format",
        "--dist-ckpt-strictness NAME",
    ),
    *_accept(
        "a checkpoint is the same whichever processes write its parts",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
    ),
    *_refuse(
        "--load of an empty folder is an error, unless it is the folder of --save",
        "--exit-on-missing-checkpoint",
    ),
    # Logs, timers and the way a run ends.
    *_accept(
        "TensorBoard and the log always have it",
        "--log-batch-size-to-tensorboard",
        "--no-log-learnig-rate-to-tensorboard",
        "--no-log-learning-rate-to-tensorboard",
        "--log-validation-ppl-to-tensorboard",
        "--log-throughput",
    ),
    *_accept("with --fp16 TensorBoard and the log always have it", "--no-log-loss-scale-to-tensorboard"),
    *_accept("the log says it at the start", "--log-world-size-to-tensorboard"),
    *_accept("times are always taken without a barrier", "--no-barrier-with-level-1-timing"),
    *_accept(
        "there is one level of logging, and nothing is reported to NVIDIA",
        "--logging-level N",
        "--no-one-logger",
    ),
    *_accept("it is what --profile uses", "--use-pytorch-profiler"),
    *_accept(
        "not available in this version; the log tells how much memory is used", "--record-memory-history"
    ),
    *_refuse("runs are not validated by doing steps twice", "--rerun-mode NAME", harmless=("disabled",)),
    *_accept("SIGTERM and Ctrl-C always save and leave", "--exit-signal-handler"),
    *_refuse(
        "it needs NVIDIA's own cluster; SIGTERM saves and leaves, --load continues",
        "--adlr-autoresume",
        "--adlr-autoresume-interval N",
    ),
    # Generation, which has a tool of its own.
    *_accept(
        "it is about generation, and this is training; see tools/generate_text.py",
        "--inference-batch-times-seqlen-threshold N",
        "--inference-max-seq-length N",
        "--inference-max-requests N",
        "--inference-dynamic-batching",
        "--inference-dynamic-batching-buffer-size-gb X",
        "--inference-dynamic-batching-block-size N",
        "--inference-dynamic-batching-max-requests N",
        "--inference-dynamic-batching-max-tokens N",
        "--inference-dynamic-batching-num-cuda-graphs N",
        "--inference-dynamic-batching-unified-memory-level N",
        "--inference-rng-tracker",
        "--enable-chunked-prefill",
        "--return-log-probs",
    ),
)
