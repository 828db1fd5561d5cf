#!/usr/bin/env bash
# Pretrain GPT-3 (arXiv 2005.14165) on 1024 A100 80GB GPUs, the number that section 5.1 of arXiv 2104.04473 assumes:
# 128 nodes with 8 GPUs. The layout is that of Megatron-LM's example: tensor-parallel size 8, pipeline-parallel size
# 16, data-parallel size 8, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_175b.sh [flags of pretrain_gpt.py]
#
# The schedule is that of GPT-3, with a batch size rampup from 32 thousand tokens over the first 12 billion. Flags
# given here override those of the script.
set -euo pipefail
: "${NNODES:=128}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --init-method-std 0.0052 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
  --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 "${gpt3_settings[@]}" \
  --lr 6e-5 --min-lr 6e-6 "$@"
