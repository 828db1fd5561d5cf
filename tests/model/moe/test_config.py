"""Impossible flags are refused in one line that names flag, value and remedy, before anything is started."""

from __future__ import annotations

import sys

import pytest
from models import config_of

from megatron import pretrain_bert
from megatron.errors import InputError
from megatron.model.bert_config import check_bert
from megatron.training.layout import check_layout

EXPERTS = "--disable-bias-linear --num-experts 8"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
TP, EP, ETP = "--tensor-model-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"

FLAGS = [
    ("--moe-router-topk 3", "--moe-router-topk: 3 needs --num-experts"),
    ("--moe-grouped-gemm", "--moe-grouped-gemm needs --num-experts"),
    ("--moe-z-loss-coeff 0.1", "--moe-z-loss-coeff: 0.1 needs --num-experts"),
    ("--moe-aux-loss-coeff 0.1 0.2", "--moe-aux-loss-coeff: 0.1 0.2 needs --num-experts"),
    ("--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type: allgather needs --num-experts"),
    (
        "--moe-shared-expert-intermediate-size 8",
        "--moe-shared-expert-intermediate-size: 8 needs --num-experts",
    ),
    ("--num-experts 8", "--num-experts: 8 experts have no biases; add --disable-bias-linear"),
    (f"{EXPERTS} --add-mlp-bias", "--num-experts: 8 experts have no biases; leave --add-mlp-bias out"),
    (f"{EXPERTS} --num-experts 1", "--num-experts: 1 "),
    (f"{EXPERTS} --moe-router-topk 9", "--moe-router-topk: 9 is more than --num-experts 8; choose 8 or less"),
    (f"{EXPERTS} --moe-router-topk 1", "--moe-router-topk: 1 makes the softmax over one expert 1,"),
    (
        f"{SIGMOID} --moe-router-pre-softmax",
        "--moe-router-pre-softmax needs --moe-router-score-function softmax",
    ),
    (
        f"{EXPERTS} --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
    ),
    (
        f"{SIGMOID} --moe-router-bias-update-rate 0.01",
        "--moe-router-bias-update-rate: 0.01 needs --moe-router-enable-expert-bias",
    ),
    (f"{EXPERTS} --moe-router-score-function tanh", "--moe-router-score-function: "),
    (f"{EXPERTS} --moe-router-num-groups 4", "--moe-router-num-groups: 4 needs --moe-router-group-topk"),
    (f"{EXPERTS} --moe-router-group-topk 2", "--moe-router-group-topk: 2 needs --moe-router-num-groups"),
    (
        f"{EXPERTS} --moe-router-num-groups 3 --moe-router-group-topk 1",
        "--moe-router-num-groups: 3 does not divide --num-experts 8; choose 1, 2, 4 or 8",
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 4",
        "--moe-router-group-topk: 4 is more than --moe-router-num-groups 2; choose 2 or less",
    ),
    (
        f"{EXPERTS} --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-group-topk: 2 groups of 2 experts cannot share --moe-router-topk 3 equally; choose a divisor "
        "of 3 "
        "that is at least 2",
    ),
    (
        f"{EXPERTS} --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 1",
        "--moe-router-group-topk: 1 groups of 2 experts cannot share --moe-router-topk 4 equally; choose a divisor "
        "of 4 "
        "that is at least 2",
    ),
    (
        f"{EXPERTS} --moe-aux-loss-coeff 0.1 0.2",
        "--moe-aux-loss-coeff: 2 values for 1 of --moe-router-load-balancing-type aux_loss; give one for each",
    ),
    (
        f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff: 1 values for 2 of --moe-router-load-balancing-type seq_aux_loss global_aux_loss; give "
        "one "
        "for each",
    ),
    (
        f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff: 0.1 needs a --moe-router-load-balancing-type other than none",
    ),
    (
        f"{EXPERTS} --moe-router-load-balancing-type none aux_loss --moe-aux-loss-coeff 0 0.1",
        "--moe-router-load-balancing-type: none aux_loss; name each type once",
    ),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type: "),
    (
        f"{EXPERTS} --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    ),
    (
        f"{EXPERTS} --moe-token-drop-policy position",
        "--moe-token-drop-policy: position needs --moe-expert-capacity-factor; without it no token is dropped",
    ),
    (
        f"{EXPERTS} --moe-shared-expert-gate",
        "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size",
    ),
    (
        f"{EXPERTS} --moe-shared-expert-overlap",
        "--moe-shared-expert-overlap needs --moe-shared-expert-intermediate-size",
    ),
    (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap --moe-token-dispatcher-type "
        "allgather",
        "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall",
    ),
    (f"{EXPERTS} --moe-layer-freq 0", "--moe-layer-freq: 0 must be at least 1, or a pattern such as"),
    (
        f"{EXPERTS} --moe-layer-freq [1]*x",
        "--moe-layer-freq: '[1]*x' is neither a number nor a pattern such as",
    ),
    (
        f"{EXPERTS} --moe-layer-freq [0]*1+[1]*4",
        "--moe-layer-freq: [0]*1+[1]*4 is for 5 layers, and --num-layers is 4",
    ),
    (
        f"{EXPERTS} --moe-layer-freq [0]*4",
        "--moe-layer-freq: [0]*4 gives no layer experts; leave --num-experts out",
    ),
    (f"{EXPERTS} --cuda-graph", "--cuda-graph: "),
    (
        f"{EXPERTS} {EP} 2 --sample-interval 5 --sample-prompts prompts.txt",
        "--sample-interval: 5 needs all experts of a layer in a replica, which generates alone; choose",
    ),
    (f"{EXPERTS} --bf16 --fp8-format hybrid", "--fp8-format: hybrid "),
    (
        f"{EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 18",
        "--moe-ffn-hidden-size: 18 is not a multiple of 4, as --moe-grouped-gemm needs in fp32; use a multiple of 4",
    ),
    (
        f"{EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 24 {ETP} 2 --bf16",
        "--moe-ffn-hidden-size: 24 is not a multiple of 8 on each of the 2 ranks that share an expert, as "
        "--moe-grouped-gemm needs in bf16; use a multiple of 16",
    ),
    (
        f"{EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 24 --hidden-size 36 --bf16",
        "--hidden-size: 36 is not a multiple of 8, as --moe-grouped-gemm needs in bf16; use a multiple of 8",
    ),
    (
        f"{EXPERTS} --optimizer muon {TP} 2",
        f"{ETP}: 2 (from {TP}) does not go with --optimizer muon",
    ),
    (f"{EXPERTS} --optimizer muon {ETP} 2", f"{ETP}: 2 does not go with --optimizer muon"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_flags_that_contradict_each_other(flags: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        config_of(flags)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


LAYOUTS = [
    (4, f"{EP} 2", f"{EP}: 2 needs --num-experts", ""),
    (3, f"{EP} 2", f"{EP}: 2 needs --num-experts", ""),
    (4, f"{ETP} 2", f"{ETP}: 2 needs --num-experts", ""),
    (
        4,
        f"{EXPERTS} {EP} 3",
        f"{EP}: 3 does not divide --num-experts 8, as --num-experts needs; choose 1 or 2",
        f"{EP} 2",
    ),
    (
        2,
        f"{EXPERTS} {EP} 4",
        f"{EP} 4 x {ETP} 1 does not divide the 2 processes of a pipeline stage; choose",
        f"{EP} 2",
    ),
    (
        2,
        f"{EXPERTS} {TP} 2 {EP} 2",
        f"{EP} 2 x {ETP} 2 does not divide the 2 processes of a pipeline stage; choose sizes whose product is 1 or 2",
        f"{ETP} 1",
    ),
    (
        4,
        f"{EXPERTS} --pipeline-model-parallel-size 2 {EP} 4",
        f"{EP} 4 x {ETP} 1 does not divide the 2 processes of a pipeline stage; choose",
        f"{EP} 2",
    ),
    (
        16,
        f"{EXPERTS} {EP} 16",
        f"{EP}: 16 does not divide --num-experts 8, as --num-experts needs; choose",
        f"{EP} 8",
    ),
    (
        4,
        f"{EXPERTS} {ETP} 4 --moe-ffn-hidden-size 6",
        f"{ETP}: 4 does not divide --moe-ffn-hidden-size 6, as --num-experts needs; choose 1, 2 or 3",
        f"{ETP} 2",
    ),
    (
        3,
        f"{EXPERTS} {ETP} 3 --add-expert-bias --moe-ffn-hidden-size 6",
        f"{ETP}: 3 does not divide --hidden-size 32, as --num-experts needs; choose 1 or 2",
        f"{ETP} 1",
    ),
    (
        4,
        f"{EXPERTS} {TP} 4 --moe-shared-expert-intermediate-size 6",
        f"{TP}: 4 does not divide --moe-shared-expert-intermediate-size 6, as --num-experts needs; choose 1, 2 or 3",
        f"{TP} 2",
    ),
    (
        4,
        f"{EXPERTS} {TP} 4 --seq-length 18",
        f"{TP}: 4 does not divide --seq-length 18, as --num-experts needs; choose 1, 2 or 3",
        f"{TP} 2",
    ),
    (
        16,
        f"{EXPERTS} {TP} 8 --num-attention-heads 8 --context-parallel-size 2 --seq-length 24 {ETP} 1",
        f"{TP}: 8 does not divide --seq-length / --context-parallel-size 12, as --num-experts needs; choose",
        "",
    ),
    (
        4,
        f"{EXPERTS} {TP} 4 --moe-ffn-hidden-size 6",
        f"{ETP}: 4 (from {TP}) does not divide --moe-ffn-hidden-size 6, as --num-experts needs; choose 1, 2 or 3",
        f"{ETP} 2",
    ),
]


@pytest.mark.parametrize(
    ("processes", "flags", "message", "remedy"), LAYOUTS, ids=[row[1] for row in LAYOUTS]
)
def test_layouts_that_do_not_fit(processes: int, flags: str, message: str, remedy: str) -> None:
    """The remedy, if any, is one that the message names."""
    with pytest.raises(InputError) as refused:
        check_layout(config_of(flags), processes)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
    if remedy:
        check_layout(config_of(f"{flags} {remedy}"), processes)


def test_bert_has_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point refuses them before it imports torch's part of the program."""
    with pytest.raises(InputError, match=r"^--num-experts: mixtures of experts are for GPT"):
        check_bert(config_of(EXPERTS).model)
    words = f"pretrain_bert {EXPERTS} --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1"
    words += " --micro-batch-size 1 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(InputError, match=r"^--num-experts: mixtures of experts are for GPT"):
        pretrain_bert.main()
