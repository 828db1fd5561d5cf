#!/usr/bin/env bash
# Pretrain the GPT of 529.6 billion parameters of arXiv 2104.04473 (table 1) on its 2520 A100 GPUs of 80 GB: 315
# machines of 8, tensor parallelism over 8 GPUs, a pipeline of 35 stages in 3 chunks each, 9 replicas, in bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_529.6b.sh [flags of pretrain_gpt.py]
#
# It is trained on 270 billion tokens with the schedule of Megatron-Turing NLG (2201.11990), which has this shape, less its
# ramp of the batch size. Flags given here win over those of the script.
set -euo pipefail
: "${NNODES:=315}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

save_interval=200
pretrain_gpt --bf16 --num-layers 105 --hidden-size 20480 --num-attention-heads 128 --init-method-std 0.0040 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 35 --num-layers-per-virtual-pipeline-stage 1 \
  --micro-batch-size 1 --global-batch-size 2520 "${as_gpt3[@]}" \
  --lr 5e-5 --min-lr 5e-6 --train-samples 131835937 --lr-decay-samples 166015625 --lr-warmup-samples 488281 "$@"
