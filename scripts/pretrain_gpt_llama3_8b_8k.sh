#!/usr/bin/env bash
# Pretrain Llama 3 with 8 billion parameters (arXiv 2407.21783) on sequences of 8,192 tokens, on 64 GPUs with 80 GB: 8
# nodes with 8 GPUs. Layout and batch are those of NVIDIA's published run on H100 (NeMo 2): context-parallel size 2,
# 1,024 samples, bf16, no recomputation. A trillion tokens.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_llama3_8b_8k.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=8}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=128256

pretrain_gpt --bf16 "${llama3_8b_settings[@]}" --seq-length 8192 --context-parallel-size 2 \
  --global-batch-size 1024 --train-samples 122070312 \
  --lr 3e-4 --min-lr 3e-5 --lr-warmup-samples 2048000 --lr-decay-samples 122070312 "$@"
