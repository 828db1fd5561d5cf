#!/usr/bin/env bash
# Pretrain the 76.1-billion-parameter GPT of arXiv 2104.04473 (table 1) on 1024 A100 80GB GPUs as in the paper: 128
# nodes with 8 GPUs, tensor-parallel size 8, pipeline-parallel size 4 with 3 model chunks per rank, data-parallel size
# 32, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_76.1b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for this model. Tokens and schedule are those of GPT-3 (2005.14165), and the learning
# rate is that of GPT-3 175B. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=128}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 60 --hidden-size 10240 --num-attention-heads 80 --init-method-std 0.0057 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 \
  --micro-batch-size 2 --global-batch-size 1792 "${gpt3_settings[@]}" \
  --lr 6e-5 --min-lr 6e-6 "$@"
