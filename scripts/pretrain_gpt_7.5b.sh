#!/usr/bin/env bash
# Pretrain the 7.5-billion-parameter GPT of arXiv 2104.04473 (table 1) on 128 A100 80GB GPUs as in the paper: 16 nodes
# with 8 GPUs, tensor-parallel size 4, data-parallel size 32, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_7.5b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for this model. Tokens and schedule are those of GPT-3 (2005.14165), and the learning
# rate is that of GPT-3 13B. Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=16}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 36 --hidden-size 4096 --num-attention-heads 32 --init-method-std 0.0090 \
  --tensor-model-parallel-size 4 --make-vocab-size-divisible-by 256 \
  --micro-batch-size 16 --global-batch-size 512 "${gpt3_settings[@]}" \
  --lr 1.0e-4 --min-lr 1.0e-5 "$@"
