#!/usr/bin/env bash
# Pretrain the 345-million-parameter GPT of Megatron-LM's examples (GPT-2 medium) with their settings, in bf16 on one
# GPU.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_345m.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=10000
pretrain_gpt --bf16 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 4 --global-batch-size 8 --train-iters 500000 \
  --lr 0.00015 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  --split 949,50,1 --log-interval 100 --eval-interval 1000 --eval-iters 10 "$@"
