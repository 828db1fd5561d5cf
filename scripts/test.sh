#!/usr/bin/env bash
# Run the tests.
#
#   bash scripts/test.sh [arguments of pytest]
#
# Makes the environment first, if need be. `-m slow` and `-m gpu` run the tests that are left out otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_python requirements.txt requirements-dev.txt
# Tests start several processes at a time; more than one thread in each makes them slower, not faster.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
run "$python" -m pytest "$@"
