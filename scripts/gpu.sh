#!/usr/bin/env bash
# What only a GPU can show: the tests that need one, then the benchmarks on it. A log of each goes to --out DIR (default gpu_out);
# the last lines say which passed. Several GPUs are needed for the benchmark of context parallelism alone.
set -euo pipefail
cd "$(dirname "$0")/.."
out=gpu_out
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out="${2:?--out needs a folder}"; shift 2 ;;
    -h | --help) sed -n '2,3p' "$0"; exit 0 ;;
    *) echo "gpu.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
source scripts/setup.sh dev
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" = 0 ]; then
  echo "gpu.sh: PyTorch finds no GPU here; run it on a machine with one, with a CUDA build of torch" >&2
  exit 2
fi
mkdir -p "$out"
python scripts/fetch_clips.py .setup/clips

results=() failed=0
run() {
  local name="$1" code=0
  shift
  say "$name: $*"
  "$@" 2>&1 | tee "$out/$name.log" || code=$?
  results+=("$(printf '%-18s %s' "$name" "$([ "$code" = 0 ] && echo passed || echo "failed ($code)")")")
  [ "$code" = 0 ] || failed=1
}
run tests python -m pytest -m gpu
run bench_step python scripts/bench_step.py --device cuda
run bench_memory python scripts/bench_memory.py --device cuda
if [ "$gpus" -gt 1 ]; then
  run bench_attention python scripts/bench_attention.py --device cuda
fi
say "results on $gpus x $(python -c 'import torch; print(torch.cuda.get_device_name(0))'), logs in $out"
printf '%s\n' "${results[@]}"
exit "$failed"
