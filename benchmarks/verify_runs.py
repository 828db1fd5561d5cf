"""Runs that `benchmarks/verify.py` verifies: small ones for faults, and random combinations of features without one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megatron.commands.verify import parse
from megatron.errors import InputError
from megatron.verify.layouts import Layout
from megatron.verify.runner import STEPS
from megatron.verify.shrink import Shrunk, shrink

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 3 --lr 2e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 250 "
    "--hidden-dropout 0 --attention-dropout 0"
)
# Runs of two processes for faults.
RUNS = {
    "t2": "--tensor-model-parallel-size 2",
    "t2 sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "t2 groups": "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1",
    "p2": "--pipeline-model-parallel-size 2",
    "p2 interleaved": "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "d2": "",
    "d2 distributed": "--use-distributed-optimizer",
    "d2 dropout": "--use-distributed-optimizer --hidden-dropout 0.1",
    "d2 bf16": "--use-distributed-optimizer --bf16",
}

_EXPERTS = "--disable-bias-linear --num-experts 8 --init-method-std 0.1"
_SOFTMAX = f"{_EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"
_BIAS = (
    f"{_EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
)
_E2 = "--expert-model-parallel-size 2"
# Runs of two processes for faults in mixtures of experts.
MIXTURE_RUNS = {
    "t2 experts": f"{_SOFTMAX} --tensor-model-parallel-size 2",
    "p2 experts": f"{_SOFTMAX} --pipeline-model-parallel-size 2",
    "d2 experts": _SOFTMAX,
    "e2": f"{_SOFTMAX} {_E2}",
    "e2 two sequences": f"{_SOFTMAX} {_E2} --micro-batch-size 2",
    "e2 all-gather": f"{_SOFTMAX} {_E2} --moe-token-dispatcher-type allgather",
    "e2 distributed": f"{_SOFTMAX} {_E2} --use-distributed-optimizer",
    "t2 bias": f"{_BIAS} --tensor-model-parallel-size 2",
    "e2 bias": f"{_BIAS} {_E2}",
    "e2 bias recomputed": f"{_BIAS} {_E2} --moe-layer-recompute",
    "t2 capacity": f"{_SOFTMAX} --tensor-model-parallel-size 2 --moe-expert-capacity-factor 0.75",
}
_DOCUMENTS = (
    "--reset-attention-mask --reset-position-ids --eod-mask-loss --micro-batch-size 2 --global-batch-size 8"
)
# Runs of two processes for faults in packed documents.
PACKING_RUNS = {
    "d2 documents": _DOCUMENTS,
    "t2 documents": f"{_DOCUMENTS} --tensor-model-parallel-size 2",
    "p2 documents": f"{_DOCUMENTS} --pipeline-model-parallel-size 2",
}
_C2 = "--context-parallel-size 2"
_CONTEXT = f"{_C2} --position-embedding-type rope"
# Runs of two processes for faults in context parallelism.
CONTEXT_RUNS = {
    "c2": _CONTEXT,
    "c2 all-gather": f"{_CONTEXT} --cp-comm-type all_gather",
    "c2 all-to-all": f"{_CONTEXT} --cp-comm-type a2a",
    "c2 documents": f"{_DOCUMENTS} {_C2}",
    "c2 documents all-to-all": f"{_DOCUMENTS} {_C2} --cp-comm-type a2a",
    "c2 experts": f"{_SOFTMAX} {_C2}",
    "c2 z-loss": f"{_EXPERTS} {_C2} --moe-z-loss-coeff 0.1",
}

# Alternatives of a feature, of which a run without a fault draws one.
FEATURES = (
    ("", "--normalization RMSNorm", "--apply-layernorm-1p", "--normalization RMSNorm --norm-epsilon 1e-6"),
    (
        "",
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-percent 0.5",
        "--position-embedding-type alibi",
        "--position-embedding-type none",
    ),
    ("", "--swiglu", "--activation-function geglu", "--activation-function relu", "--openai-gelu"),
    ("", "--group-query-attention --num-query-groups 2", "--group-query-attention --num-query-groups 1"),
    ("", "", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    ("", "--untie-embeddings-and-output-weights"),
    (
        "",
        "",
        "--use-parallel-residual",
        "--apply-residual-connection-post-layernorm",
        "--norm-after",
        "--qk-layernorm",
        "--embed-layernorm",
    ),
    ("", "--sequence-parallel"),
    (
        "",
        "--use-distributed-optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    ("", "", "--optimizer sgd", "--optimizer lion", "--optimizer muon", "--adam-beta2 0.95"),
    (
        "",
        "",
        "--recompute-granularity full --recompute-method uniform",
        "--recompute-granularity full --recompute-method block",
        "--recompute-granularity selective",
    ),
    ("", "", "--hidden-dropout 0.1 --attention-dropout 0.1", "--hidden-dropout 0.3"),
    ("", "--clip-grad 0", "--clip-grad 0.1 --weight-decay 0.3"),
    ("", "", "--num-layers-per-virtual-pipeline-stage 1"),
    ("", "", "--loss-mean microbatches"),
)
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16"}
# Combinations of features of each precision; each is verified in all layouts, and in three resumes of the first.
COUNTS = {"fp32": 23, "bf16": 12, "fp16": 6}
LAYOUTS = (
    Layout(2, 2, 1),
    Layout(2),
    Layout(1, 2),
    Layout(1, 1, 2),
    Layout(2, 1, 2),
    Layout(1, 2, 2),
)


def shrunk(flags: str, processes: int = 2) -> Shrunk:
    run = parse("pretrain_gpt", f"{COMMON} {flags}".split())
    return shrink(run, processes, processes, STEPS)


def combinations(precision: str, seed: int) -> Iterator[tuple[str, Shrunk]]:
    """Yield flags and run of random combinations of features that the program accepts."""
    draw = random.Random(f"{precision} {seed}")
    found = 0
    while found < COUNTS[precision]:
        drawn = [PRECISIONS[precision], *(draw.choice(alternatives) for alternatives in FEATURES)]
        flags = " ".join(words for words in drawn if words)
        layout = "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        try:
            run = shrunk(f"{layout} {flags}", 4)
        except InputError:
            continue
        found += 1
        yield flags, run
