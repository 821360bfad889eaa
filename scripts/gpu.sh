#!/usr/bin/env bash
# Measure on a GPU what a machine without one cannot show, in stages: bash scripts/gpu.sh --only STAGE --out DIR --limit SECONDS
#   attention  copies, matmuls and attention kernels at real shapes       block   one block of 1.3B and 14B: kernels and bytes
#   step       training steps of 1.3B and a LoRA of 14B, also in fp8      tests   the tests marked gpu
#   memory     bench_memory.py                                            infer   time of each part of wands infer
#   encode     clips and captions a second in preprocess                  compare wands, and diffusers + accelerate + DeepSpeed
#   causal     steps with teacher forcing, and a rollout
# DIR (default gpu_out) gets STAGE.json, STAGE.txt and STAGE.log. The results are written after every part, so that a stage that
# is ended after --limit SECONDS (default 520) keeps what it had. Without --only, all stages run. --only may be repeated.
#   --set KEY=VALUE   recipe override for block, step and compare, such as attention.backend=torch
#   --part TEXT       run only the parts of a stage whose names contain TEXT, such as '8 clips'
#   --device cpu      a rehearsal with tiny sizes, on a machine without a GPU
# Without a network: WANDS_VENV=none WANDS_WHEELS=FOLDER (scripts/wheelhouse.sh fills FOLDER), and WANDS_CLIPS=FOLDER for `tests`.
set -euo pipefail
cd "$(dirname "$0")/.."
out=gpu_out limit=520 device=cuda stages=() overrides=()
all="attention block step tests memory infer encode compare causal"
while [ $# -gt 0 ]; do
  case "$1" in
    --only)
      [[ " $all " = *" ${2:?--only needs a stage} "* ]] || { echo "gpu.sh: --only $2 is not a stage; use one of $all" >&2; exit 2; }
      stages+=("$2"); shift 2 ;;
    --out) out="${2:?--out needs a folder}"; shift 2 ;;
    --limit) limit="${2:?--limit needs a number of seconds}"; shift 2 ;;
    --device) device="${2:?--device needs cuda or cpu}"; shift 2 ;;
    --set) overrides+=(--set "${2:?--set needs KEY=VALUE}"); shift 2 ;;
    --part) overrides+=(--part "${2:?--part needs a text}"); shift 2 ;;
    -h | --help) sed -n '2,13p' "$0"; exit 0 ;;
    *) echo "gpu.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || read -ra stages <<<"$all"
[ "$device" = cuda ] || export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
source scripts/setup.sh dev
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$device" = cuda ] && [ "$gpus" = 0 ]; then
  echo "gpu.sh: PyTorch finds no GPU here; use a machine with a GPU and a CUDA build of torch, or --device cpu for a rehearsal" >&2
  exit 2
fi
mkdir -p "$out"

results=() failed=0
run() {
  local name="$1" code=0 result=passed
  shift
  say "$name: $*"
  timeout --kill-after 10 "$limit" "$@" 2>&1 | tee "$out/$name.log" || code=$?
  case "$code" in
    0) ;;
    124 | 137) result="ended after $limit s" ;;
    *) result="failed ($code)" ;;
  esac
  results+=("$(printf '%-18s %s' "$name" "$result")")
  [ "$code" = 0 ] || failed=1
}
for stage in "${stages[@]}"; do
  if [ "$stage" = tests ] && [ -z "${WANDS_CLIPS:-}" ]; then
    python scripts/fetch_clips.py "$SETUP/clips" || echo "gpu.sh: no clips; tests that need clips will fail" >&2
  fi
  run "$stage" python scripts/gpu_stages.py "$stage" --device "$device" --out "$out" ${overrides[@]+"${overrides[@]}"}
  if [ "$stage" = attention ] && [ "$gpus" -gt 1 ]; then
    run bench_attention python scripts/bench_attention.py --device cuda
  fi
done
say "results on $gpus x $([ "$gpus" = 0 ] && echo CPU || python -c 'import torch; print(torch.cuda.get_device_name(0))'), files in $out"
printf '%s\n' "${results[@]}"
exit "$failed"
