#!/usr/bin/env bash
# Trains on the nodes of a SLURM job: sbatch scripts/launch_slurm.sh [arguments of wands train], from the repository and with its
# environment active. Options of sbatch before the script's name win over the lines below:
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 scripts/launch_slurm.sh wan2.1-t2v-14b-finetune \
#     --deepspeed ds_configs/zero3.json --set parallel.cp_size=8 --set data.cache=/shared/cache --set output_dir=/shared/run
# Five minutes before the time limit the run is asked, by a file, to save and stop; the job then queues again and goes on from
# there. `sbatch --no-requeue` stops it instead. Large models take longer to save: --signal=B:TERM@900.
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
[ -n "$run_dir" ] || die "add --set output_dir=FOLDER: the file that asks the run to save goes there."

arguments=("$@")
if ((${SLURM_RESTART_COUNT:-0})) && [[ " $* " != *" --resume"* ]]; then
  arguments+=(--resume) # last, because what follows it could be its value
fi

# A file and not the signal: torchrun and srun kill their processes seconds after one, a large checkpoint takes minutes.
asked=0
trap 'asked=$((asked + 1)); mkdir -p "$run_dir" && touch "$run_dir/save_quit" || true' TERM

# One torchrun per node. A node that fails alone ends the job: the others would wait for it. No binding, and the cores that the
# job has (srun does not take them over): the one task is the parent of all ranks of its node.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash "$launcher" -- "${arguments[@]}" &
job=$!
while
  before=$asked code=0
  wait "$job" || code=$?
  ((asked > before)) # a signal ends `wait`, not the run
do :; done

if ((asked)) && [ -e "$run_dir/save_quit" ]; then
  rm "$run_dir/save_quit" # the run was over before it looked: the next one must not stop for it
elif ((asked && code == 0)); then
  scontrol requeue "$SLURM_JOB_ID" || die "saved and stopped, but SLURM does not queue the job again (above)."
fi
exit "$code"
