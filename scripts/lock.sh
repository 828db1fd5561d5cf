#!/usr/bin/env bash
# Write constraints.txt: the version of every package that requirements.txt, requirements-dev.txt and the extra fp8 of
# pyproject.toml bring, directly or not, for each version of Python and each system. Run it after changing a requirement.
# torch is left out, with the CUDA packages that it fixes itself, because they differ between its wheels.
#
#   bash scripts/lock.sh               # keeps the versions of constraints.txt where they still fit
#   bash scripts/lock.sh --upgrade     # takes the newest ones
#
# The flags are those of `uv pip compile`. Requires uv: pip install uv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
command -v uv >/dev/null || fail "uv is not installed; install it: pip install uv"
cd "$root"
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
cp constraints.txt "$locked"
uv pip compile --universal --python-version 3.10 --quiet --no-header --no-annotate --no-emit-package torch \
  --output-file "$locked" --extra fp8 "$@" requirements-dev.txt pyproject.toml
{
  echo "# Made by scripts/lock.sh. Use it with: pip install -c constraints.txt -r requirements.txt"
  grep -vE '^(cuda|nvidia|triton)[-=]' "$locked"
} >constraints.txt
echo "wrote constraints.txt"
