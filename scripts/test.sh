#!/usr/bin/env bash
# All set-up, then the whole test suite. Arguments go to pytest: bash scripts/test.sh tests/data -k cache
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
say "real clips for the tests"
python scripts/fetch_clips.py .setup/clips
say "tests"
python -m pytest "$@"
