#!/usr/bin/env bash
# Pretrain the 310.1-billion-parameter GPT of arXiv 2104.04473 (table 1) on 1920 A100 80GB GPUs as in the paper: 240
# nodes with 8 GPUs, tensor-parallel size 8, pipeline-parallel size 16 with 2 model chunks per rank, data-parallel size
# 15, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_310.1b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for this model. Tokens and schedule are those of GPT-3 (2005.14165), and the learning
# rate is that of Megatron-Turing NLG 530B (2201.11990). Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=240}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=200
pretrain_gpt --bf16 --num-layers 96 --hidden-size 16384 --num-attention-heads 128 --init-method-std 0.0045 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 \
  --micro-batch-size 1 --global-batch-size 2160 "${gpt3_settings[@]}" \
  --lr 5e-5 --min-lr 5e-6 "$@"
