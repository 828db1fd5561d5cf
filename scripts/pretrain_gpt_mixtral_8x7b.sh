#!/usr/bin/env bash
# Pretrain Mixtral 8x7B (arXiv 2401.04088: 46.7 billion parameters, 12.9 of them active) on 64 GPUs with 80 GB: 8 nodes
# with 8 GPUs. Layout and schedule are those of NVIDIA's example (examples/mixtral of Megatron-LM): expert-parallel size
# 8, pipeline-parallel size 4 with 8 layers on each stage, data-parallel size 16, bf16.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_mixtral_8x7b.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=8}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=32000

pretrain_gpt --bf16 "${mixture_settings[@]}" --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --rotary-base 1000000 \
  --max-position-embeddings 32768 --init-method-std 0.01 \
  --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
  --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256 \
  --train-iters 500000 --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 500 --lr-decay-iters 320000 "$@"
