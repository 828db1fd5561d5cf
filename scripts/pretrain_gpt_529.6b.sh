#!/usr/bin/env bash
# Pretrain the 529.6-billion-parameter GPT of arXiv 2104.04473 (table 1) on 2520 A100 80GB GPUs as in the paper: 315
# nodes with 8 GPUs, tensor-parallel size 8, pipeline-parallel size 35 with 3 model chunks per rank, data-parallel size
# 9, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_529.6b.sh [flags of pretrain_gpt.py]
#
# The schedule is that of Megatron-Turing NLG (2201.11990), which has the same shape: 270 billion tokens, but without
# its batch size rampup. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=315}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=200
pretrain_gpt --bf16 --num-layers 105 --hidden-size 20480 --num-attention-heads 128 --init-method-std 0.0040 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 35 --num-layers-per-virtual-pipeline-stage 1 \
  --micro-batch-size 1 --global-batch-size 2520 "${gpt3_settings[@]}" \
  --lr 5e-5 --min-lr 5e-6 --train-samples 131835937 --lr-decay-samples 166015625 --lr-warmup-samples 488281 "$@"
