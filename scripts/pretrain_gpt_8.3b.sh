#!/usr/bin/env bash
# Pretrain the 8.3-billion-parameter GPT of arXiv 1909.08053 (table 1), with the settings of its section 4.2, on 512
# V100 GPUs as in the paper: 32 nodes with 16 GPUs, tensor-parallel size 8, data-parallel size 64, fp16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_8.3b.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script. Use --bf16 on newer GPUs.
set -euo pipefail
: "${NNODES:=32}" "${GPUS_PER_NODE:=16}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --fp16 --num-layers 72 --hidden-size 3072 --num-attention-heads 32 \
  --tensor-model-parallel-size 8 --make-vocab-size-divisible-by 128 --micro-batch-size 8 \
  "${gpt2_settings[@]}" "$@"
