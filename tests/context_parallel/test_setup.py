"""Runs that context parallelism cannot do end before they start, with one line."""

from __future__ import annotations

import pytest

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.pretrain_gpt import GPT
from megatron.training.layout import check_layout

BASE = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50 --num-layers 2 --hidden-size 32 --seq-length 32 "
    "--num-attention-heads 4 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --context-parallel-size"
)
NO_DROPOUT = "--attention-dropout 0"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"4 {NO_DROPOUT} --seq-length 36", "needs a --seq-length that 8 divides .* not 36; choose 32 or 40"),
        (
            f"2 {NO_DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel --seq-length 36",
            "needs a --seq-length that 8 divides .*, split by --sequence-parallel",
        ),
        (
            f"4 {NO_DROPOUT} --cp-comm-type a2a --group-query-attention --num-query-groups 2",
            "divides the heads of a rank by 4, which has 4 query heads and 2 query groups",
        ),
        (f"2 {NO_DROPOUT} --loss-mean microbatches", "needs --loss-mean tokens"),
        (
            f"4 {NO_DROPOUT} --cp-comm-type a2a+p2p",
            "^--cp-comm-type a2a.p2p needs --hierarchical-context-parallel-sizes, such as 2 2, the groups",
        ),
        (
            f"1 {NO_DROPOUT} --cp-comm-type a2a+p2p",
            "^--cp-comm-type: a2a.p2p needs --context-parallel-size above 1; leave it out$",
        ),
        (
            f"4 {NO_DROPOUT} --hierarchical-context-parallel-sizes 2 2",
            "^--hierarchical-context-parallel-sizes needs --cp-comm-type a2a.p2p; add it or drop",
        ),
        (
            f"4 {NO_DROPOUT} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            "2 4 must be two sizes whose product is --context-parallel-size 4",
        ),
    ],
)
def test_impossible_runs_are_told_before_they_start(flags: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config = parse_run_config([*BASE.split(), *flags.split()], description="", defaults={})
        parallel = config.parallel
        check_layout(config, parallel.context_parallel_size * parallel.tensor_model_parallel_size)
        plugins.prepared(config, GPT)
