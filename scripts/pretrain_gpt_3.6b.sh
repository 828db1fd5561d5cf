#!/usr/bin/env bash
# Pretrain the 3.6-billion-parameter GPT of arXiv 2104.04473 (table 1) on 64 A100 80GB GPUs as in the paper: 8 nodes
# with 8 GPUs, tensor-parallel size 2, data-parallel size 32, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_3.6b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for this model. Tokens and schedule are those of GPT-3 (2005.14165), and the learning
# rate is that of GPT-3 6.7B. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=8}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 30 --hidden-size 3072 --num-attention-heads 32 --init-method-std 0.0104 \
  --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 512 \
  --micro-batch-size 16 --global-batch-size 512 "${gpt3_settings[@]}" \
  --lr 1.2e-4 --min-lr 1.2e-5 "$@"
