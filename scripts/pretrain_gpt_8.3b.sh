#!/usr/bin/env bash
# Pretrain the GPT of 8.3 billion parameters of arXiv 1909.08053 (table 1), with the settings of its section 4.2, on its
# 512 V100 GPUs: 32 machines of 16, tensor parallelism over 8 GPUs, 64 replicas, in fp16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_8.3b.sh [flags of pretrain_gpt.py]
#
# Flags given here win over those of the script; --bf16 is for newer GPUs.
set -euo pipefail
: "${NNODES:=32}" "${GPUS_PER_NODE:=16}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"

pretrain_gpt --fp16 --num-layers 72 --hidden-size 3072 --num-attention-heads 32 \
  --tensor-model-parallel-size 8 --make-vocab-size-divisible-by 128 --micro-batch-size 8 \
  "${as_gpt2[@]}" "$@"
