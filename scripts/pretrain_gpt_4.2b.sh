#!/usr/bin/env bash
# Pretrain the 4.2-billion-parameter GPT of arXiv 1909.08053 (table 1), with the settings of its section 4.2, on 256
# V100 GPUs as in the paper: 16 nodes with 16 GPUs, tensor-parallel size 4, data-parallel size 64, fp16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_4.2b.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script. Use --bf16 on newer GPUs.
set -euo pipefail
: "${NNODES:=16}" "${GPUS_PER_NODE:=16}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --fp16 --num-layers 64 --hidden-size 2304 --num-attention-heads 24 \
  --tensor-model-parallel-size 4 --make-vocab-size-divisible-by 256 --micro-batch-size 8 \
  "${gpt2_settings[@]}" "$@"
