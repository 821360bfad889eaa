#!/usr/bin/env bash
# Set up the environment and run the tests. The tiers are described in tests/README.md.
#   bash scripts/test.sh                  default tier, part of .ci/run
#   bash scripts/test.sh --all [ARGS]     also the tests marked slow and kill
#   bash scripts/test.sh PATH [ARGS]      pytest with these arguments, also slow and kill tests
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
say "real clips for the tests"
python scripts/fetch_clips.py .setup/clips
say "tests"
tier="not slow and not kill and not full and not gpu"
if [ "${1:-}" = --all ]; then
  tier="not full and not gpu"
  shift
elif [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "$tier" "$@"
if [ "${DS_ACCELERATOR:-}" != cpu ]; then
  say "tests that need a GPU"
  python -m pytest -m gpu
fi
