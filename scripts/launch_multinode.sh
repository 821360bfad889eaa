#!/usr/bin/env bash
# Start `wands train` on one or many nodes: with torchrun on every node, or with a hostfile and the deepspeed launcher.
set -euo pipefail

usage() {
  cat <<'EOF'
bash scripts/launch_multinode.sh OPTIONS -- [arguments of wands train]

With torchrun: run the same command on every node (Kubernetes, srun, a shell on each node).
  --nnodes N             number of nodes, or MIN:MAX; also NNODES [in SLURM: the nodes of the job]
  --node-rank R          number of this node, 0 to N-1; also NODE_RANK [in SLURM: the number of the task's node; of one node: 0]
  --master-addr HOST     name or address of node 0, as the other nodes reach it; also MASTER_ADDR [in SLURM: the first node;
                         of one node: 127.0.0.1]
  --nproc-per-node G     processes on this node [default: the number of GPUs]; also NPROC_PER_NODE

  If a process crashes, is killed or hangs, all processes start again and resume from the newest checkpoint. The run ends
  after 3 restarts without a new checkpoint, after an error that only you can fix (exit code 2), and after a request to stop.
  With MIN:MAX, the run continues without nodes that are gone, and with nodes that come back. Choose train.bins_per_step as
  a multiple of all numbers of data-parallel ranks. If node 0 is gone, the run ends.

With the deepspeed launcher: run the command on one node; it uses ssh (needs pdsh and ssh without a password). No restarts.
  --hostfile FILE        one line per node: NAME slots=GPUS. With --node-rank R: run the command on every node; no ssh is used.
  --master-addr HOST     [default: the first address of the first node; with --node-rank its name]

Both:
  --master-port PORT     free port of node 0 [default: 29500; in SLURM from the job's number]; also MASTER_PORT
  --interface NAME       network interface for NCCL and gloo [default: chosen by NCCL and gloo]

Paths (recipe, cache, model, output_dir) and the Python environment must be the same on all nodes.
Example:  bash scripts/launch_multinode.sh --nnodes 4 --node-rank 0 --master-addr node0 -- wan2.1-t2v-14b-finetune \
            --deepspeed ds_configs/zero3.json --set parallel.cp_size=8 --set data.cache=/shared/cache --set output_dir=/shared/run
EOF
}

die() {
  echo "launch_multinode: $*" >&2
  exit 2
}

need() { # need COMMAND CURE
  command -v "$1" >/dev/null 2>&1 || die "$1 is not on PATH; $2."
}

number() { # number OPTION VALUE LEAST
  if ! [[ "$2" =~ ^(0|[1-9][0-9]*)$ ]] || (($2 < $3)); then
    die "$1=$2 is not a whole number from $3 on."
  fi
}

hostfile="" interface="" nnodes="${NNODES:-}" node_rank="${NODE_RANK:-}" nproc="${NPROC_PER_NODE:-}"
master_addr="${MASTER_ADDR:-}" master_port="${MASTER_PORT:-}"
while (($#)) && [ "$1" != -- ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --hostfile | --nnodes | --node-rank | --master-addr | --master-port | --nproc-per-node | --interface)
      if (($# == 1)) || [ "$2" = -- ]; then die "$1 needs a value."; fi ;;
    *) die "$1 is not an option (--help shows them); what is for wands train comes after --." ;;
  esac
  case "$1" in
    --hostfile) hostfile="$2" ;;
    --nnodes) nnodes="$2" ;;
    --node-rank) node_rank="$2" ;;
    --master-addr) master_addr="$2" ;;
    --master-port) master_port="$2" ;;
    --nproc-per-node) nproc="$2" ;;
    --interface) interface="$2" ;;
  esac
  shift 2
done
(($#)) || die "-- is missing; what comes after it goes to wands train (--help shows an example)."
shift

# Launchers and workers do not search the current folder for modules: a file torch.py there would run on every node.
export PYTHONSAFEPATH=1

if [ -n "$interface" ]; then
  # Each library guesses from its own rules, and on nodes with docker bridges, a management network, or a host name that
  # /etc/hosts maps to 127.0.1.1 the guess can be one that the other nodes do not reach.
  export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"
fi

share_cores() { # share_cores PROCESSES
  # torchrun would set one thread, DeepSpeed none at all (every core for each rank): the Adam of offloaded states steps on the host.
  local threads=$(($(nproc) / $1))
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"
}

with_torchrun() {
  need python "activate the environment that wands is installed in, on every node"
  if [ -n "${SLURM_NODEID:-}" ]; then
    nnodes="${nnodes:-${SLURM_NNODES:-}}"
    node_rank="${node_rank:-$SLURM_NODEID}"
    nproc="${nproc:-${SLURM_GPUS_ON_NODE:-}}"
    if [ -z "$master_addr" ]; then
      need scontrol "give --master-addr"
      read -r master_addr < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || die "scontrol names no node; give --master-addr."
    fi
    # Two jobs may share a node: each gets a port of its own, the same on all nodes of a job.
    master_port="${master_port:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}"
  fi
  if [ "$nnodes" = 1 ]; then
    node_rank="${node_rank:-0}" master_addr="${master_addr:-127.0.0.1}"
  fi
  [ -n "$nnodes" ] || die "--nnodes is missing: the number of nodes (or use --hostfile FILE)."
  local most="${nnodes#*:}"
  number --nnodes "${nnodes%%:*}" 1
  number --nnodes "$most" "${nnodes%%:*}"
  [ -n "$node_rank" ] || die "--node-rank is missing: the number of this node, 0 to $((most - 1))."
  number --node-rank "$node_rank" 0
  ((node_rank < most)) || die "--node-rank=$node_rank must be less than --nnodes=$nnodes."
  [ -n "$master_addr" ] || die "--master-addr is missing: name or address of node 0, as the other nodes reach it."
  if [ -z "$nproc" ]; then
    nproc="$(python -c 'import torch; print(torch.cuda.device_count())')" || die "torch does not load here (above)."
    ((nproc)) || die "no GPU is seen here; give --nproc-per-node."
  fi
  number --nproc-per-node "$nproc" 1
  share_cores "$nproc"
  # Node 0 waits for connections at the master address; torchrun's own guess from host names fails in some containers.
  local here=(--rdzv-conf read_timeout=600,is_host=0)
  ((node_rank)) || here=(--rdzv-conf read_timeout=600,is_host=1 --local-addr "$master_addr")
  exec python -m wands.watch.restart --nnodes "$nnodes" --nproc-per-node "$nproc" --rdzv-backend c10d \
    --rdzv-endpoint "$master_addr:${master_port:-29500}" "${here[@]}" -m wands train "$@"
}

# "NAME SLOTS" a line; DeepSpeed reads the file the same way, and tells what is wrong with the rest of a line.
hosts() { sed -nE 's/^[[:space:]]*([^#[:space:]]+)[[:space:]]+slots=([0-9]+).*/\1 \2/p' "$hostfile"; }

# What DeepSpeed carries over ssh by itself is NCCL_* (only if the starting node has a GPU) and PYTHON*. No token is among these:
# they show in the process list of every node.
carried() {
  env | grep -E '^(NCCL_|GLOO_|PYTORCH_|TORCH_|TRITON_|(CUDA_DEVICE_MAX_CONNECTIONS|DS_ACCELERATOR|OMP_NUM_THREADS|CUDA_HOME|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE)=)' || true
  grep -hs . "${DS_ENV_FILE:-$HOME/.deepspeed_env}" .deepspeed_env || true # where DeepSpeed looks without us; the last one counts
}

with_deepspeed() {
  [ -f "$hostfile" ] || die "--hostfile $hostfile does not exist; write one line per node: NAME slots=GPUS."
  local nodes
  mapfile -t nodes < <(hosts)
  ((${#nodes[@]})) || die "--hostfile $hostfile names no node; write one line per node: NAME slots=GPUS."
  need deepspeed "activate the environment that wands is installed in"
  local options=(--hostfile "$hostfile" --master_port "${master_port:-29500}")
  if [ -n "$node_rank" ]; then
    number --node-rank "$node_rank" 0
    ((node_rank < ${#nodes[@]})) || die "--node-rank=$node_rank must be less than the ${#nodes[@]} nodes of --hostfile $hostfile."
    share_cores "${nodes[node_rank]#* }"
    exec deepspeed "${options[@]}" --no_ssh --node_rank "$node_rank" --master_addr "${master_addr:-${nodes[0]% *}}" \
      --module wands train "$@"
  fi
  need pdsh "install it on this node, or start the same line with --node-rank on every node"
  local names reply
  names="$(printf '%s\n' "${nodes[@]% *}" | paste -sd, -)"
  # DeepSpeed tries the first node only, and a rank that never comes keeps the others waiting for half an hour.
  reply="$(PDSH_RCMD_TYPE=ssh PDSH_SSH_ARGS_APPEND="-o BatchMode=yes -o ConnectTimeout=10" pdsh -S -w "$names" true 2>&1)" ||
    die "not every node of --hostfile $hostfile answers ssh without a password (${reply%%$'\n'*})."
  # pdsh hands the line to a shell on each node. DeepSpeed quotes only arguments with a space, and those in double quotes.
  local argument quoted arguments=()
  for argument in "$@"; do
    printf -v quoted %q "$argument"
    arguments+=("${quoted//\\ /\$\'\\x20\'}")
  done
  # DeepSpeed takes variables from a file only. This one is gone once it is open, whatever ends the launch.
  local file fd
  file="$(mktemp)"
  carried >"$file"
  exec {fd}<"$file"
  rm "$file"
  [ -z "$master_addr" ] || options+=(--master_addr "$master_addr")
  DS_ENV_FILE="/proc/$$/fd/$fd" exec deepspeed "${options[@]}" --no_ssh_check --module wands train "${arguments[@]}"
}

if [ -n "$hostfile" ]; then
  with_deepspeed "$@"
else
  with_torchrun "$@"
fi
