#!/usr/bin/env bash
# Pretrain the 1.7-billion-parameter GPT of arXiv 2104.04473 (table 1) on 32 A100 80GB GPUs as in the paper: 4 nodes
# with 8 GPUs, data-parallel size 32, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_1.7b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for this model. Tokens and schedule are those of GPT-3 (2005.14165), and the learning
# rate is that of GPT-3 2.7B. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=4}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 24 --hidden-size 2304 --num-attention-heads 24 --init-method-std 0.0120 \
  --make-vocab-size-divisible-by 1024 \
  --micro-batch-size 16 --global-batch-size 512 "${gpt3_settings[@]}" \
  --lr 1.6e-4 --min-lr 1.6e-5 "$@"
