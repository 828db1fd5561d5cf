#!/usr/bin/env bash
# Pretrain the 1.2-billion-parameter GPT of arXiv 1909.08053 (table 1), with the settings of its section 4.2, on 64
# V100 GPUs as in the paper: 4 nodes with 16 GPUs, data-parallel size 64, fp16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_1.2b.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script. Use --bf16 on newer GPUs.
set -euo pipefail
: "${NNODES:=4}" "${GPUS_PER_NODE:=16}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --fp16 --num-layers 40 --hidden-size 1536 --num-attention-heads 16 \
  --make-vocab-size-divisible-by 1024 --micro-batch-size 8 \
  "${gpt2_settings[@]}" "$@"
