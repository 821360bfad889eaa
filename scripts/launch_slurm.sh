#!/usr/bin/env bash
# Train on the nodes of a SLURM job: sbatch scripts/launch_slurm.sh [arguments of wands train]. Call sbatch in the folder of the
# repository, with its environment active. Options of sbatch before the script's name override the lines below:
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 scripts/launch_slurm.sh wan2.1-t2v-14b-finetune \
#     --deepspeed ds_configs/zero3.json --set parallel.cp_size=8 --set data.cache=/shared/cache --set output_dir=/shared/run
# Five minutes before the time limit, a request file makes the run save a checkpoint and stop. The job is then queued again and
# resumes. Large models take longer to save: --signal=B:TERM@900. After a crash, the nodes restart the run inside the job; if a
# node or a launcher fails, the job is queued again, at most 3 times without a new checkpoint. After an error that only the user
# can fix (exit code 2), the job ends. `sbatch --no-requeue`: the job is never queued again.
#SBATCH --job-name=wands
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

die() {
  echo "launch_slurm: $*" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is not inside a SLURM job; start it with: sbatch scripts/launch_slurm.sh ..."
# SLURM runs a copy of this file, so its own path says nothing.
launcher="${SLURM_SUBMIT_DIR:-.}/scripts/launch_multinode.sh"
[ -f "$launcher" ] || die "$launcher does not exist; call sbatch in the repository's folder."

run_dir=""
for argument in "$@"; do
  case "$argument" in output_dir=* | --set=output_dir=*) run_dir="${argument#*output_dir=}" ;; esac
done
[ -n "$run_dir" ] || die "add --set output_dir=FOLDER: the request file that makes the run save is written there."

arguments=("$@")
if ((${SLURM_RESTART_COUNT:-0})) && [[ " $* " != *" --resume"* ]]; then
  arguments+=(--resume) # last, because what follows it could be its value
fi

# A file instead of the signal: srun kills its processes seconds after a signal, and a large checkpoint takes minutes.
asked=0
trap 'asked=$((asked + 1)); mkdir -p "$run_dir" && touch "$run_dir/save_quit" || true' TERM

# One torchrun per node. If the torchrun of one node ends, the others get a minute to end too, so that srun returns their largest
# exit code and not that of a kill. The task is the parent of all ranks of its node: it gets all cores of the job, without binding.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=60 --cpu-bind=none ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash "$launcher" -- "${arguments[@]}" &
job=$!
while
  before=$asked code=0
  wait "$job" || code=$?
  ((asked > before)) # a signal ends `wait`, but not the run
do :; done

requeue() {
  scontrol requeue "$SLURM_JOB_ID" && return
  echo "launch_slurm: SLURM does not queue the job again (see above)." >&2
  code=$((code ? code : 2))
}

if ((asked)) && [ -e "$run_dir/save_quit" ]; then
  rm "$run_dir/save_quit" # the run ended before it read the request: the next run must not stop
elif ((asked && code == 0)); then
  requeue
elif ((!asked && code != 0 && code != 2)); then
  newest="$(cat "$run_dir/checkpoints/latest" 2>/dev/null || true)" events="$run_dir/events.jsonl"
  row="{\"event\": \"requeue\", \"job\": \"$SLURM_JOB_ID\", \"checkpoint\": \"$newest\"}"
  if (($(grep -cxF "$row" "$events" 2>/dev/null || true) + 0 >= 3)); then
    echo "launch_slurm: the job was queued again 3 times without a new checkpoint (newest: ${newest:-none}) and ends." >&2
  else
    mkdir -p "$run_dir"
    echo "$row" >>"$events"
    requeue
  fi
fi
exit "$code"
