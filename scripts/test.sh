#!/usr/bin/env bash
# Run the tests.
#
#   bash scripts/test.sh [arguments of pytest]
#
# Creates the environment first if necessary. `-m slow` and `-m gpu` run the tests that are skipped by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_python requirements.txt requirements-dev.txt
# Tests start several processes at once, and more than one thread per process makes them slower.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
run "$python" -m pytest "$@"
