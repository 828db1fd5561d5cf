"""Every layout trains the same model as one process: `megatron verify` finds no difference beyond rounding."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megatron.commands.verify import parse, start_run
from megatron.verify.compare import Comparer
from megatron.verify.format import KINDS, Capture
from megatron.verify.layouts import Layout
from megatron.verify.reference import Reference
from megatron.verify.runner import Check, Runs, Verification
from megatron.verify.shrink import ADAM_EPS, Shrunk
from megatron.verify.tolerance import Rounding

BATCH = 4
# For comparisons that allow no difference.
ROUNDING = Rounding("fp32", 1, 1, 1)
# The 251 ids are padded to 256 rows, or to 512 with four tensor-parallel ranks.
FLAGS = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size {BATCH} --train-iters 3 --lr 2e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 1 --num-workers 0 --device cpu
    --adam-eps {ADAM_EPS} --distributed-timeout-minutes 1
"""
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
"""
LATENT = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --multi-latent-attention --kv-lora-rank 128 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10
"""
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.2"
SHAPES = {
    "gpt2": "",
    "bert": DROPOUT,
    "bert of one sentence": "--bert-no-binary-head --seq-length 32 --position-embedding-type rope",
    "llama": LLAMA,
    "qwen2": f"{LLAMA} --add-qkv-bias",
    "qwen3": f"{LLAMA} --qk-layernorm",
    "olmo2": f"{LLAMA} --qk-layernorm --qk-layernorm-all-heads --norm-after --lr 2e-4",
    "opt": "--activation-function relu",
    "gpt_neox": "--position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual",
    "bloom": "--position-embedding-type alibi --embed-layernorm --init-method-std 0.1",
    "gemma": "--position-embedding-type rope --normalization RMSNorm --activation-function geglu --disable-bias-linear "
    "--group-query-attention --apply-layernorm-1p --scale-embeddings --kv-channels 16",
    "deepseek": f"{LATENT} --q-lora-rank 64",
    "deepseek without query latent": LATENT,
    "deepseek muon": f"{LATENT} --q-lora-rank 64 --optimizer muon",
    "mtp": f"{LLAMA} --mtp-num-layers 2",
    "mtp tied": "--position-embedding-type rope --mtp-num-layers 1 --mtp-loss-scaling-factor 0.5",
    "lion": "--optimizer lion --lr 2e-4",
    "muon": f"{LLAMA} --optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov",
}
# Flags other than a model's shape, which layouts must not change the result of either.
VARIANTS = {
    # Xavier's bound depends on the number of outputs, which for the output layer excludes padding to 300 or 400 rows.
    "xavier": f"{LLAMA} --init-method-xavier-uniform --make-vocab-size-divisible-by 100",
    "bf16": "--bf16",
    "fp32 residual stream": "--bf16 --fp32-residual-connection",
    "gradients in bf16": "--grad-reduce-in-bf16",
    "muon of gradients in bf16": f"{LLAMA} --optimizer muon --grad-reduce-in-bf16",
    "dropout": f"{DROPOUT}",
    # Counts up over 81 ids, the last of which ends a document. With two tensor-parallel ranks the rows of the output
    # layer are as many as its losses.
    "dropout and documents": f"{LLAMA} {DROPOUT} --vocab-size 80 --seq-length 128 --reset-attention-mask",
    "scores": f"{LLAMA} --softmax-type learnable --attn-logit-softcapping 5 --window-size 5,0 "
    "--window-attn-skip-freq 2",
    "documents": f"{LLAMA} --vocab-size 80 --seq-length 128 --reset-attention-mask --reset-position-ids "
    "--eod-mask-loss --attention-dropout 0.1",
}
# Initial weights that keep the scores of a token's experts apart, so that rounding does not change their choice.
MIXTURE = f"{LLAMA} --init-method-std 0.1 --num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk"
MIXTURES = {
    "mixtral": f"{MIXTURE} 2 --moe-aux-loss-coeff 0.1",
    "mixture": f"{MIXTURE} 4 --moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-enable-expert-bias --moe-z-loss-coeff 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2 "
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate --moe-layer-freq [0]*1+[1]*3",
    "mixture of 8 layers": f"{MIXTURE} 2 --moe-router-pre-softmax --moe-layer-freq 2",
    "capacity": f"{MIXTURE} 2 --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1",
    "capacity by position": f"{MIXTURE} 2 --moe-expert-capacity-factor 0.75 --moe-token-drop-policy position",
    "mixture of gradients in bf16": f"{MIXTURE} 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--grad-reduce-in-bf16",
    "mtp of experts": f"{MIXTURE} 2 --moe-aux-loss-coeff 0.1 --mtp-num-layers 1",
    "mixture by muon": f"{MIXTURE} 2 --optimizer muon --muon-extra-scale-factor 0.2",
}
RUNS = SHAPES | VARIANTS | MIXTURES
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SP, CHUNKS = "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage"
EMBEDDING_COUNTS = "--account-for-embedding-in-pipeline-split"
LOSS_COUNTS = "--account-for-loss-in-pipeline-split"
ZERO = "--use-distributed-optimizer"
CP, COMM, HIERARCHY = "--context-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes"
ZERO2, ZERO3 = (f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params"))
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
INSTANCES = "--num-distributed-optimizer-instances 2"
DENSE_LAYOUTS = {
    "T2": (2, f"{TP} 2"),
    "T2+SP": (2, f"{TP} 2 {SP}"),
    "T4": (4, f"{TP} 4"),
    "P2": (2, f"{PP} 2"),
    "P2 gpipe": (2, f"{PP} 2 --pipeline-schedule gpipe"),
    "P2 uneven": (2, f"{PP} 2 --decoder-first-pipeline-num-layers 3"),
    "P4": (4, f"{PP} 4"),
    "P4 uneven": (
        4,
        f"{PP} 4 --decoder-first-pipeline-num-layers 0 --decoder-last-pipeline-num-layers 2",
    ),
    "P2 layout": (2, f"{PP} 2 --pipeline-model-parallel-layout Et|t*3,L"),
    "P4 ends counted": (4, f"{PP} 4 {EMBEDDING_COUNTS} {LOSS_COUNTS} --num-layers 6"),
    "P2V2": (2, f"{PP} 2 {CHUNKS} 1"),
    "P2V2 layout": (2, f"{PP} 2 --pipeline-model-parallel-layout Ett|(t|)*2L"),
    "P2V3 ends counted": (2, f"{PP} 2 {CHUNKS} 1 {EMBEDDING_COUNTS} {LOSS_COUNTS}"),
    "P4V2": (4, f"{PP} 4 {CHUNKS} 1 --num-layers 8"),
    "P2 zb-h1": (2, f"{PP} 2 --pipeline-schedule zb-h1"),
    "P4 zb-h2": (4, f"{PP} 4 --pipeline-schedule zb-h2"),
    "P2 zb-v": (2, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule zb-v"),
    "P4 zb-v": (4, f"{PP} 4 {CHUNKS} 1 --num-layers 8 --pipeline-schedule zb-v"),
    "P2 v-min": (2, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule v-min"),
    "P4 v-min": (4, f"{PP} 4 {CHUNKS} 1 --num-layers 8 --pipeline-schedule v-min"),
    "P4 v-half": (4, f"{PP} 4 {CHUNKS} 1 --num-layers 8 --pipeline-schedule v-half"),
    "P2 dualpipe-v": (2, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule dualpipe-v"),
    "P4 auto": (4, f"{PP} 4 --pipeline-schedule auto"),
    "P2 auto V": (2, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule auto --pipeline-microbatches-in-flight 3"),
    "P2 breadth-first": (2, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule breadth-first"),
    "T2P2 zb-h1+SP": (4, f"{TP} 2 {PP} 2 {SP} --pipeline-schedule zb-h1 {ZERO} --overlap-param-gather"),
    "T2P2 zb-v": (4, f"{TP} 2 {PP} 2 {CHUNKS} 1 --pipeline-schedule zb-v --recompute-granularity full"),
    "P2D2 zb-v": (4, f"{PP} 2 {CHUNKS} 1 --pipeline-schedule zb-v {ZERO} --overlap-param-gather"),
    "D2": (2, ""),
    "D2 overlapped": (2, "--overlap-grad-reduce --ddp-bucket-size 5000"),
    "D2+ZeRO": (2, ZERO),
    "D2+ZeRO2": (2, ZERO2),
    "D2+ZeRO3": (2, f"{ZERO3} --ddp-bucket-size 2000"),
    "D2+ZeRO2 overlapped": (2, f"{ZERO2} --overlap-grad-reduce --overlap-param-gather"),
    "D2+ZeRO3 overlapped, recomputed": (
        2,
        f"{ZERO3} --overlap-grad-reduce --overlap-param-gather --recompute-granularity full --recompute-num-layers 3",
    ),
    "D4": (4, ""),
    "T2P2": (4, f"{TP} 2 {PP} 2"),
    "T2P2 no scatter-gather": (4, f"{TP} 2 {PP} 2 --no-scatter-gather-tensors-in-pipeline"),
    "T2P2+SP": (4, f"{TP} 2 {PP} 2 {SP}"),
    "T4+SP": (4, f"{TP} 4 {SP}"),
    "T2D2+ZeRO": (4, f"{TP} 2 {ZERO} {OVERLAP}"),
    "T2D2+ZeRO2": (4, f"{TP} 2 {ZERO2} {OVERLAP}"),
    "T2D2+SP+ZeRO3": (4, f"{TP} 2 {SP} {ZERO3} {OVERLAP}"),
    "D4+ZeRO in 2": (4, f"{ZERO} {INSTANCES} {OVERLAP}"),
    "D4+ZeRO2 in 2": (4, f"{ZERO2} {INSTANCES}"),
    "D4+ZeRO3 in 2": (4, f"{ZERO3} {INSTANCES} {OVERLAP}"),
    "D2+ZeRO3 in 2": (2, f"{ZERO3} {INSTANCES} {OVERLAP}"),  # nothing to shard
    "T2D4+SP+ZeRO3 in 2": (8, f"{TP} 2 {SP} {ZERO3} {INSTANCES}"),
    "P2D4+ZeRO in 2": (8, f"{PP} 2 {ZERO} {INSTANCES}"),
    "P2D2+ZeRO2": (4, f"{PP} 2 {ZERO2} {OVERLAP}"),
    "P2D2+ZeRO3": (4, f"{PP} 2 {ZERO3}"),
    "P2D2 gpipe+ZeRO3": (4, f"{PP} 2 --pipeline-schedule gpipe {ZERO3} {OVERLAP}"),
    "P2D2V2+ZeRO3 recomputed": (4, f"{PP} 2 {CHUNKS} 1 {ZERO3} {OVERLAP} --recompute-granularity full"),
    "P2D2 breadth-first+ZeRO3": (
        4,
        f"{PP} 2 {CHUNKS} 1 --pipeline-schedule breadth-first {ZERO3} {OVERLAP} {INSTANCES}",
    ),
    "everything+ZeRO3": (8, f"{TP} 2 {PP} 2 {SP} {CHUNKS} 1 {ZERO3} {OVERLAP} --recompute-granularity full"),
    "P2D2V2": (4, f"{PP} 2 {CHUNKS} 1"),
    "P4 few microbatches": (4, f"{PP} 4 --micro-batch-size 2"),  # fewer microbatches than stages
    "everything": (
        8,
        f"{TP} 2 {PP} 2 {SP} {CHUNKS} 1 {ZERO} {OVERLAP} --recompute-granularity full",
    ),
    # No shorthands of these flags, which the reference would keep.
    "recomputed": (1, "--recompute-granularity full --recompute-num-layers 3"),
    "block recomputed": (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 3"),
    "selectively recomputed": (1, "--recompute-granularity selective"),
    "T2 distributed activations": (2, f"{TP} 2 --recompute-granularity full --distribute-saved-activations"),
}
CONTEXT_LAYOUTS = {
    "C2": (2, f"{CP} 2"),
    "C2 all-gather": (2, f"{CP} 2 {COMM} all_gather"),
    "C2 all-to-all": (2, f"{CP} 2 {COMM} a2a"),
    "C4": (4, f"{CP} 4"),
    "C4 all-gather": (4, f"{CP} 4 {COMM} all_gather"),
    "C4 all-to-all": (4, f"{CP} 4 {COMM} a2a"),
    "C4 two levels": (4, f"{CP} 4 {COMM} a2a+p2p {HIERARCHY} 2 2"),
    "C2 recomputed": (2, f"{CP} 2 --recompute-granularity full"),
    "C2 selectively recomputed": (2, f"{CP} 2 {COMM} a2a --recompute-granularity selective"),
    "C2D2": (4, f"{CP} 2"),
    "C2D2+ZeRO": (4, f"{CP} 2 {ZERO} {OVERLAP}"),
    "C2D2+ZeRO in 2": (4, f"{CP} 2 {ZERO} {INSTANCES}"),
    "C2+ZeRO3": (2, f"{CP} 2 {ZERO3} {OVERLAP}"),
    "C2+ZeRO all-gather": (2, f"{CP} 2 {COMM} all_gather {ZERO} {OVERLAP}"),
    "T2C2": (4, f"{TP} 2 {CP} 2"),
    "T2C2+SP": (4, f"{TP} 2 {CP} 2 {SP}"),
    "T2C2+SP all-gather": (4, f"{TP} 2 {CP} 2 {SP} {COMM} all_gather"),
    "T2C2+SP all-to-all": (4, f"{TP} 2 {CP} 2 {SP} {COMM} a2a"),
    "T2C4+SP": (8, f"{TP} 2 {CP} 4 {SP}"),
    "C2P2": (4, f"{CP} 2 {PP} 2"),
    "C2P2 zb-v": (4, f"{CP} 2 {PP} 2 {CHUNKS} 1 --pipeline-schedule zb-v"),
    "C2P2 gpipe": (4, f"{CP} 2 {PP} 2 --pipeline-schedule gpipe"),
    "C2P2V2": (4, f"{CP} 2 {PP} 2 {CHUNKS} 1"),
    "C2P2V2 all-to-all": (4, f"{CP} 2 {PP} 2 {CHUNKS} 1 {COMM} a2a"),
    "everything, C2": (
        8,
        f"{TP} 2 {CP} 2 {PP} 2 {SP} {CHUNKS} 1 {ZERO} {OVERLAP} --recompute-granularity full",
    ),
}
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
GATHER, GROUPED = "--moe-token-dispatcher-type allgather", "--moe-grouped-gemm"
EXPERTS_RECOMPUTED, PADDED = "--moe-layer-recompute", "--moe-pad-expert-input-to-capacity"
RECOMPUTED, SHARED_OVERLAPPED = "--recompute-granularity full", "--moe-shared-expert-overlap"
OVERLAPPED = "--overlap-grad-reduce --ddp-bucket-size 5000"
EXPERT_LAYOUTS = {
    "E2": (2, f"{EP} 2"),
    "E4": (4, f"{EP} 4"),
    "E2 all-gather": (2, f"{EP} 2 {GATHER}"),
    "E2 grouped": (2, f"{EP} 2 {GROUPED}"),
    "E2 experts recomputed": (2, f"{EP} 2 {EXPERTS_RECOMPUTED}"),
    "E2 recomputed": (2, f"{EP} 2 {RECOMPUTED} {EXPERTS_RECOMPUTED}"),
    "E2 shared expert overlapped": (2, f"{EP} 2 {SHARED_OVERLAPPED}"),
    "T2E2+SP shared expert overlapped": (2, f"{TP} 2 {EP} 2 {ETP} 1 {SP} {SHARED_OVERLAPPED}"),
    "T2D2E2 shared expert overlapped": (
        4,
        f"{TP} 2 {EP} 2 {SHARED_OVERLAPPED} {EXPERTS_RECOMPUTED} {OVERLAPPED}",
    ),
    "E2+ZeRO": (2, f"{EP} 2 {ZERO}"),
    "D4E2": (4, f"{EP} 2"),
    "D4E2 overlapped": (4, f"{EP} 2 {OVERLAPPED}"),
    "D4E2+ZeRO": (4, f"{EP} 2 {ZERO} {OVERLAP}"),
    "D4E2+ZeRO in 2": (4, f"{EP} 2 {ZERO} {INSTANCES} {OVERLAP}"),
    "T2D4E2+ZeRO3 in 2": (8, f"{TP} 2 {EP} 2 {ZERO3} {INSTANCES}"),
    "D4E2+ZeRO3": (4, f"{EP} 2 {ZERO3} {OVERLAP}"),
    "T2D2E2+SP+ZeRO2": (4, f"{TP} 2 {EP} 2 {SP} {ZERO2} {OVERLAP}"),
    "D4E2 all-gather+ZeRO": (4, f"{EP} 2 {GATHER} {ZERO}"),
    "D2ET2": (2, f"{ETP} 2"),
    "D4E2ET2": (4, f"{EP} 2 {ETP} 2"),
    "D4E2ET2 all-gather": (4, f"{EP} 2 {ETP} 2 {GATHER}"),
    "D4ET2+ZeRO": (4, f"{ETP} 2 {ZERO} {OVERLAP}"),
    "T2ET1": (2, f"{TP} 2 {ETP} 1"),
    "T2E2": (2, f"{TP} 2 {EP} 2 {ETP} 1"),
    "T2E2+SP": (2, f"{TP} 2 {EP} 2 {ETP} 1 {SP}"),
    "T2E2 all-gather+SP": (2, f"{TP} 2 {EP} 2 {ETP} 1 {SP} {GATHER}"),
    "T2D2E2": (4, f"{TP} 2 {EP} 2"),
    "T2D2E2+SP+ZeRO": (4, f"{TP} 2 {EP} 2 {SP} {ZERO} {OVERLAP}"),
    "T2D2E2ET1+SP": (4, f"{TP} 2 {EP} 2 {ETP} 1 {SP}"),
    "T2D2E4+SP": (4, f"{TP} 2 {EP} 4 {ETP} 1 {SP}"),
    "T2D2E4 grouped, recomputed": (
        4,
        f"{TP} 2 {EP} 4 {ETP} 1 {SP} {GROUPED} {RECOMPUTED} {EXPERTS_RECOMPUTED}",
    ),
    "T2D2ET1+ZeRO": (4, f"{TP} 2 {ETP} 1 {ZERO} {OVERLAP}"),
    "T2D2ET4": (4, f"{TP} 2 {ETP} 4"),
    "T4E4+SP": (4, f"{TP} 4 {EP} 4 {ETP} 1 {SP}"),
    "T4E2ET2": (4, f"{TP} 4 {EP} 2 {ETP} 2"),
    "P2E2": (4, f"{PP} 2 {EP} 2"),
    "P2E2 gpipe": (4, f"{PP} 2 {EP} 2 --pipeline-schedule gpipe"),
    "P2D4E2+ZeRO3": (8, f"{PP} 2 {EP} 2 {ZERO3} {OVERLAP}"),
    "P2E2V2": (4, f"{PP} 2 {EP} 2 {CHUNKS} 1 {ZERO} {OVERLAP}"),
    "P2E2 a dense stage": (4, f"{PP} 2 {EP} 2 --decoder-first-pipeline-num-layers 1 {ZERO}"),
    "P2 a dense stage": (2, f"{PP} 2 --decoder-first-pipeline-num-layers 1 --log-num-zeros-in-grad"),
    "T2P2E2+SP": (4, f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1 {SP}"),
    "T2P2E2 recomputed": (
        4,
        f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1 {RECOMPUTED} --distribute-saved-activations {EXPERTS_RECOMPUTED}",
    ),
    "everything, E2": (
        8,
        f"{TP} 2 {PP} 2 {EP} 2 {SP} {CHUNKS} 1 {ZERO} {OVERLAP} {RECOMPUTED} {GROUPED}",
    ),
    "everything, E4": (
        8,
        f"{TP} 2 {PP} 2 {EP} 4 {ETP} 1 {SP} {CHUNKS} 1 {ZERO} {OVERLAP} {EXPERTS_RECOMPUTED}",
    ),
    "C2E2": (2, f"{CP} 2 {EP} 2"),
    "C2D2E4+ZeRO": (4, f"{CP} 2 {EP} 4 {ZERO} {OVERLAP}"),
    "T2C2E2+SP": (4, f"{TP} 2 {CP} 2 {EP} 2 {SP}"),
    "T2C2E4 all-gather": (4, f"{TP} 2 {CP} 2 {EP} 4 {ETP} 1 {GATHER} {COMM} all_gather"),
    "C2P2E2": (4, f"{CP} 2 {PP} 2 {EP} 2"),
    "grouped": (1, GROUPED),
    "experts recomputed": (1, EXPERTS_RECOMPUTED),
    "padded": (1, PADDED),
    "E2 padded": (2, f"{EP} 2 {PADDED}"),
    "E2 padded all-gather": (2, f"{EP} 2 {PADDED} {GATHER}"),
    "T2D2E2 padded": (4, f"{TP} 2 {EP} 2 {PADDED} {GROUPED} {SP}"),
}
LAYOUTS = DENSE_LAYOUTS | CONTEXT_LAYOUTS | EXPERT_LAYOUTS
# The layouts that shapes of other models' parts are trained in.
FEW_LAYOUTS = {
    "bert of one sentence": [],
    "qwen2": ["T4"],
    "qwen3": ["T4"],
    "olmo2": ["T4", "T2P2+SP"],
    "opt": ["T2P2+SP"],
    "gpt_neox": ["T2P2+SP"],
    "bloom": ["T2", "P2", "T2P2+SP"],
    "gemma": ["T2", "P2", "T2P2+SP"],
    "deepseek": [
        "T2",
        "T2+SP",
        "T4+SP",
        "T2D2+ZeRO",
        "P2",
        "recomputed",
        "selectively recomputed",
        "everything",
    ],
    "deepseek without query latent": ["T2", "T2+SP"],
    "deepseek muon": ["T2+SP", "T2D2+ZeRO"],
    "mtp": [
        "T2",
        "T2+SP",
        "T4+SP",
        "P2",
        "P2V2",
        "P2V3 ends counted",
        "P4",
        "D2+ZeRO",
        "T2P2+SP",
        "recomputed",
        "everything",
    ],
    "mtp tied": ["T2+SP", "P2", "P2V2", "P2 zb-h1", "P2 zb-v", "P4", "D2+ZeRO", "everything"],
    "xavier": ["T2"],
    "bf16": ["T2+SP", "P2V2", "P2D2 zb-v", "P2 zb-h1", "T2P2 zb-h1+SP", "D2+ZeRO", "everything"],
    "fp32 residual stream": ["P2V2", "everything"],
    "gradients in bf16": ["D2+ZeRO"],
    "muon of gradients in bf16": ["D2+ZeRO"],
    "dropout": ["P2V2", "P2 zb-v", "D2+ZeRO", "recomputed", "selectively recomputed"],
    "documents": ["P2V2", "D2+ZeRO", "recomputed", "selectively recomputed", "T2+SP", "everything"],
    "mixture": [
        *(
            "T2",
            "T2+SP",
            "T4+SP",
            "P2",
            "P2V2",
            "D2",
            "D2+ZeRO",
            "T2P2",
            "recomputed",
            "selectively recomputed",
        ),
        *(name for name in EXPERT_LAYOUTS if "padded" not in name and CP not in EXPERT_LAYOUTS[name][1]),
    ],
    "mixtral": [
        "P2 zb-h1",
        "P4 zb-v",
        "T2",
        "D2+ZeRO",
        "E2",
        "D4E2+ZeRO",
        "T2D2E2",
        "T2D2E4+SP",
        "P2E2V2",
        "everything, E2",
    ],
    "mixture of 8 layers": ["P4V2"],
    "capacity": [
        *("T2+SP", "E2", "E2 all-gather", "T2D2E4+SP"),
        *(name for name in EXPERT_LAYOUTS if "padded" in name),
    ],
    "capacity by position": ["T2+SP", "T2D2E2 padded"],
    "mixture of gradients in bf16": ["D2+ZeRO", "E2"],
    "mtp of experts": ["T2D2E2+SP+ZeRO", "P2E2"],
    "mixture by muon": ["D4E2+ZeRO", "T2D2E4+SP"],
}
# Some layouts with sharded gradients and parameters.
SHARDED = {
    "deepseek muon": ["T2D2+SP+ZeRO3"],
    "mtp": ["D2+ZeRO2", "D2+ZeRO3 overlapped, recomputed"],
    "mtp tied": ["D2+ZeRO3", "P2D2+ZeRO3"],
    "bf16": ["D2+ZeRO2 overlapped", "D2+ZeRO3", "D4+ZeRO in 2", "D4+ZeRO3 in 2"],
    "gradients in bf16": ["D2+ZeRO2 overlapped", "D4+ZeRO in 2"],
    "muon of gradients in bf16": ["D2+ZeRO3"],
    "dropout": ["D2+ZeRO3 overlapped, recomputed"],
    "mixture by muon": ["D4E2+ZeRO3"],
}
FEW_LAYOUTS |= {shape: [*FEW_LAYOUTS[shape], *names] for shape, names in SHARDED.items()}
# Layouts with context parallelism. Four ranks cannot exchange the two key heads of "llama".
FEW_CONTEXT_LAYOUTS = {
    "gpt2": list(CONTEXT_LAYOUTS),
    "llama": ["C2 all-to-all", "C4", "C4 all-gather", "T2C4+SP", "C2P2V2", "everything, C2"],
    "qwen3": ["T2C2+SP"],
    "bert": ["C2", "C4 all-gather", "C2 all-to-all", "T2C2+SP", "C2P2V2", "C4 two levels"],
    "bert of one sentence": ["C2"],
    "mtp": ["C2", "C4 all-gather", "T2C2+SP", "C2 all-to-all", "C2P2V2"],
    "bloom": ["C2", "C4 all-gather", "T2C2+SP", "C2 all-to-all"],
    "dropout": ["C2", "C2 all-to-all", "C4", "C4 all-gather", "C4 two levels", "C2P2V2"],
    "dropout and documents": ["C2", "C2 all-to-all", "C4 all-gather"],
    "scores": ["C2", "C2 all-to-all", "C4 all-gather", "C4 two levels", "everything, C2"],
    "deepseek": ["C2", "C2 all-to-all", "C4 all-gather", "T2C2+SP"],
    "muon": ["C2D2+ZeRO"],
    "bf16": ["C2", "C4", "C2 all-to-all", "T2C2+SP", "T2C2+SP all-gather"],
    "documents": [
        "C2",
        "C2 all-to-all",
        "C4 all-gather",
        "C4 two levels",
        "everything, C2",
    ],
    "capacity": ["C2", "T2C2+SP"],
    "capacity by position": ["C4", "T2C2+SP"],
    "mixture": ["C4", "T2C2+SP", *(name for name in EXPERT_LAYOUTS if CP in EXPERT_LAYOUTS[name][1])],
}
# BERT: test_finetune.py runs T2P2+SP. "dropout" is GPT-2's shape with masks.
FAST = {
    "gpt2": "P2 zb-v|everything|D2+ZeRO2 overlapped|D2+ZeRO3 overlapped, recomputed",
    "dropout": "D2+ZeRO|C2|recomputed|selectively recomputed",
    "mixture": "T2E2+SP|P2E2 a dense stage",
}


class Layouts:
    """Verifies runs in a folder, with one reference for each shape."""

    def __init__(self, references: dict[object, dict[bool, Comparer]], folder: Path) -> None:
        self.references, self.folder = references, folder

    def runs(self, shape: str, layout: str, flags: str = "") -> tuple[Runs, Layout]:
        script, processes = (
            "pretrain_bert" if shape.startswith("bert") else "pretrain_gpt",
            LAYOUTS[layout][0],
        )
        config = parse(script, f"{FLAGS} {RUNS[shape]} {LAYOUTS[layout][1]} {flags}".split())
        parallel, size = config.parallel, config.training.micro_batch_size
        own = Layout.from_config(parallel, processes)
        start = functools.partial(start_run, script, 240.0)
        runs = Runs(Shrunk(config, parallel, own, ()), [own], self.folder, start)
        key = shape, size, config.model.num_layers, flags
        runs.batch, runs.comparers = BATCH, self.references.setdefault(key, {})
        return runs, own

    def verification(self, shape: str, layout: str) -> tuple[Verification, Layout]:
        runs, own = self.runs(shape, layout)
        return Verification(runs, [own], lambda check: None), own

    def capture(self, name: str, layout: str, flags: str, **sections: dict) -> Capture:
        """Capture of a run with dropout."""
        runs, own = self.runs("dropout", layout, flags)
        config = runs.configured(own, True, **sections)
        return runs.launch(Check(name=name, processes=own.processes), config, name)


@pytest.fixture(scope="module")
def references() -> dict[object, dict[bool, Comparer]]:
    return {}


@pytest.fixture
def layouts(references: dict[object, dict[bool, Comparer]], tmp_path: Path) -> Layouts:
    return Layouts(references, tmp_path)


def assert_passed(check: Check) -> None:
    assert check.passed, str(check.finding or check.error)
    assert check.compared > 100, check.not_covered


def assert_equal(one: Capture, other: Capture, steps: range) -> None:
    # Tensor-parallel ranks have masks of their own, which hold no whole mask.
    kinds = [kind for kind in KINDS if kind != "mask"]
    found = list(Comparer(Reference(one, [], ROUNDING)).compare(other, steps=steps, kinds=kinds, exact=True))
    assert len(found) > 100
    assert not [c.record.id for c in found if not c.passed]


CASES = [
    pytest.param(
        shape,
        layout,
        marks=() if layout in FAST.get(shape, "").split("|") else pytest.mark.slow,
        id=f"{shape}-{layout.replace(' ', '-')}",
    )
    for shape in RUNS
    for layout in (*FEW_LAYOUTS.get(shape, DENSE_LAYOUTS), *FEW_CONTEXT_LAYOUTS.get(shape, ()))
]


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_same_as_one_process(layouts: Layouts, shape: str, layout: str) -> None:
    verification, own = layouts.verification(shape, layout)
    assert_passed(verification.verify(own))


@pytest.mark.parametrize(
    "recomputation",
    [
        "--checkpoint-activations",
        pytest.param("--checkpoint-activations --distribute-saved-activations", marks=pytest.mark.slow),
        pytest.param("--recompute-activations", marks=pytest.mark.slow),
        pytest.param(f"--checkpoint-activations {SP}", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_replayed_exactly(layouts: Layouts, recomputation: str) -> None:
    one = layouts.capture("stored", "T2", SP if SP in recomputation else "")
    assert_equal(one, layouts.capture("recomputed", "T2", recomputation), range(4))


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        # By default tests/checkpoint/test_resharding.py loads Muon's checkpoints in other layouts.
        pytest.param("D2+ZeRO", "T2", "muon", marks=pytest.mark.slow),
        pytest.param("T2D2+ZeRO", "P2V2", "llama", marks=pytest.mark.slow),
        pytest.param("P2V2", "D2+ZeRO", "llama", marks=pytest.mark.slow),
        pytest.param("P2V2 layout", "P2 layout", "llama", marks=pytest.mark.slow),
        pytest.param("P2D2 zb-v", "P4", "gpt2", marks=pytest.mark.slow),
        pytest.param("T2P2", "P2D2 zb-v", "gpt2", marks=pytest.mark.slow),
        pytest.param("P2 layout", "P2V3 ends counted", "gpt2", marks=pytest.mark.slow),
        pytest.param("everything", "T4", "llama", marks=pytest.mark.slow),
        pytest.param("P2V2", "D2+ZeRO", "mtp", marks=pytest.mark.slow),
        pytest.param("D2+ZeRO", "P2", "mtp tied", marks=pytest.mark.slow),
        pytest.param("everything", "D2+ZeRO", "muon", marks=pytest.mark.slow),
        pytest.param("E2+ZeRO", "T2", "mixture", marks=pytest.mark.slow),
        pytest.param("T2+SP", "D4E2+ZeRO", "mixture", marks=pytest.mark.slow),
        pytest.param("D4E2ET2", "T2D2E4+SP", "mixture", marks=pytest.mark.slow),
        pytest.param("everything, E4", "E4", "mixture", marks=pytest.mark.slow),
        pytest.param("everything, E2", "D4ET2+ZeRO", "mixtral", marks=pytest.mark.slow),
        pytest.param("D4E2+ZeRO", "P2E2", "mixture by muon", marks=pytest.mark.slow),
        pytest.param("D2+ZeRO3", "T2P2", "llama", marks=pytest.mark.slow),
        pytest.param("T2P2", "T2D2+SP+ZeRO3", "muon", marks=pytest.mark.slow),
        pytest.param("P2D2V2+ZeRO3 recomputed", "D2+ZeRO3", "llama", marks=pytest.mark.slow),
        pytest.param("D4+ZeRO in 2", "T2P2", "muon", marks=pytest.mark.slow),
        pytest.param("T2D2+ZeRO", "D4+ZeRO3 in 2", "llama", marks=pytest.mark.slow),
        pytest.param("D4+ZeRO3 in 2", "D4+ZeRO2 in 2", "gpt2", marks=pytest.mark.slow),
        pytest.param("D4E2+ZeRO in 2", "D4E2+ZeRO3", "mixture", marks=pytest.mark.slow),
        pytest.param("T2D2E2+SP+ZeRO2", "D4E2+ZeRO3", "mixture", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_layout(layouts: Layouts, before: str, after: str, shape: str) -> None:
    verification, own = layouts.verification(shape, before)
    assert_passed(verification.verify(own, saves=True))
    verification, other = layouts.verification(shape, after)
    assert_passed(verification.resume(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *(
            (shape, layout)
            for shape in ("gpt2", "muon", "mtp")
            for layout in ("T2+SP", "T2D2+ZeRO", "T2D2+SP+ZeRO3", "D4+ZeRO3 in 2", "everything")
        ),
        *(("mixture", layout) for layout in ("D4E2+ZeRO", "D4E2+ZeRO3", "T2D2E4+SP", "everything, E2")),
    ],
)
def test_the_same_layout_resumes_bit_for_bit(layouts: Layouts, layout: str, shape: str) -> None:
    """The runs use dropout and data-loader worker processes."""
    flags, saved = f"{RUNS[shape]} --num-workers 1", str(layouts.folder / "saved")
    whole = layouts.capture("whole", layout, flags)
    layouts.capture("begun", layout, flags, checkpoint={"save": saved}, exit={"exit_interval": 2})
    assert_equal(whole, layouts.capture("resumed", layout, flags, checkpoint={"load": saved}), range(3, 4))
