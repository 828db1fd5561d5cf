#!/usr/bin/env bash
# Train Llama 3 with 8 billion parameters (arXiv 2407.21783) further on sequences of 131,072 tokens, on 64 GPUs with 80
# GB: 8 nodes with 8 GPUs. Each sequence is divided over 8 ranks, whose layers 4 GPUs share. RoPE's frequencies are scaled
# as in Llama 3.1.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_llama3_8b_128k.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script. The weights are random unless `--load FIRST --finetune` names the run
# whose training goes on; once CHECKPOINT_PATH holds a checkpoint, the same command resumes from it.
set -euo pipefail
: "${NNODES:=8}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=128256

pretrain_gpt --bf16 "${llama3_8b_settings[@]}" --seq-length 131072 --tensor-model-parallel-size 4 --sequence-parallel \
  --context-parallel-size 8 --global-batch-size 32 --train-samples 762939 \
  --use-rope-scaling --rope-scaling-factor 8 --rope-scaling-original-length 8192 \
  --lr 3e-5 --min-lr 3e-6 --lr-warmup-samples 3200 --lr-decay-samples 762939 "$@"
