#!/usr/bin/env bash
# Pretrain the 3.9-billion-parameter BERT of arXiv 1909.08053 (table 4), with the settings of its section 5.3, in bf16.
# The paper used 512 GPUs: tensor-parallel size 4, data-parallel size 128.
#
#   DATA_PATH=... CHECKPOINT_PATH=... bash scripts/pretrain_bert_3.9b.sh [flags of pretrain_bert.py]
#
# Run the same command to resume after an interruption. Flags given here override those of the script. Environment
# variables:
#
#   DATA_PATH         prefix of the .bin and .idx files of tools/preprocess_data.py --split-sentences, or a blend; no
#                     spaces in names
#   CHECKPOINT_PATH   directory for checkpoints and logs
#   VOCAB_FILE        vocab.txt of data without a tokenizer folder beside them, such as Megatron-LM's
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun (default: 4 processes on this node)
#
# The first two are required, except with --dry-run and --mock-data.
set -euo pipefail
: "${GPUS_PER_NODE:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pretrain_bert --num-layers 48 --hidden-size 2560 --num-attention-heads 40 --micro-batch-size 8 \
  --tensor-model-parallel-size 4 "$@"
