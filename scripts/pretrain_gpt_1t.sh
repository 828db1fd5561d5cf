#!/usr/bin/env bash
# Pretrain the 1-trillion-parameter GPT of arXiv 2104.04473 (table 1) on 3072 A100 80GB GPUs as in the paper: 384 nodes
# with 8 GPUs, tensor-parallel size 8, pipeline-parallel size 64, data-parallel size 6, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_1t.sh [flags of pretrain_gpt.py]
#
# It trains on the 450 billion tokens that section 5.1 of the paper assumes, with the learning rate of Megatron-Turing
# NLG (2201.11990). The paper gives no schedule. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=384}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=100
pretrain_gpt --bf16 --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --init-method-std 0.0036 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 64 \
  --micro-batch-size 1 --global-batch-size 3072 "${gpt3_settings[@]}" \
  --lr 5e-5 --min-lr 5e-6 --train-samples 219726562 --lr-decay-samples 219726562 --lr-warmup-samples 488281 "$@"
