# shellcheck shell=bash disable=SC2034 # the scripts that source this use its arrays
# Environment variables:
#
#   DATA_PATH         prefix of the .bin and .idx files of tools/preprocess_data.py, or a blend; no spaces in names
#   CHECKPOINT_PATH   directory for checkpoints and logs, shared by all nodes
#   VOCAB_FILE, MERGE_FILE   vocab.json and merges.txt of data without a tokenizer folder beside them, as Megatron-LM's
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun (default: as above)
#   PYTHON            interpreter with the packages (default: found, or created in .venv)
#
# The first two are required, except with --dry-run and --mock-data. SLURM and Kubernetes jobs set the processes
# (docs/launching.md). Run the same command to resume after an interruption.
more_help=${BASH_SOURCE[0]} # the lines above

# Sourced by the scripts pretrain_gpt_SIZE.sh, which set the model shape, the parallel layout and the schedule.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Size of the vocabulary without data, including the end-of-document token that NullTokenizer adds: that of GPT-2.
vocab_size=50257
# Iterations; the largest models set fewer, because an iteration takes a minute or two.
save_interval=500

# Settings of arXiv 1909.08053, section 4.2.
gpt2_settings=(
  --seq-length 1024 --max-position-embeddings 1024
  --global-batch-size 512 --train-iters 300000
  --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 300000 --lr-warmup-iters 3000
  --weight-decay 0.01 --clip-grad 1.0 --recompute-granularity full
  --split '949,50,1' --log-interval 100 --eval-interval 1000 --eval-iters 10
)
# Settings of GPT-3, arXiv 2005.14165, appendix B: 300 billion tokens, warmup over 375 million, decay over 260 billion.
gpt3_settings=(
  --seq-length 2048 --max-position-embeddings 2048
  --train-samples 146484375
  --lr-decay-style cosine --lr-decay-samples 126953125 --lr-warmup-samples 183105
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --recompute-granularity full
  --split '949,50,1' --log-interval 10 --eval-interval 1000 --eval-iters 10
)
# All mixtures of experts have the layers of Llama, without dropout, and experts in grouped products.
mixture_settings=(
  --seq-length 4096 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --moe-grouped-gemm --expert-tensor-parallel-size 1
  --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --split '99,1,0' --log-interval 10 --eval-interval 1000 --eval-iters 10
)

# Llama 3 with 8 billion parameters, arXiv 2407.21783, table 3, for sequences divided among ranks.
llama3_8b_settings=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --position-embedding-type rope --rotary-base 500000
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
  --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --split '99,1,0' --log-interval 10 --eval-interval 1000 --eval-iters 10
)

# resume_flags FLAGS...: set `flags` to FLAGS, without --finetune and its --load once CHECKPOINT_PATH holds a checkpoint.
# If they load from that folder, they stay, and the program refuses to start another run there.
resume_flags() {
  local word before="" from=""
  flags=("$@")
  [[ -s $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]] || return 0
  has_flag --finetune "$@" && ! has_flag --save "$@" || return 0
  flags=()
  for word; do
    [[ $before != --load ]] || from=$word
    [[ $word != --load=* ]] || from=${word#--load=}
    [[ $word =~ ^--(finetune|load|ckpt-step)(=|$) || $before =~ ^--(load|ckpt-step)$ ]] || flags+=("$word")
    before=$word
  done
  if [[ $from -ef $CHECKPOINT_PATH ]]; then
    flags=("$@")
  else
    echo "$CHECKPOINT_PATH holds a run; resuming it without --finetune and --load"
  fi
}

# pretrain_gpt PRECISION FLAGS...: PRECISION (--bf16 or --fp16) applies unless FLAGS has one; no flag undoes either.
pretrain_gpt() {
  local defaults data data_flags flags=("$@")
  if has_flag --dry-run "$@" || has_flag --mock-data "$@"; then
    defaults=(--tokenizer-type NullTokenizer --vocab-size $((vocab_size - 1)))
    has_flag --mock-data "$@" || defaults+=(--mock-data)
  else
    require_variables DATA_PATH CHECKPOINT_PATH
    read -ra data <<<"$DATA_PATH"
    gpt_data_flags "${data[@]}"
    defaults=(
      "${data_flags[@]}"
      --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval "$save_interval"
      --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --metrics-path "$CHECKPOINT_PATH/metrics.jsonl"
    )
    resume_flags "$@"
  fi
  has_flag --bf16 "${flags[@]:1}" || has_flag --fp16 "${flags[@]:1}" || defaults+=("$1")
  trap_signals
  setup_python "${repo}requirements.txt"
  launch "${repo}pretrain_gpt.py" "${defaults[@]}" "${flags[@]:1}"
}
