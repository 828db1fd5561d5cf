#!/usr/bin/env bash
# Pretrain the GPT of 310.1 billion parameters of arXiv 2104.04473 (table 1) on its 1920 A100 GPUs of 80 GB: 240
# machines of 8, tensor parallelism over 8 GPUs, a pipeline of 16 stages in 2 chunks each, 15 replicas, in bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_310.1b.sh [flags of pretrain_gpt.py]
#
# The paper gives no schedule for it: the tokens and their schedule are those of GPT-3 (2005.14165), the learning rate
# Megatron-Turing NLG's of 530 billion (2201.11990). Flags given here win over those of the script.
set -euo pipefail
: "${NNODES:=240}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=200
pretrain_gpt --bf16 --num-layers 96 --hidden-size 16384 --num-attention-heads 128 --init-method-std 0.0045 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 \
  --micro-batch-size 1 --global-batch-size 2160 "${as_gpt3[@]}" \
  --lr 5e-5 --min-lr 5e-6 "$@"
