#!/usr/bin/env bash
# Pretrain DeepSeek-V3 (arXiv 2412.19437: 671 billion parameters, 37 of them active) on 2,048 GPUs with 80 GB as in the
# paper: 256 nodes with 8 GPUs. The layout is that of its section 3.2: pipeline-parallel size 16, expert-parallel size
# 64, data-parallel size 128. The schedule is that of section 4.2 but for the learning rate, which falls from the end of
# warmup on, where the paper keeps it constant for 10 trillion tokens, and for the bias of the experts, whose updates
# the paper ends 500 billion tokens before the end. Differences: bf16 instead of FP8, the 1F1B schedule with recomputed
# layers, and no multi-token prediction.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_gpt_deepseek_v3.sh [flags of pretrain_gpt.py]
#
# Flags given here override those of the script.
set -euo pipefail
: "${NNODES:=256}" "${GPUS_PER_NODE:=8}"
source "$(dirname "${BASH_SOURCE[0]}")/gpt.sh"
vocab_size=129280 save_interval=100

pretrain_gpt --bf16 "${mixture_settings[@]}" --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 \
  --num-attention-heads 128 --norm-epsilon 1e-6 --max-position-embeddings 4096 --init-method-std 0.006 \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \
  --v-head-dim 128 --qk-layernorm \
  --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-layer-freq '[0]*3+[1]*58' \
  --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
  --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 \
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.0001 \
  --pipeline-model-parallel-size 16 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 64 \
  --recompute-granularity full \
  --micro-batch-size 1 --global-batch-size 15360 --rampup-batch-size 3072 3072 114501953 \
  --train-samples 3613281250 --lr 2.2e-4 --min-lr 2.2e-5 --lr-warmup-samples 6144000 \
  --lr-decay-samples 3613281250 --adam-beta2 0.95 "$@"
