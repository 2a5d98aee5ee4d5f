#!/usr/bin/env bash
# Trains under mpirun (Open MPI, MPICH, Intel MPI), which starts every rank; torchrun has no part in it:
#     bash launch/mpirun.sh [--site NAME] [--preflight] [train.py options]
# With several nodes their hosts stand in launch/hosts.txt, or in HOSTS_FILE; in a job of Slurm, PBS or LSF
# mpirun knows them. MPIRUN is another mpirun. Exit status and signals as with local.sh.
# It is also what every rank runs, so another mpirun command does as well, such as
#     mpirun -np 8 -x MASTER_ADDR=first-host bash launch/mpirun.sh [train.py options]
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # macOS has no readlink -f
  target=$(readlink "$script")
  case $target in /*) script=$target ;; *) script=$(dirname "$script")/$target ;; esac
done
PROJECT_DIR=${PROJECT_DIR:-$(dirname "$script")/..}
case ${HOSTS_FILE:=} in '' | /*) ;; *) HOSTS_FILE=$PWD/$HOSTS_FILE ;; esac
own_python=${PYTHON:-}
: "${GPUS_PER_NODE:=${SLURM_GPUS_ON_NODE:-}}"

# --- a rank: mpirun has started this script -----------------------------------------------------------

# As Open MPI, Hydra (MPICH, Intel MPI) and PALS (Cray) tell it. Open MPI's NODE_RANK is no node's number.
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-}}}
size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}
local_rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${PMI_LOCAL_RANK:-}}}
local_size=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-${PMI_LOCAL_SIZE:-}}}

leave_mpi() { # STATUS
  rm -rf "${SCAFFOLD_CONTROL:-}"
  # mpirun ends all when one exits with another status than 0: let the others say why, and leave the run.
  [ "$1" = 0 ] || sleep 2
  # Hydra does not, before MPI_Init: this is how MPI_Abort asks it to.
  case $1 in 0 | 75) ;; *) [ -z "${PMI_FD:-}" ] || echo "cmd=abort exitcode=$1" >&"$PMI_FD" || true ;; esac
}

if [ -n "$rank" ]; then
  trap 'leave_mpi $?' EXIT
  # With the launch's files, where they are on this host: they go even if this rank is killed.
  [ ! -d "${SCAFFOLD_LAUNCH:-}" ] || SCAFFOLD_CONTROL=$SCAFFOLD_LAUNCH/$rank
fi
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh"
[ -z "$rank" ] || trap 'leave_mpi $?' EXIT

rank_of_mpi() { # TRAIN.PY OPTIONS...
  local status=0 job program=train.py
  [ -n "$size" ] && [ -n "$local_rank" ] && [ -n "$local_size" ] ||
    die "this mpirun does not say where its ranks run: use that of Open MPI, MPICH or Intel MPI"
  [ $((size % local_size)) = 0 ] && [ $((rank % local_size)) = "$local_rank" ] ||
    die "rank $rank of $size is number $local_rank of $local_size on $(hostname): as many ranks on each node, in order (--map-by ppr:N:node)"
  # What follows is the same for all ranks of a node: one says it.
  exec 4>&2
  [ "$local_rank" = 0 ] || exec 2>/dev/null
  NNODES=$((size / local_size)) NODE_RANK=$((rank / local_size)) NPROC_PER_NODE=$local_size
  [ "$NNODES" -gt 1 ] || : "${MASTER_ADDR:=127.0.0.1}"
  [ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give the address of rank 0's host, which mpirun does not tell"
  job=$(cksum <<<"${PMIX_NAMESPACE:-}${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}")
  : "${MASTER_PORT:=$((20000 + ${job%% *} % 10000))}"
  [ -n "${SCAFFOLD_LOOKED:-}" ] || choose_ranks
  export NNODES GPUS_PER_NODE NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT NETWORK_INTERFACE
  if [ "$PREFLIGHT" = 0 ]; then
    NODE_RANK=$rank choose_interface # rank 0 looks whether its port is free
    if [ "$local_rank" = 0 ]; then
      prepare "$@"
      if [ "$rank" != 0 ]; then
        await_node_0 &
        finish $! || exit 1
      fi
    fi
  else
    [ "$local_rank" = 0 ] || exit 0 # one process a node
    program=launch/preflight.py
  fi
  exec 2>&4 4>&-

  # shellcheck disable=SC2329 # common.sh calls it
  say() { :; } # one voice is enough: that of the script that started mpirun
  export RANK=$rank WORLD_SIZE=$size LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=$local_size
  (
    trap '' HUP INT TERM USR1 # mpirun signals this process too; it may not listen yet, but for "stop"
    exec "${INTERPRETER[@]}" "$program" "$@"
  ) &
  AGENT=$!
  finish "$AGENT" || status=$?
  if [ -s "$SCAFFOLD_CONTROL/error" ]; then
    # With 0 every rank ends for the same reason: one says it.
    [ "$status" = 0 ] && [ "$rank" != 0 ] || cat "$SCAFFOLD_CONTROL/error" >&2
    status=1
  elif [ -e "$SCAFFOLD_CONTROL/preempted" ]; then
    status=75
  elif [ "$status" -gt 128 ] && [ -z "$KILLED" ]; then
    echo "error: rank $rank on $(hostname) was killed by signal $((status - 128)) (9 is often memory run out)" >&2
  elif [ "$status" != 0 ] && [ ! -e "$SCAFFOLD_CONTROL/run" ]; then
    explain_import
  fi
  exit "$status"
}
[ -z "$rank" ] || rank_of_mpi "$@"

# --- the launch: it starts mpirun ---------------------------------------------------------------------

keep_errors() { # passes stderr on, and keeps the cause of a failure
  local line cause='' words='' more='' killer='' i
  trap '' HUP INT QUIT TERM USR1
  SECONDS=0
  while IFS= read -r line || [ -n "$line" ]; do
    printf '%s\n' "$line" || true
    case $line in
      error:*"lost the other ranks"*) words=${line#error: } ;;
      error:*) [ -n "$cause" ] || { cause=${line#error: } more=1; continue; } ;;
      launch:*"rank(s) here"* | launch:*"waiting for node 0"* | launch:*"no GPU found"*) ;;
      launch:*) words=${line#launch: } ;;
      ssh:* | *": Permission denied ("* | "Host key verification failed"*)
        words=$line
        if [ -z "$killer" ] && [ "$SECONDS" -lt 60 ]; then # Hydra waits for ever where it cannot log in
          { for ((i = 0; i < 15; i++)); do sleep 1; done; kill_ranks; } >/dev/null 2>&1 &
          killer=$!
        fi
        ;;
      [!-=[]*) [ -z "$more" ] || cause=$cause$'\n'$line ;; # the second line of a cause
    esac
    more=''
  done 2>/dev/null
  [ -z "$killer" ] || kill -s KILL "$killer" 2>/dev/null || true
  printf '%s' "${cause:-$words}" >"$SCAFFOLD_CONTROL/cause"
}

# Prints an address of the first host that the others reach, and a port that is free here.
find_master() {
  "${INTERPRETER[@]}" - "$@" <<'PYTHON_CODE'
import ipaddress, random, socket, sys

first, *others = sys.argv[1:]
try:
    address = socket.getaddrinfo(first, None)[0][4][0]
    if others and ipaddress.ip_address(address.split("%")[0]).is_loopback:
        # This is the first host, by a name that only stands for itself: its address towards another.
        family, _, _, _, to = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(to)  # sends nothing
            address = probe.getsockname()[0]
except OSError as error:
    sys.exit(f"launch: no address of {first} can be found here ({error.strerror}): set MASTER_ADDR")
while True:
    port = random.randrange(20000, 30000)
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            break
        except OSError:
            continue
print(address, port)
PYTHON_CODE
}

case $NNODES in *:*) die "NNODES is $NNODES, but mpirun starts a fixed number of ranks: give one number" ;; esac
case " ${PASS_ENV:=}" in
  *[!A-Za-z0-9_\ ]* | *\ [0-9]*) die "PASS_ENV must be names of variables; it is '$PASS_ENV'" ;;
esac
mpirun=${MPIRUN:-mpirun}
command -v "$mpirun" >/dev/null ||
  die "no $mpirun here: install Open MPI or MPICH, or load its module in activate() of $SITE_FILE"
version=$("$mpirun" --version 2>&1 </dev/null) || true

hosts=() known='' # known: mpirun has the hosts from the scheduler
if [ -n "${SLURM_JOB_ID:-}" ]; then
  known=1
  command -v scontrol >/dev/null || die "this is a Slurm job, but there is no scontrol here to tell its nodes"
  listed=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") # where it fails it has said why
elif [ -n "${PBS_NODEFILE:-}${LSB_DJOB_HOSTFILE:-}" ]; then
  known=1
  listed=$(awk '!seen[$0]++' "${PBS_NODEFILE:-$LSB_DJOB_HOSTFILE}")
elif [ "$NNODES" = 1 ]; then
  listed=localhost
else
  : "${HOSTS_FILE:=$PROJECT_DIR/launch/hosts.txt}"
  [ -r "$HOSTS_FILE" ] || die "no $HOSTS_FILE: write one host a line into it"
  listed=$(sed -e 's/#.*//' -e 's/\r$//' "$HOSTS_FILE")
fi
count=0
while read -r host rest; do
  [ -n "$host" ] || continue
  case $host$rest in *[@:,]* | -*) die "$HOSTS_FILE: one host name a line, not '$host $rest'; users belong into ~/.ssh/config" ;; esac
  hosts+=("$host") count=$((count + 1))
done <<<"$listed"
if [ -n "$known" ]; then
  NNODES=$count
elif [ "$count" -lt "$NNODES" ]; then
  die "NNODES is $NNODES, but $HOSTS_FILE names $count host(s): add hosts, or set NNODES"
elif [ "$count" -gt "$NNODES" ]; then
  say "NNODES is $NNODES: the first of the $count hosts of $HOSTS_FILE"
  hosts=("${hosts[@]:0:NNODES}")
fi

if [ "$NNODES" = 1 ]; then
  choose_ranks
  export SCAFFOLD_LOOKED=1 # the ranks need not
else
  : "${NPROC_PER_NODE:=$GPUS_PER_NODE}"
fi
if [ -n "${MASTER_ADDR:-}" ]; then
  master=$(find_master 127.0.0.1)
else
  master=$(find_master "${hosts[@]}") # where it fails it has said why
fi
: "${MASTER_ADDR:=${master% *}}" "${MASTER_PORT:=${master#* }}"
SCAFFOLD_LAUNCH=$SCAFFOLD_CONTROL
PYTHON=${own_python:+$PYTHON} # else each host finds its own
# The rest stands in the files that the hosts have.
names="NNODES GPUS_PER_NODE NPROC_PER_NODE MASTER_ADDR MASTER_PORT BACKEND NETWORK_INTERFACE NODE_WAIT
  SCAFFOLD_LAUNCH SCAFFOLD_LOOKED SITE OFFLINE RUNS_DISK PREFLIGHT PYTHON OMP_NUM_THREADS CUDA_VISIBLE_DEVICES
  ${!NCCL_@} ${!GLOO_@} ${!TORCH_@} $PASS_ENV"

total=$((NNODES * NPROC_PER_NODE)) places=$(printf "%s:$NPROC_PER_NODE," "${hosts[@]}")
case $version in
  *"Open MPI"* | *OpenRTE* | *PRTE*)
    [ "$(id -u)" != 0 ] || [ -n "${OMPI_ALLOW_RUN_AS_ROOT:-}" ] ||
      die "Open MPI runs as root only with OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in the environment"
    # Bound to a core, a rank's loaders and threads would share it.
    command=("$mpirun" -np "$total" --map-by "ppr:$NPROC_PER_NODE:node:OVERSUBSCRIBE" --bind-to none)
    [ -n "$known" ] || command+=(--host "${places%,}")
    for name in $names; do [ -z "${!name:-}" ] || { export "${name?}"; command+=(-x "$name"); }; done
    ;;
  *HYDRA* | *"Intel(R) MPI"*)
    export I_MPI_PIN="${I_MPI_PIN:-off}"
    command=("$mpirun" -n "$total" -ppn "$NPROC_PER_NODE")
    [ "$NNODES" = 1 ] || [ -n "$known" ] || command+=(-hosts "$(IFS=,; echo "${hosts[*]}")")
    for name in $names; do [ -z "${!name:-}" ] || export "${name?}"; done # Hydra passes all on
    ;;
  *) die "$mpirun is neither Open MPI's nor MPICH's nor Intel MPI's: start mpirun -np $total bash launch/mpirun.sh yourself" ;;
esac

[ "$PREFLIGHT" != 0 ] || prepare "$@" # here, before any rank would wait for it
say "$total rank(s) on $NNODES node(s) (${hosts[*]}); rank 0 is at $MASTER_ADDR:$MASTER_PORT"
mkfifo "$SCAFFOLD_CONTROL/errors"
export -n SCAFFOLD_CONTROL # each rank has its own
stop_ranks() { kill -s USR1 "$AGENT"; } # mpirun passes it on to the ranks
kill_ranks() {
  (
    kill -s TERM "$AGENT" # Open MPI kills its ranks now, Hydra when it is killed
    for ((i = 0; i < 5; i++)); do
      kill -0 "$AGENT" || exit
      sleep 1
    done
    kill -s KILL "$AGENT"
  ) >/dev/null 2>&1 &
}
set -m # in a group of its own: a terminal's Ctrl-C would have mpirun kill the ranks
"${command[@]}" bash launch/mpirun.sh "$@" </dev/null 2>"$SCAFFOLD_CONTROL/errors" &
AGENT=$!
keep_errors <"$SCAFFOLD_CONTROL/errors" >&2 &
reader=$!
( # if this script is killed the ranks save and stop
  while kill -0 $$; do sleep 1; done
  kill -s USR1 "$AGENT"
  for ((i = 0; i < 120; i++)); do
    kill -0 "$AGENT" || break
    sleep 1
  done
  kill_ranks
  rm -rf "$SCAFFOLD_CONTROL"
) >/dev/null 2>&1 &
watch=$!
disown "$watch"
set +m
status=0
finish "$AGENT" || status=$?
kill "$watch" 2>/dev/null || true
wait "$reader" || true

[ -z "$KILLED" ] || die "ended at once, without saving: the next launch goes on from the last checkpoint"
case $status in
  0) exit 0 ;;
  75)
    say "stopped after saving a checkpoint, exit status 75"
    exit 75
    ;;
esac
cause=$(cat "$SCAFFOLD_CONTROL/cause")
[ "$PREFLIGHT" = 0 ] || die "${cause:-the preflight has failed: see above}"
die "${cause:-$mpirun failed with status $status; what it says stands above}"
