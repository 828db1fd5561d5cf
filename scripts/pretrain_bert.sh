#!/usr/bin/env bash
# Pretrain a small BERT on this machine, with or without a GPU: packages, corpus, vocabulary, data, training.
#
#   bash scripts/pretrain_bert.sh [flags of pretrain_bert.py]
#
# Existing files are kept, so run the same command to resume after an interruption. Flags given here override those of
# the script. Environment variables:
#
#   QUICKSTART_DIR    directory for all outputs (default: quickstart, in the repository)
#   CHECKPOINT_PATH   directory for checkpoints and, if set, logs (default: $QUICKSTART_DIR/bert/checkpoints)
#   DATA_PATH         your own data instead of the corpus, preprocessed with --split-sentences: prefix of .bin and .idx,
#                     or a blend (no spaces in names)
#   VOCAB_FILE        vocab.txt of a DATA_PATH without a tokenizer folder beside it, such as Megatron-LM's
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun (default: one process)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out=${QUICKSTART_DIR:-${repo}quickstart}
logs=${CHECKPOINT_PATH:-$out/bert}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$out/bert/checkpoints}
if [[ -n ${DATA_PATH:-} ]]; then
  read -ra data <<<"$DATA_PATH"
else
  [[ -z ${VOCAB_FILE:-} ]] || fail "VOCAB_FILE needs DATA_PATH, the data tokenized with it"
  ((NNODES == 1)) || fail "several nodes need DATA_PATH, data that all nodes can read"
  data=("$out/bert/corpus_text_sentence")
fi

[[ -n ${DATA_PATH:-} ]] || VOCAB_FILE=$out/bert/tokenizer/vocab.txt
bert_data_flags "${data[@]}"

trap_signals
setup_python "${repo}requirements.txt"

if [[ -z ${DATA_PATH:-} ]]; then
  step "$out/corpus.jsonl" "$python" "${repo}tools/make_corpus.py" --output "$out/corpus.jsonl"
  step "$VOCAB_FILE" "$python" "${repo}tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --type wordpiece --vocab-size 8192 --output "$out/bert/tokenizer"
  step "${data[0]}.idx" "$python" "${repo}tools/preprocess_data.py" \
    --input "$out/corpus.jsonl" --output-prefix "$out/bert/corpus" --split-sentences \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE"
fi

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  size=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512
    --micro-batch-size 32 --global-batch-size 64 --train-iters 1000 --lr 4e-4 --min-lr 4e-5 --bf16
  )
else
  size=(
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128
    --micro-batch-size 16 --global-batch-size 32 --train-iters 300 --lr 1e-3 --min-lr 1e-4
    --attention-dropout 0 --hidden-dropout 0
  )
fi
launch "${repo}pretrain_bert.py" "${size[@]}" \
  --lr-decay-style linear --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.98 --clip-grad 1.0 \
  "${data_flags[@]}" --split 90,5,5 \
  --device auto --log-interval 10 --eval-interval 100 --eval-iters 5 \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 100 \
  --tensorboard-dir "$logs/tensorboard" --metrics-path "$logs/metrics.jsonl" "$@"

((${NODE_RANK:-0} == 0)) || exit 0
cat <<END

Done.
  checkpoints  $CHECKPOINT_PATH
  loss curves  $python -m tensorboard.main --logdir $logs/tensorboard
  raw numbers  $logs/metrics.jsonl
Next:
  longer       bash $0${*:+ $*} --train-iters 3000
               (goes on with this run; the learning rate rises to that of the longer schedule)
  your text    README.md, "Your own text", with --split-sentences and a WordPiece vocabulary
END
