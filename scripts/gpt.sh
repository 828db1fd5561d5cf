# shellcheck shell=bash disable=SC2034 # its arrays are for the scripts that source it
# Environment variables:
#
#   DATA_PATH         prefix of the .bin and .idx that tools/preprocess_data.py wrote, or a blend; no spaces in names
#   VOCAB_FILE, MERGE_FILE                         tokenizer that the data was made with
#   CHECKPOINT_PATH   folder for checkpoints and logs, which all machines see
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   processes, as torchrun has them (default: as above)
#   PYTHON            interpreter that has the packages (default: one is found, or .venv is made)
#
# The first three lines are required, except with --dry-run and --mock-data. Under SLURM and Kubernetes the job says which
# processes there are (docs/launching.md). The same command continues after an interruption.
more_help=${BASH_SOURCE[0]} # the lines above

# Sourced by the scripts pretrain_gpt_SIZE.sh, which each give the shape of a model, how it is divided, and its schedule.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Iterations; of the largest models fewer, which take a minute or two each.
save_interval=500

# The settings of arXiv 1909.08053, section 4.2.
as_gpt2=(
  --seq-length 1024 --max-position-embeddings 1024
  --global-batch-size 512 --train-iters 300000
  --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 300000 --lr-warmup-iters 3000
  --weight-decay 0.01 --clip-grad 1.0 --recompute-granularity full
  --split '949,50,1' --log-interval 100 --eval-interval 1000 --eval-iters 10
)
# Those of GPT-3, arXiv 2005.14165, appendix B: 300 billion tokens; warm-up over 375 million, decay over 260 billion.
as_gpt3=(
  --seq-length 2048 --max-position-embeddings 2048
  --train-samples 146484375
  --lr-decay-style cosine --lr-decay-samples 126953125 --lr-warmup-samples 183105
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --recompute-granularity full
  --split '949,50,1' --log-interval 10 --eval-interval 1000 --eval-iters 10
)

# pretrain_gpt FORMAT FLAGS...: in FORMAT (--bf16 or --fp16) unless the flags name one: no flag takes another one back.
pretrain_gpt() {
  local first data
  if given --dry-run "$@" || given --mock-data "$@"; then
    # As many ids as GPT-2's, the end of a text among them.
    first=(--tokenizer-type NullTokenizer --vocab-size 50256)
    given --mock-data "$@" || first+=(--mock-data)
  else
    need_variables DATA_PATH VOCAB_FILE MERGE_FILE CHECKPOINT_PATH
    read -ra data <<<"$DATA_PATH"
    first=(
      --data-path "${data[@]}"
      --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE"
      --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "$save_interval"
      --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --metrics-path "$CHECKPOINT_PATH/metrics.jsonl"
    )
  fi
  given --bf16 "${@:2}" || given --fp16 "${@:2}" || first+=("$1")
  be_interruptible
  setup_python "${repo}requirements.txt"
  launch "${repo}pretrain_gpt.py" "${first[@]}" "${@:2}"
}
