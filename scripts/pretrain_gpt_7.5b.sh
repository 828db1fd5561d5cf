#!/usr/bin/env bash
# Pretrain the GPT of 7.5 billion parameters of arXiv 2104.04473 (table 1) on its 128 A100 GPUs of 80 GB: 16 machines of
# 8, tensor parallelism over 4 GPUs, 32 replicas, in bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_7.5b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for it: the tokens and their schedule are those of GPT-3 (2005.14165), the learning rate
# GPT-3's of 13 billion. Flags given here win over those of the script.
set -euo pipefail
: "${NNODES:=16}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 36 --hidden-size 4096 --num-attention-heads 32 --init-method-std 0.0090 \
  --tensor-model-parallel-size 4 --make-vocab-size-divisible-by 256 \
  --micro-batch-size 16 --global-batch-size 512 "${as_gpt3[@]}" \
  --lr 1.0e-4 --min-lr 1.0e-5 "$@"
