#!/usr/bin/env bash
# Pretrain the 345-million-parameter GPT of Megatron-LM's examples: GPT-2 medium, with their settings and bf16.
#
#   DATA_PATH=... VOCAB_FILE=... MERGE_FILE=... CHECKPOINT_PATH=... \
#     bash scripts/pretrain_gpt_345m.sh [flags of pretrain_gpt.py]
#
# The same command continues after an interruption. Flags given here win over those below. Environment variables:
#
#   DATA_PATH         prefix of the .bin and .idx that tools/preprocess_data.py wrote, or a blend; no spaces in names (required)
#   VOCAB_FILE, MERGE_FILE                         tokenizer that the data was made with (required)
#   CHECKPOINT_PATH   folder for checkpoints and logs (required)
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   processes, as torchrun has them (default: one)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_variables DATA_PATH VOCAB_FILE MERGE_FILE CHECKPOINT_PATH
be_interruptible
setup_python "${repo}requirements.txt"
read -ra data <<<"$DATA_PATH"
launch "${repo}pretrain_gpt.py" \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 4 --global-batch-size 8 --train-iters 500000 \
  --lr 0.00015 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 --bf16 \
  --data-path "${data[@]}" --split 949,50,1 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
  --log-interval 100 --eval-interval 1000 --eval-iters 10 \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10000 \
  --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --metrics-path "$CHECKPOINT_PATH/metrics.jsonl" "$@"
