#!/usr/bin/env bash
# Pretrain a small GPT on this machine, with or without a GPU: packages, corpus, tokenizer, data, training, text sample.
#
#   bash scripts/pretrain_gpt.sh [flags of pretrain_gpt.py]
#
# Existing files are kept, so run the same command to resume after an interruption. Flags given here override those of
# the script. Environment variables:
#
#   QUICKSTART_DIR    directory for all outputs (default: quickstart, in the repository)
#   CHECKPOINT_PATH   directory for checkpoints and, if set, logs (default: $QUICKSTART_DIR/checkpoints)
#   DATA_PATH         your own data instead of the corpus: prefix of .bin and .idx, or a blend (no spaces in names)
#   VOCAB_FILE, MERGE_FILE   vocab.json and merges.txt of a DATA_PATH without a tokenizer folder, as Megatron-LM's
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun (default: one process)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out=${QUICKSTART_DIR:-${repo}quickstart}
logs=${CHECKPOINT_PATH:-$out}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$out/checkpoints}
if [[ -n ${DATA_PATH:-} ]]; then
  read -ra data <<<"$DATA_PATH"
  prompts=(The A In)
else
  [[ -z ${VOCAB_FILE:-} && -z ${MERGE_FILE:-} ]] ||
    fail "VOCAB_FILE and MERGE_FILE need DATA_PATH, the data tokenized with them"
  ((NNODES == 1)) || fail "several nodes need DATA_PATH, data that all nodes can read"
  data=("$out/corpus_text_document")
  prompts=(class def import)
fi

if [[ -z ${DATA_PATH:-} ]]; then
  VOCAB_FILE=$out/tokenizer/vocab.json
  MERGE_FILE=$out/tokenizer/merges.txt
fi
gpt_data_flags "${data[@]}"

trap_signals
setup_python "${repo}requirements.txt"

if [[ -z ${DATA_PATH:-} ]]; then
  step "$out/corpus.jsonl" "$python" "${repo}tools/make_corpus.py" --output "$out/corpus.jsonl"
  step "$VOCAB_FILE" "$python" "${repo}tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --type bpe --vocab-size 8192 --output "$out/tokenizer"
  step "${data[0]}.idx" "$python" "${repo}tools/preprocess_data.py" \
    --input "$out/corpus.jsonl" --output-prefix "$out/corpus" --append-eod \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
fi

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  size=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
    --micro-batch-size 16 --global-batch-size 32 --train-iters 500 --lr 6e-4 --min-lr 6e-5 --bf16
  )
else
  size=(
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256
    --micro-batch-size 8 --global-batch-size 16 --train-iters 200 --lr 1e-3 --min-lr 1e-4
    --attention-dropout 0 --hidden-dropout 0
  )
  if [[ -z ${DATA_PATH:-} && $# == 0 ]]; then
    echo "Expect the loss to fall from 9.1, about the logarithm of the vocabulary, to 5.3 in 200 iterations."
  fi
fi
launch "${repo}pretrain_gpt.py" "${size[@]}" \
  --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  "${data_flags[@]}" --split 90,5,5 \
  --device auto --log-interval 10 --eval-interval 50 --eval-iters 5 --eval-on-start \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 50 \
  --tensorboard-dir "$logs/tensorboard" --metrics-path "$logs/metrics.jsonl" "$@"

((${NODE_RANK:-0} == 0)) || exit 0
sample=("$python" "${repo}tools/generate_text.py" --load "$CHECKPOINT_PATH")
for prompt in "${prompts[@]}"; do
  run "${sample[@]}" --prompt "$prompt" --out-seq-length 60 --temperature 0.7 --top-p 0.9
done

cat <<END

Done.
  checkpoints  $CHECKPOINT_PATH
$([[ ! -f $CHECKPOINT_PATH/report.html ]] || echo "  report       $CHECKPOINT_PATH/report.html")
  loss curves  $python -m tensorboard.main --logdir $logs/tensorboard
  raw numbers  $logs/metrics.jsonl
Next:
  more text    ${sample[*]} --prompt "${prompts[0]}"
  longer       bash $0${*:+ $*} --train-iters 2000
               (goes on with this run; the learning rate rises to that of the longer schedule)
  your text    README.md, "Your own text"
END
