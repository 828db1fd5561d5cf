# Sourced by the other scripts: finds or creates a Python environment, prints commands, launches training.
# shellcheck shell=bash

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  # The opening comment of the script, and that of a script it sourced before this one.
  for file in "$0" ${more_help:+"$more_help"}; do
    [[ $file == "$0" ]] || echo
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$file"
  done
  exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Prefix of paths in the repository: empty in the repository's root, which keeps printed commands short.
repo=$root/
[[ $PWD -ef $root ]] && repo=

: "${GPUS_PER_NODE:=1}" "${NNODES:=1}" "${MASTER_PORT:=6000}"
((NNODES > 1)) || : "${NODE_RANK:=0}" "${MASTER_ADDR:=localhost}"

fail() {
  echo "error: $*" >&2
  exit 2
}

# On SIGINT and SIGTERM, exit after the running command ends, because training saves a checkpoint first. The terminal
# sends Ctrl-C to the whole job. SIGTERM may be sent to the script only, so it is forwarded.
trap_signals() {
  trap 'interrupted=130 signaled=1' INT
  trap 'interrupted=143 signaled=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
  trap at_exit EXIT
}
interrupted=0 signaled=0 own_status=0 child=

# After a signal, exit with 130 or 143 and a message, unless a training program ended with another status of its own,
# such as 1 if it could not save. torchrun ends with 1 in any case, and bash may have 255 for a command that ends when
# the signal comes.
at_exit() {
  local status=$?
  ((status && interrupted)) || return 0
  ((own_status && status != 255)) || status=$interrupted
  ((status < 128)) || echo "Interrupted. Run the same command to resume."
  exit "$status"
}

# Like `run`, but in the background: bash runs traps only between commands and during `wait`.
run_interruptible() {
  local status
  ((! interrupted)) || exit "$interrupted"
  show "$@"
  (trap - INT && exec "$@") <&0 & # by default a background job ignores Ctrl-C and has no stdin
  child=$!
  ((interrupted != 143)) || kill -TERM "$child" 2>/dev/null || true # it came before the child was known
  # A signal interrupts the wait, not the command.
  signaled=1
  while ((signaled)); do
    signaled=0
    wait "$child" && status=0 || status=$?
  done
  child=
  return "$status"
}

# Print a command with shell quoting, then run it.
run() {
  show "$@"
  "$@"
}

# Print a command with shell quoting.
show() {
  local word
  printf '+'
  for word; do
    if [[ $word =~ ^[[:alnum:]_./:=,@%+-]+$ ]]; then
      printf ' %s' "$word"
    else
      printf ' %q' "$word"
    fi
  done
  printf '\n'
}

# step FILE COMMAND...: run the command unless its output FILE exists. FILE must be written last or atomically.
step() {
  local output=$1
  shift
  if [[ -e $output ]]; then
    echo "$output exists; skipping"
  else
    run_interruptible "$@"
  fi
}

# setup_python FILE...: set `python` to an interpreter with torch and the packages of the requirements files, in the
# versions of constraints.txt.
# PYTHON, if set, is used without a check. If python3 has torch, missing packages are installed into .venv, which
# inherits the packages of python3. Otherwise all packages are installed into .venv.
setup_python() {
  local venv=${repo}.venv file missing package packages=() inherited
  if [[ -n ${PYTHON:-} ]]; then
    python=$PYTHON
    return
  fi
  python=python3
  [[ -x $venv/bin/python ]] && python=$venv/bin/python
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is older than Python 3.10; put a newer python3 first on PATH"
  if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "$python cannot import torch; installing all packages into $venv"
    make_venv "$venv"
    for file; do
      run "$python" -m pip install -c "${repo}constraints.txt" -r "$file"
    done
    return
  fi
  missing=$(missing_packages "$@")
  [[ -z $missing ]] && return
  echo "$python has torch but lacks other packages; installing them into $venv"
  if [[ $python == python3 ]]; then
    # venv's --system-site-packages would hide the packages of an active virtual environment.
    inherited=$("$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")')
    make_venv "$venv"
    echo "$inherited" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"
  fi
  while IFS= read -r package; do
    packages+=("$package")
  done <<<"$missing"
  run "$python" -m pip install -c "${repo}constraints.txt" "${packages[@]}"
}

make_venv() {
  "$1/bin/python" -c 'import pip' 2>/dev/null || run python3 -m venv "$1"
  python=$1/bin/python
}

# Print the lines of requirements files whose package is not installed, except torch.
missing_packages() {
  "$python" - "$@" <<'EOF'
import importlib.metadata
import re
import sys

for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        name = re.match(r"[\w-]*", line)[0]
        try:
            name in ("", "-r", "torch") or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(line.strip())
EOF
}

# Let the segments of torch's GPU allocator grow, so that memory does not fragment; settings of the user come first.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}

# launch SCRIPT FLAGS...: run a training script with GPUS_PER_NODE processes on each of NNODES nodes. If LAUNCHER
# is set, this script starts the processes. A dry run is one process with --world-size.
launch() {
  local name world=$((GPUS_PER_NODE * NNODES))
  if has_flag --dry-run "$@"; then
    has_flag --world-size "$@" || set -- "$@" --world-size "$world"
    run_interruptible "$python" "$@"
    exit # a dry run has no outputs for later steps
  elif [[ -n ${LAUNCHER:-} ]]; then
    own_status=1
    run_interruptible bash "$LAUNCHER" "$python" "$@"
  elif ((world == 1)); then
    own_status=1
    run_interruptible "$python" "$@"
  else
    for name in NODE_RANK MASTER_ADDR; do
      [[ -n ${!name:-} ]] ||
        fail "$name is not set, but NNODES is $NNODES; set it on each node (docs/launching.md), or set NNODES=1"
    done
    # By default torchrun kills processes that are still saving 30 seconds after a signal.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
    run_interruptible "$python" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" \
      --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
  fi
}

# has_flag FLAG WORD...: succeed if FLAG is one of the words.
has_flag() {
  local word flag=$1
  shift
  for word; do
    [[ $word == "$flag" || $word == "$flag="* ]] && return
  done
  return 1
}

# require_variables NAME...: fail unless these environment variables are set.
require_variables() {
  local name
  for name; do
    [[ -n ${!name:-} ]] || fail "$name is not set; see bash $0 --help"
  done
}

# gpt_data_flags PREFIX...: set `data_flags` to the flags of the data and, if it is named, its tokenizer. Data of
# tools/preprocess_data.py have the tokenizer beside them; those of Megatron-LM need VOCAB_FILE and MERGE_FILE.
gpt_data_flags() {
  data_flags=(--data-path "$@")
  [[ -n ${VOCAB_FILE:-}${MERGE_FILE:-} ]] || return 0
  [[ -n ${VOCAB_FILE:-} && -n ${MERGE_FILE:-} ]] ||
    fail "VOCAB_FILE and MERGE_FILE name a tokenizer together; set both or, if the data have a tokenizer folder, none"
  data_flags+=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
}

# bert_data_flags PREFIX...: the same for BERT, whose tokenizer is VOCAB_FILE.
bert_data_flags() {
  data_flags=(--data-path "$@")
  [[ -z ${VOCAB_FILE:-} ]] || data_flags+=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE")
}

# pretrain_bert FLAGS...: train with the settings of arXiv 1909.08053 section 5.3. The flags override them.
pretrain_bert() {
  local defaults data data_flags
  if has_flag --dry-run "$@" || has_flag --mock-data "$@"; then
    defaults=(--tokenizer-type NullTokenizer --vocab-size 30522) # size of the published vocabulary
    has_flag --mock-data "$@" || defaults+=(--mock-data)
  else
    require_variables DATA_PATH CHECKPOINT_PATH
    read -ra data <<<"$DATA_PATH"
    bert_data_flags "${data[@]}"
    defaults=(
      "${data_flags[@]}"
      --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10000
      --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --metrics-path "$CHECKPOINT_PATH/metrics.jsonl"
    )
  fi
  trap_signals
  setup_python "${repo}requirements.txt"
  launch "${repo}pretrain_bert.py" "${defaults[@]}" \
    --seq-length 512 --max-position-embeddings 512 --global-batch-size 1024 --train-iters 2000000 \
    --lr 1e-4 --lr-decay-style linear --lr-decay-iters 2000000 --lr-warmup-iters 10000 --min-lr 1e-5 \
    --weight-decay 1e-2 --clip-grad 1.0 --bf16 --split 949,50,1 \
    --log-interval 100 --eval-interval 1000 --eval-iters 10 "$@"
}
