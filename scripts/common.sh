# Sourced by the scripts beside it: finds or makes a Python with the packages, prints what it runs, launches training.
# shellcheck shell=bash

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  # The comment that the script opens with, and that of what it has sourced before this.
  for file in "$0" ${more_help:+"$more_help"}; do
    [[ $file == "$0" ]] || echo
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$file"
  done
  exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# In front of the repository's files: nothing where that is the current folder, so that printed commands stay short.
repo=$root/
[[ $PWD -ef $root ]] && repo=

: "${GPUS_PER_NODE:=1}" "${NNODES:=1}" "${MASTER_PORT:=6000}"
((NNODES > 1)) || : "${NODE_RANK:=0}" "${MASTER_ADDR:=localhost}"

fail() {
  echo "error: $*" >&2
  exit 2
}

# On SIGINT and SIGTERM: leave after what is running, not before, for the training saves then; say that nothing is lost;
# and exit with 130 or 143, where torchrun would with 1. Ctrl-C comes to the whole job from the terminal. SIGTERM may
# come to the script alone, so it is passed on.
be_interruptible() {
  trap 'interrupted=130 caught=1' INT
  trap 'interrupted=143 caught=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM
  trap '((! $? || ! interrupted)) || { echo "Interrupted. The same command continues."; exit "$interrupted"; }' EXIT
}
interrupted=0 caught=0 child=

# Run a command as `run` does, but let traps act while it runs, as bash does only during `wait`.
attend() {
  local status
  ((! interrupted)) || exit "$interrupted"
  show "$@"
  (trap - INT && exec "$@") <&0 & # a background job would ignore Ctrl-C and have no input
  child=$!
  # A signal ends the wait, not the command.
  caught=1
  while ((caught)); do
    caught=0
    wait "$child" && status=0 || status=$?
  done
  child=
  return "$status"
}

# Print a command, in a form that can be copied, then run it.
run() {
  show "$@"
  "$@"
}

# Print a command, in a form that can be copied.
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

# step FILE COMMAND...: run the command unless FILE, which it writes last or in one go, is there.
step() {
  local output=$1
  shift
  if [[ -e $output ]]; then
    echo "$output is there; nothing to do"
  else
    attend "$@"
  fi
}

# setup_python FILE...: set `python` to one that has torch and the packages of these requirements files.
# That is PYTHON, if it is set, whatever it has. If python3 has torch, it is used as it is, and packages it lacks go to
# .venv, which then sees its packages too. If not, they all go to .venv.
setup_python() {
  local venv=${repo}.venv file missing package packages=() inherited
  if [[ -n ${PYTHON:-} ]]; then
    python=$PYTHON
    return
  fi
  python=python3
  [[ -x $venv/bin/python ]] && python=$venv/bin/python
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is not Python 3.10 or newer; put one that is first on the PATH"
  if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "torch cannot be imported by $python; installing everything into $venv"
    make_venv "$venv"
    for file; do
      run "$python" -m pip install -r "$file"
    done
    return
  fi
  missing=$(missing_packages "$@")
  [[ -z $missing ]] && return
  echo "$python has torch, but not all packages; installing the others into $venv"
  if [[ $python == python3 ]]; then
    # Not venv's --system-site-packages: that hides the packages of an active virtual environment.
    inherited=$("$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")')
    make_venv "$venv"
    echo "$inherited" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/inherited.pth"
  fi
  while IFS= read -r package; do
    packages+=("$package")
  done <<<"$missing"
  run "$python" -m pip install "${packages[@]}"
}

make_venv() {
  "$1/bin/python" -c 'import pip' 2>/dev/null || run python3 -m venv "$1"
  python=$1/bin/python
}

# Print the lines of requirements files whose package is not installed, torch's aside.
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

# launch SCRIPT FLAGS...: run a training script, as GPUS_PER_NODE processes on each of NNODES machines. Where LAUNCHER names
# a script, that starts the processes. With --dry-run there is one process, which is told how many it stands for.
launch() {
  local name world=$((GPUS_PER_NODE * NNODES))
  if given --dry-run "$@"; then
    given --world-size "$@" || set -- "$@" --world-size "$world"
    attend "$python" "$@"
    exit # nothing is there to go on with
  elif [[ -n ${LAUNCHER:-} ]]; then
    attend bash "$LAUNCHER" "$python" "$@"
  elif ((world == 1)); then
    attend "$python" "$@"
  else
    for name in NODE_RANK MASTER_ADDR; do
      [[ -n ${!name:-} ]] ||
        fail "$name is not set, but NNODES is $NNODES; docs/launching.md says what each machine needs; NNODES=1 for one"
    done
    # Of processes that are told to stop, torchrun kills those that are still saving after 30 seconds, unless told this.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
    attend "$python" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" \
      --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
  fi
}

# given FLAG WORD...: whether FLAG is one of the words.
given() {
  local word flag=$1
  shift
  for word; do
    [[ $word == "$flag" || $word == "$flag="* ]] && return
  done
  return 1
}

# need_variables NAME...: fail unless these are set.
need_variables() {
  local name
  for name; do
    [[ -n ${!name:-} ]] || fail "$name is not set; bash $0 --help says what it is"
  done
}

# pretrain_bert FLAGS...: with the settings of arXiv 1909.08053 section 5.3 where these flags say nothing else.
pretrain_bert() {
  local first data
  if given --dry-run "$@" || given --mock-data "$@"; then
    first=(--tokenizer-type NullTokenizer --vocab-size 30522) # as many as the published vocabulary has
    given --mock-data "$@" || first+=(--mock-data)
  else
    need_variables DATA_PATH VOCAB_FILE CHECKPOINT_PATH
    read -ra data <<<"$DATA_PATH"
    first=(
      --data-path "${data[@]}" --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE"
      --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10000
      --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" --metrics-path "$CHECKPOINT_PATH/metrics.jsonl"
    )
  fi
  be_interruptible
  setup_python "${repo}requirements.txt"
  launch "${repo}pretrain_bert.py" "${first[@]}" \
    --seq-length 512 --max-position-embeddings 512 --global-batch-size 1024 --train-iters 2000000 \
    --lr 1e-4 --lr-decay-style linear --lr-decay-iters 2000000 --lr-warmup-iters 10000 --min-lr 1e-5 \
    --weight-decay 1e-2 --clip-grad 1.0 --bf16 --split 949,50,1 \
    --log-interval 100 --eval-interval 1000 --eval-iters 10 "$@"
}
