#!/usr/bin/env bash
# Pretrain Qwen3-30B-A3B (arXiv 2505.09388: 30.5 billion parameters, 3.3 of them active) on 16 GPUs with 80 GB: 2 nodes
# with 8 GPUs. Layout and batch are those of NVIDIA's published run on H100 (Megatron Bridge, performance summary):
# expert-parallel size 16, 1,024 samples of 4,096 tokens, bf16. The schedule is that of NVIDIA's configuration
# (Megatron-MoE-ModelZoo), since the authors have not published theirs.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_qwen3_30b_a3b.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=2}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=151936

pretrain_gpt --bf16 "${mixture_settings[@]}" --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 \
  --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm \
  --norm-epsilon 1e-6 --rotary-base 1000000 --max-position-embeddings 40960 \
  --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 \
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-layer-recompute \
  --expert-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1024 \
  --train-samples 268554688 --lr 1.2e-4 --min-lr 1.2e-5 --lr-warmup-samples 162761 --lr-decay-samples 255126953 \
  --adam-beta2 0.95 "$@"
