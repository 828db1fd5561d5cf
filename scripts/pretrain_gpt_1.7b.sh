#!/usr/bin/env bash
# Pretrain the GPT of 1.7 billion parameters of arXiv 2104.04473 (table 1) on its 32 A100 GPUs of 80 GB: 4 machines of
# 8, 32 replicas, in bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_1.7b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for it: the tokens and their schedule are those of GPT-3 (2005.14165), the learning rate
# GPT-3's of 2.7 billion. Flags given here win over those of the script.
set -euo pipefail
: "${NNODES:=4}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 24 --hidden-size 2304 --num-attention-heads 24 --init-method-std 0.0120 \
  --make-vocab-size-divisible-by 1024 \
  --micro-batch-size 16 --global-batch-size 512 "${as_gpt3[@]}" \
  --lr 1.6e-4 --min-lr 1.6e-5 "$@"
