"""Flags of Megatron-LM that this program does not implement, and notes on those that both have.

A flag is accepted, with a note, if ignoring it cannot change the trained model, only time or memory. Another name of a
flag of this program is translated, with a note. Every other flag is refused, with the alternative. The tables serve the
command line and `docs/coming-from-megatron.md`. They cover v2.5, v3.0, the flags in the examples and tests of 2026, and
flags of forks.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.cli import Parser
from megatron.interop.nvidia.flag_table import NvidiaFlag
from megatron.interop.nvidia.fork_flags import FORK_FLAGS
from megatron.interop.nvidia.model_flags import MODEL_FLAGS
from megatron.interop.nvidia.training_flags import TRAINING_FLAGS

# Flags that Megatron-LM does not have.
OURS_ALONE = frozenset(
    "--add-expert-bias --attn-logit-softcapping --final-logit-softcapping --sandwich-norm "
    "--activation-function --add-attention-bias --add-mlp-bias --bf16-optimizer-states --capture "
    "--capture-megabytes --capture-steps --check-weight-replicas-interval --cpu-offload-activations "
    "--cpu-offload-activations-num-layers --cpu-offload-optimizer --cuda-graph "
    "--data-order "
    "--device --dry-run --dry-run-json --dry-run-ranks --enable-optimizer-post-validation "
    "--eval-on-start --eval-tasks --eval-tasks-data "
    "--freeze --hang-timeout --keep-last --lion-beta1 --lion-beta2 --log-format --log-level --loss-mean "
    "--no-mask-padded-vocab --metrics-path --mlflow-experiment --mlflow-run-name --mlflow-tracking-uri "
    "--norm-after --num-threads --on-non-finite --ops-backend --packing --padding-free "
    "--pipeline-microbatches-in-flight "
    "--pipeline-schedule --no-progress "
    "--qk-layernorm-all-heads --rope-scaling-original-length --rope-scaling-attention-factor "
    "--rope-scaling-turns --rope-scaling-type --rotary-base-local --sample-interval --sample-prompts --save-best "
    "--scale-embeddings --spike-skip --tokenizer --no-torch-compile --train-epochs --train-tokens "
    "--use-parallel-residual --no-verify-checkpoint --wandb-group --world-size".split()
)

# Flags whose meaning or default differs from Megatron-LM; "now" is its current version.
DEPARTURES = {
    "--checkpoint-activations": "as in v2.5; now refused",
    "--data-path": "blends in v2.5's order; --data-order head selects the current one",
    "--distributed-backend": "default: nccl on GPUs, gloo on CPUs; there nccl",
    "--eod-mask-loss": "the loss is the mean over the global batch; there the mean of the microbatches' means, so "
    "losses and grad norms differ (in a spike the grad norm by 14%) unless --loss-mean microbatches is given",
    "--eval-interval": "default: 1000, as in v2.5; now none",
    "--eval-iters": "every evaluation reads the same samples; there each reads the next ones",
    "--fp16": "gradients are accumulated in fp32; skipped steps advance the schedules, there they do not",
    "--fp8-recipe": "default: tensorwise; there delayed, which is not implemented; rowwise is torchao's",
    "--kv-channels": "with --multi-latent-attention that of queries and keys, or an error; there without effect",
    "--load": "a folder without a checkpoint is an error unless it is also --save; there training starts from scratch",
    "--log-memory-to-tensorboard": "of the rank that uses most; on a CPU the resident memory",
    "--mask-prob": "the loss is the mean over the global batch; there the mean of the microbatches' means, as with "
    "--loss-mean microbatches",
    "--max-position-embeddings": "default: --seq-length; there required",
    "--muon-num-ns-steps": "in fp32, with the coefficients of torch.optim.Muon; there `quintic` by default, in bf16",
    "--num-layers-per-virtual-pipeline-stage": "needs two stages; in v2.5 three",
    "--optimizer": "muon orthogonalizes the projection to queries, keys and values as one matrix; there as three",
    "--overlapping-eval": "there a flag of tasks/main.py with default 32, as here in megatron evaluate",
    "--pipeline-model-parallel-size": "an error if larger than the number of ranks; v2.5 reduces it",
    "--profile": "always torch's profiler, with a summary page; there nsys by default",
    "--rampup-batch-size": "as in v2.5, with --train-samples only; now ignored",
    "--save-interval": "optional: by default the run saves every 30 minutes and at its end; there required with --save",
    "--seed": "other initial weights and dropout than there, but equal in every layout, except for dropout of tensors "
    "that tensor parallelism splits",
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

NVIDIA_FLAGS = TRAINING_FLAGS + MODEL_FLAGS + FORK_FLAGS


class _Note(argparse.Action):
    """Collect a note or a refusal, or parse the words that the flag stands for."""

    def __init__(self, option_strings: list[str], dest: str, flag: NvidiaFlag, nargs: int | str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=argparse.SUPPRESS)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values and values[0] in self.flag.harmless:
            return
        given = " ".join([self.flag.name, *values])
        if self.flag.instead:
            words = [*self.flag.instead.split(), *values]
            parser.parse_known_args(words, namespace)
            namespace.notices.append(f"{given} is read as {' '.join(words)}")
            return
        if self.flag.refused:
            namespace.refusals.append(f"{given} is not supported: {self.flag.note}")
        else:
            namespace.notices.append(f"{given} has no effect: {self.flag.note}")


def add_nvidia_flags(parser: Parser) -> None:
    """Make a parser recognize the flags of Megatron-LM that it does not implement, without listing them in --help."""
    for flag in NVIDIA_FLAGS:
        if flag.name not in parser.flags:
            parser.add_argument(flag.name, action=_Note, flag=flag, nargs=flag.nargs)
