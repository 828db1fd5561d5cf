#!/usr/bin/env bash
# Train Llama 3 with 8 billion parameters (arXiv 2407.21783) further on sequences of 32,768 tokens, on 32 GPUs with 80 GB:
# 4 nodes with 8 GPUs. Each sequence is divided over 4 ranks, whose layers 2 GPUs share.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_llama3_8b_32k.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script. The weights are random unless `--load FIRST --finetune` names the run
# whose training goes on; once CHECKPOINT_PATH holds a checkpoint, the same command resumes from it.
set -euo pipefail
: "${NNODES:=4}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=128256

pretrain_gpt --bf16 "${llama3_8b_settings[@]}" --seq-length 32768 --tensor-model-parallel-size 2 --sequence-parallel \
  --context-parallel-size 4 --global-batch-size 128 --train-samples 3051757 \
  --lr 3e-5 --min-lr 3e-6 --lr-warmup-samples 12800 --lr-decay-samples 3051757 "$@"
