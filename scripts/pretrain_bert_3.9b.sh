#!/usr/bin/env bash
# Pretrain the BERT of 3.9 billion parameters of arXiv 1909.08053 (table 4), with the settings of its section 5.3 and bf16.
# The paper did so on 512 GPUs, 128 replicas of the model on 4 GPUs each.
#
#   DATA_PATH=... VOCAB_FILE=... CHECKPOINT_PATH=... bash scripts/pretrain_bert_3.9b.sh [flags of pretrain_bert.py]
#
# The same command continues after an interruption. Flags given here win over those of the script. Environment variables:
#
#   DATA_PATH         prefix of the .bin and .idx that tools/preprocess_data.py --split-sentences wrote, or a blend; no
#                     spaces in names
#   VOCAB_FILE        vocab.txt that the data was made with
#   CHECKPOINT_PATH   folder for checkpoints and logs
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   processes, as torchrun has them (default: 4 on this machine)
#
# The first three are required, except with --dry-run and --mock-data.
set -euo pipefail
: "${GPUS_PER_NODE:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain_bert --num-layers 48 --hidden-size 2560 --num-attention-heads 40 --micro-batch-size 8 \
  --tensor-model-parallel-size 4 "$@"
