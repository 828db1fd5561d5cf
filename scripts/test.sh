#!/usr/bin/env bash
# Run the tests.
#
#   bash scripts/test.sh [arguments of pytest]
#
# Creates the environment first if necessary. Two workers share the tests; `-n 8` starts more, `-n 0` none, as a
# debugger needs. `-m slow` and `-m gpu` run the tests that are skipped by default.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

setup_python requirements.txt requirements-dev.txt
# Tests start several processes at once, and more than one thread per process makes them slower.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Tests of a file share what they build, so that one worker runs them all.
run "$python" -m pytest -n 2 --dist loadfile "$@"
