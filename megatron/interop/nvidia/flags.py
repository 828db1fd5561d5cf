"""Flags of Megatron-LM that this program does not implement, and notes on those that both have.

A flag is accepted, with a note, if ignoring it cannot change the trained model, only time or memory. Every other flag
is refused, with the alternative. The table serves the command line and `docs/coming-from-megatron.md`. It covers v2.5,
v3.0 and the flags in the examples of 2026.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.cli import Parser


@dataclasses.dataclass(frozen=True)
class NvidiaFlag:
    """A flag of Megatron-LM that this program recognizes and does not implement.

    Attributes:
        usage: the flag, followed by a word for each value; the last word ends in "..." if it takes several.
        refused: True if ignoring the flag could change the trained model, so that the run must not start.
        note: the reason why it has no effect, or what to use instead.
        harmless: values that ask for nothing, accepted silently.
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
        """The number of values that follow, as argparse counts them."""
        return "*" if self.usage.endswith("...") else len(self.usage.split()) - 1


def _accept(note: str, *usages: str) -> tuple[NvidiaFlag, ...]:
    return tuple(NvidiaFlag(usage, False, note) for usage in usages)


def _refuse(note: str, *usages: str, harmless: Sequence[str] = ()) -> tuple[NvidiaFlag, ...]:
    return tuple(NvidiaFlag(usage, True, note, tuple(harmless)) for usage in usages)


# Flags that Megatron-LM does not have.
OURS_ALONE = frozenset(
    "--bf16-optimizer-states --check-weight-replicas-interval --cuda-graph --data-order --device --dry-run "
    "--dry-run-json --dry-run-ranks --eval-tasks --eval-tasks-data --hang-timeout --keep-last --lion-beta1 "
    "--lion-beta2 --metrics-path --no-mask-padded-vocab --no-progress --no-torch-compile --on-non-finite "
    "--ops-backend --pipeline-schedule --spike-skip --no-verify-checkpoint --world-size".split()
)

# Flags whose meaning or default differs from Megatron-LM; "now" is its current version.
DEPARTURES = {
    "--checkpoint-activations": "as in v2.5; now refused",
    "--data-path": "blends in v2.5's order; --data-order head selects the current one",
    "--distributed-backend": "default: nccl on GPUs, gloo on CPUs; there nccl",
    "--eod-mask-loss": "the loss is the mean over the global batch; there the mean of the microbatches' means, so "
    "losses and grad norms differ; in a spike the grad norm differed by 14%",
    "--eval-interval": "default: 1000, as in v2.5; now none",
    "--eval-iters": "every evaluation reads the same samples; there each reads the next ones",
    "--fp16": "gradients are accumulated in fp32; skipped steps advance the schedules, there they do not",
    "--load": "a folder without a checkpoint is an error unless it is also --save; there training starts from scratch",
    "--log-memory-to-tensorboard": "of the rank that uses most; on a CPU the resident memory",
    "--mask-prob": "the loss is the mean over the global batch; there the mean of the microbatches' means",
    "--max-position-embeddings": "default: --seq-length; there required",
    "--muon-num-ns-steps": "in fp32, with the coefficients of torch.optim.Muon; there `quintic` by default, in bf16",
    "--num-layers-per-virtual-pipeline-stage": "needs two stages; in v2.5 three",
    "--optimizer": "muon orthogonalizes the projection to queries, keys and values as one matrix; there as three",
    "--overlapping-eval": "there a flag of tasks/main.py with default 32, as here in tools/evaluate.py",
    "--pipeline-model-parallel-size": "an error if larger than the number of ranks; v2.5 reduces it",
    "--profile": "always torch's profiler, with a summary page; there nsys by default",
    "--rampup-batch-size": "as in v2.5; now ignored",
    "--save-interval": "optional: by default the run saves at its end; there required with --save",
    "--seed": "other initial weights and dropout than there, but equal in every layout",
    "--split": "default: 969,30,1, as in v2.5; now none, and rounded as with --data-order head; if given, a share "
    "above 0 that is too small for a document is an error; there that data is left out",
    "--strict-lambada": "there a flag of tasks/main.py",
    "--tensor-model-parallel-size": "an error if larger than the number of ranks; v2.5 reduces it",
    "--tiktoken-pattern": "also OpenAI's patterns; required, where the current default is v2",
    "--timing-log-level": "data loading is timed from level 1, there from 2; no barriers or GPU synchronization",
    "--tokenizer-type": "Llama2Tokenizer adds no token before a document; until core 0.14 it did",
    "--use-checkpoint-args": "the whole architecture is the checkpoint's; there the command line overrides parts of it",
    "--use-checkpoint-opt_param-scheduler": "without it the command line's schedule is used; there the two must agree",
    "--vocab-size": "a NullTokenizer adds an end-of-document id; the current version uses the last id for it",
}

_NO_CP = "context parallelism is not implemented"
_NOT_SUPPORTED = "not implemented"

NVIDIA_FLAGS: tuple[NvidiaFlag, ...] = (
    # Names that Megatron-LM itself has dropped.
    *_refuse("use --micro-batch-size, and --global-batch-size", "--batch-size N"),
    *_refuse("use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples", "--warmup N"),
    *_refuse("use --tensor-model-parallel-size", "--model-parallel-size N"),
    *_refuse("use --use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
    *_accept(
        "a resumed run uses the command line's schedule by default",
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
    *_refuse("use --data-path, in a --config file if it is long", "--data-args-path FILE"),
    *_refuse(
        "use --train-data-path, --valid-data-path and --test-data-path",
        "--per-split-data-args-path FILE",
    ),
    *_refuse("use --metrics-path", "--log-progress"),
    *_refuse("set the environment variable WANDB_DIR", "--wandb-save-dir DIR"),
    # Kernels and fusions.
    *_accept(
        "the attention kernel is chosen by device, dtype and shape",
        "--attention-backend NAME",
        "--use-flash-attn",
        "--export-force-local-attention",
        "--no-masked-softmax-fusion",
    ),
    *_accept(
        "use --ops-backend",
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
    *_accept("causal attention needs no mask tensor", "--no-create-attention-mask-in-dataloader"),
    *_accept(
        "use --cuda-graph, which captures a microbatch as one graph",
        "--cuda-graph-impl NAME",
        "--enable-cuda-graph",
    ),
    *_accept("CUDA graphs are captured without dropout", "--te-rng-tracker"),
    *_accept("there are no experimental features", "--enable-experimental"),
    # Number formats.
    *_refuse("the loss is always computed in fp32", "--fp16-lm-cross-entropy"),
    *_accept(
        "the factor cancels out; attention scores are in fp32, so fp16 does not need it",
        "--no-query-key-layer-scaling",
        "--apply-query-key-layer-scaling",
    ),
    *_accept("always on", "--attention-softmax-in-fp32", "--accumulate-allreduce-grads-in-fp32"),
    *_refuse(
        "fp8 is not implemented; use --bf16",
        "--fp8-format NAME",
        "--fp8-recipe NAME",
        "--fp8-margin N",
        "--fp8-interval N",
        "--fp8-amax-history-len N",
        "--fp8-amax-compute-algo NAME",
        "--fp8-param-gather",
    ),
    *_refuse(
        "master weights and accumulated gradients are always fp32",
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
    *_accept("queries, keys and values are always orthogonalized together", "--muon-no-split-qkv"),
    *_refuse("Newton-Schulz runs in fp32", "--muon-fp32-matmul-prec NAME", harmless=("highest",)),
    *_refuse("the coefficients are `simple`", "--muon-coefficient-type NAME", harmless=("simple",)),
    *_refuse("matrices are always gathered", "--muon-tp-mode NAME", harmless=("duplicated",)),
    *_refuse("AdamW updates all other parameters", "--muon-scalar-optimizer NAME", harmless=("adam",)),
    # Parallel layouts.
    *_refuse(f"{_NO_CP}; only 1 is accepted", "--context-parallel-size N", harmless=("1",)),
    *_accept(
        "communication always overlaps computation where possible",
        "--no-async-tensor-model-parallel-allreduce",
        "--tp-comm-overlap",
        "--no-overlap-p2p-communication",
        "--overlap-p2p-communication-warmup-flush",
        "--use-ring-exchange-p2p",
    ),
    *_accept(_NO_CP, "--cp-comm-type NAME..."),
    *_accept(
        "use --num-layers-per-virtual-pipeline-stage",
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
        "gradients are always in a contiguous buffer, and are summed over replicas",
        "--DDP-impl NAME",
        "--use-contiguous-buffers-in-ddp",
        "--no-contiguous-buffers-in-local-ddp",
        "--ddp-average-in-collective",
        "--use-nccl-ub",
    ),
    *_accept("use --ddp-bucket-size, in elements", "--ddp-num-buckets N"),
    *_accept(
        "not implemented; --use-distributed-optimizer shards the optimizer state",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--data-parallel-sharding-strategy NAME",
        "--fsdp-double-buffer",
        "--fsdp-manual-registration",
        "--optimizer-cpu-offload",
    ),
    *_accept("models are always built on the meta device", "--init-model-with-meta-device"),
    *_accept("the rank comes from the environment", "--local_rank N", "--local-rank N"),
    *_accept("process groups are always created at the start", "--lazy-mpu-init X"),
    *_accept("gloo carries only a few values for the host", "--disable-gloo-process-groups"),
    # Memory.
    *_accept("selective recomputation always recomputes attention only", "--recompute-modules NAME..."),
    *_accept("PyTorch manages GPU memory", "--empty-unused-memory-level N"),
    # Initial weights and random numbers.
    *_accept("initial weights are equal on every device and in every layout", "--use-cpu-initialization"),
    *_accept("weights are always initialized, and overwritten by --load", "--no-initialization"),
    *_refuse("all replicas start from the same weights", "--data-parallel-random-init"),
    *_accept(
        "random numbers depend on the seed and the sample; there is no state",
        "--no-save-rng",
        "--no-load-rng",
    ),
    *_refuse("CPU runs are reproducible; GPU runs are not guaranteed to be", "--deterministic-mode"),
    # Loss and optimizer.
    *_accept("the loss is always the mean over tokens", "--calculate-per-token-loss"),
    *_accept(
        "non-finite gradients never change weights; see --on-non-finite",
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
        "norm weights, which never decay, are stored directly and not minus 1",
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
    *_refuse("use --no-bias-gelu-fusion for the exact GELU", "--onnx-safe X"),
    *_refuse(
        "multi-latent attention is not implemented",
        "--multi-latent-attention",
        "--q-lora-rank N",
        "--kv-lora-rank N",
        "--qk-head-dim N",
        "--qk-pos-emb-head-dim N",
        "--v-head-dim N",
    ),
    *_refuse(
        "multi-token prediction is not implemented",
        "--mtp-num-layers N",
        "--mtp-loss-scaling-factor X",
    ),
    *_refuse(
        "only plain transformers are implemented",
        "--spec NAME...",
        "--hybrid-layer-pattern TEXT",
        "--hybrid-override-pattern TEXT",
    ),
    *_refuse(
        "mixture of experts is not implemented",
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
        "mixture of experts is not implemented; only 1 is accepted",
        "--expert-model-parallel-size N",
        "--expert-tensor-parallel-size N",
        harmless=("1",),
    ),
    *_refuse("T5 is not implemented; for GPT use --num-layers", "--encoder-num-layers N"),
    *_refuse(
        "T5 is not implemented",
        "--decoder-num-layers N",
        "--decoder-seq-length N",
        "--pipeline-model-parallel-split-rank N",
    ),
    *_refuse("T5 is not implemented", "--vocab-extra-ids N", harmless=("0",)),
    *_refuse(
        "retrieval models are not implemented",
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
        "vision models are not implemented",
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
    *_accept("files are memory-mapped", "--mmap-warmup", "--no-mmap-bin-files"),
    *_accept("one process per node builds the sample indices", "--num-dataset-builder-threads N"),
    *_refuse("with --dataloader-type cyclic each replica shuffles its own part", "--no-data-sharding"),
    *_refuse("all samples are used", "--sample-rate X", harmless=("1", "1.0")),
    *_refuse("fill-in-the-middle data is not implemented", "--fim-data"),
    *_refuse("supervised fine-tuning is not implemented", "--sft"),
    *_refuse(
        "special tokens come from the tokenizer's files",
        "--tiktoken-special-tokens TEXT...",
        "--tokenizer-special-tokens TEXT...",
        "--tokenizer-hf-no-include-special-tokens",
        "--null-tokenizer-eod-id N",
        "--null-tokenizer-pad-id N",
    ),
    *_refuse(
        "always as by default in the current version",
        "--tokenizer-sentencepiece-legacy",
        "--legacy-tokenizer",
    ),
    *_refuse("only the tokenizer's own files are read; they cannot run code", "--trust-remote-code"),
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
        "a checkpoint does not depend on the layout that writes it",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
    ),
    *_refuse(
        "--load of an empty folder is an error unless it is also --save",
        "--exit-on-missing-checkpoint",
    ),
    # Logging, timers, exit.
    *_accept(
        "always reported",
        "--log-batch-size-to-tensorboard",
        "--no-log-learnig-rate-to-tensorboard",
        "--no-log-learning-rate-to-tensorboard",
        "--log-validation-ppl-to-tensorboard",
        "--log-throughput",
    ),
    *_accept("always reported with --fp16", "--no-log-loss-scale-to-tensorboard"),
    *_accept("reported at the start", "--log-world-size-to-tensorboard"),
    *_accept("timers never use a barrier", "--no-barrier-with-level-1-timing"),
    *_accept(
        "nothing is reported to NVIDIA",
        "--logging-level N",
        "--no-one-logger",
    ),
    *_accept("always used by --profile", "--use-pytorch-profiler"),
    *_accept("not implemented; the log reports memory use", "--record-memory-history"),
    *_refuse("steps are not validated by running them twice", "--rerun-mode NAME", harmless=("disabled",)),
    *_accept("SIGTERM and Ctrl-C always save a checkpoint and exit", "--exit-signal-handler"),
    *_refuse(
        "specific to NVIDIA's cluster; SIGTERM saves and exits, --load resumes",
        "--adlr-autoresume",
        "--adlr-autoresume-interval N",
    ),
    # Generation.
    *_accept(
        "a flag for generation; see tools/generate_text.py",
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


class _Note(argparse.Action):
    """Collect a note or a refusal."""

    def __init__(self, option_strings: list[str], dest: str, flag: NvidiaFlag, nargs: int | str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=argparse.SUPPRESS)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values and values[0] in self.flag.harmless:
            return
        given = " ".join([self.flag.name, *values])
        if self.flag.refused:
            namespace.refusals.append(f"{given} is not supported: {self.flag.note}")
        else:
            namespace.notices.append(f"{given} has no effect: {self.flag.note}")


def add_nvidia_flags(parser: Parser) -> None:
    """Make a parser recognize the flags of Megatron-LM that it does not implement, without listing them in --help."""
    for flag in NVIDIA_FLAGS:
        if flag.name not in parser.flags:
            parser.add_argument(flag.name, action=_Note, flag=flag, nargs=flag.nargs)
