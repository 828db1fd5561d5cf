#!/usr/bin/env bash
# Run everything that needs a GPU, on a machine that has the packages and no network: the tests marked gpu, then speed
# and memory compared with other training loops.
#
#   bash benchmarks/gpu.sh [PART...]
#
# PART is tests; a size of benchmarks/train.py: small (also with --cuda-graph), 355m, 1.3b or 7b (8 of its layers); or
# planner, which compares predictions of time and memory with runs (benchmarks/planner_gpu.py); by default all of them.
# A call ends within LIMIT seconds (default: 520); name the parts that it did not reach in the next call. Results are
# added to benchmarks/results/<device>.json. The table of all results, with a verdict for each goal, comes last.
#
#   NANOGPT  a checkout of nanoGPT to compare with (default: none)
#   PYTHON   the Python that has the packages (default: python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

: "${LIMIT:=520}" "${NANOGPT:=}" "${PYTHON:=python3}"
train=(benchmarks/train.py --device cuda --precisions bf16 ${NANOGPT:+--nanogpt "$NANOGPT"})
parts=("$@")
((${#parts[@]})) || parts=(tests small 355m 1.3b 7b planner)

# The last line is the name, or what is wrong.
name=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())' 2>&1) ||
  fail "torch finds no GPU (PYTHON=$PYTHON): ${name##*$'\n'}"
name=${name##*$'\n'}
results=benchmarks/results/$(tr '[:upper:] /' '[:lower:]--' <<<"$name").json
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Run Python for the time that is left of this call.
within_limit() {
  ((SECONDS < LIMIT)) || fail "LIMIT=$LIMIT seconds are over; call again with this part"
  run timeout --signal=INT --kill-after=10 "$((LIMIT - SECONDS))" "$PYTHON" "$@"
}

status=0
for part in "${parts[@]}"; do
  found=$scratch/$part
  case $part in
    # Most of a test is compiling.
    tests) (within_limit -m pytest -m gpu -n 6 --junitxml "$found") || status=$? ;;
    planner) (within_limit benchmarks/planner_gpu.py --output "$found") || status=$? ;;
    *) (within_limit "${train[@]}" --sizes "$part" --output "$found") || status=$? ;;
  esac
  [[ ! -e $found ]] || "$PYTHON" benchmarks/gpu_table.py "$results" "$part" "$found"
done
"$PYTHON" benchmarks/gpu_table.py "$results"
exit "$status"
