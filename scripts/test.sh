#!/usr/bin/env bash
# All set-up, then the whole test suite; where there is a GPU, also the tests that need one, which the others do not see.
# Arguments go to pytest: bash scripts/test.sh tests/data -k cache
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
say "real clips for the tests"
python scripts/fetch_clips.py .setup/clips
say "tests"
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
python -m pytest -n 2 --dist loadfile # a file's tests share what the first of them has made
if [ "${DS_ACCELERATOR:-}" != cpu ]; then
  say "tests that need a GPU"
  python -m pytest -m gpu
fi
