#!/usr/bin/env bash
# Pretrain the GPT of 76.1 billion parameters of arXiv 2104.04473 (table 1) on its 1024 A100 GPUs of 80 GB: 128 machines
# of 8, tensor parallelism over 8 GPUs, a pipeline of 4 stages in 3 chunks each, 32 replicas, in bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_76.1b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for it: the tokens and their schedule are those of GPT-3 (2005.14165), the learning rate
# GPT-3's of 175 billion. Flags given here win over those of the script.
set -euo pipefail
: "${NNODES:=128}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --bf16 --num-layers 60 --hidden-size 10240 --num-attention-heads 80 --init-method-std 0.0057 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 \
  --micro-batch-size 2 --global-batch-size 1792 "${as_gpt3[@]}" \
  --lr 6e-5 --min-lr 6e-6 "$@"
