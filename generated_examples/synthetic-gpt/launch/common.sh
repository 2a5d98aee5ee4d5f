# shellcheck shell=bash
# What the scripts that start Python on a node share: they source it. Runs under Bash 3.2 too, the
# one of macOS.
#
# torchrun passes on neither a signal nor an exit status unharmed, so this script and the ranks
# talk through a folder of the node's own, $SCAFFOLD_CONTROL:
#     stop        made here on the first signal; the ranks look for it once a step
#     run         written by the ranks: the run's folder
#     preempted   made by the ranks when their checkpoint is saved: the launch exits 75
#     error       written by a rank that failed: why; printed last, the launch exits 1

# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/settings.sh"

# Sets PYTHON: its own value, the active environment's, the project's, or python3; and INTERPRETER, the
# command that starts it, in a container where there is one.
find_python() {
  local environment conda
  set +u # what environments are activated by seldom bears it
  activate || die "activate() of $SITE_FILE failed"
  set -u
  if [ -n "${CONTAINER[*]:-}" ]; then
    command -v "${CONTAINER[0]}" >/dev/null || die "CONTAINER of $SITE_FILE: ${CONTAINER[0]} cannot be run"
    INTERPRETER=("${CONTAINER[@]}" "${PYTHON:=python3}")
    return
  elif [ -n "${PYTHON:-}" ]; then
    case $PYTHON in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON cannot be run"
  else
    conda=${CONDA_PREFIX:-}
    # conda's "base" is active in every shell, so it tells nothing about what was chosen.
    [ "${CONDA_DEFAULT_ENV:-}" != base ] || conda=''
    for environment in "${VIRTUAL_ENV:-}" "$conda" "$PROJECT_DIR/.venv"; do
      [ -n "${PYTHON:-}" ] || [ -z "$environment" ] || [ ! -x "$environment/bin/python" ] ||
        PYTHON=$environment/bin/python
    done
    : "${PYTHON:=$(command -v python3)}"
    [ -n "$PYTHON" ] || die "no python3 found: activate an environment, or set PYTHON"
  fi
  INTERPRETER=("$PYTHON")
}

# Prints "GPUS CORES TORCH HIDDEN": the GPUs that torch sees, the cores that this process may use,
# torch's version, and 1 where there are NVIDIA GPUs that torch does not see.
look_at_machine() {
  PYTHONSAFEPATH=1 "${INTERPRETER[@]}" - "$BACKEND" "$PROJECT_DIR" "$SCAFFOLD_CONTROL" <<'PYTHON_CODE'
import sys

backend, project, control = sys.argv[1:]
remedy = "activate the environment that has it, or in %s: " % project
remedy += "python3 -m venv .venv && .venv/bin/pip install -e ."
if sys.version_info < (3, 11):
    sys.exit("launch: %s is Python %d.%d, 3.11 or newer is needed: %s"
             % (sys.executable, sys.version_info[0], sys.version_info[1], remedy))

import glob, os, re, shutil, signal, subprocess

if not os.path.isdir(control):
    sys.exit(f"launch: the container does not see {control} of the node, through which the launch talks with "
             "it: bind that folder's parent, or set TMPDIR to a folder that is bound")
from importlib.metadata import PackageNotFoundError, version

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
try:
    torch_version = version("torch")  # metadata: importing torch takes seconds
except PackageNotFoundError:
    sys.exit(f"launch: {sys.executable} has no torch: {remedy}")
if tuple(map(int, re.findall(r"\d+", torch_version)[:2])) < (2, 13):
    sys.exit(f"launch: torch {torch_version} of {sys.executable} is too old, 2.13 or newer is "
             f"needed: {sys.executable} -m pip install --upgrade torch torchvision")

gpus = hidden = 0
if backend in ("auto", "nccl"):
    try:
        import torch
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:]
        sys.exit(f"launch: torch {torch_version} of {sys.executable} does not import: {reason}")
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type != "mps":  # no backend reaches Apple's GPU
        gpus = torch.accelerator.device_count()
    if not gpus and not (hidden := len(glob.glob("/dev/nvidia[0-9]*"))):
        if smi := shutil.which("nvidia-smi"):
            hidden = b"GPU " in subprocess.run([smi, "-L"], capture_output=True).stdout
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(gpus, cores, torch_version, int(bool(hidden)))
PYTHON_CODE
}

choose_ranks() { # sets NPROC_PER_NODE, and BACKEND where there are no GPUs to use
  local gpus cores torch hidden wanted=$GPUS_PER_NODE machine strict=''
  # A node that quietly took fewer GPUs than it was given would waste them, and hold the other nodes back.
  if [ "$NNODES" != 1 ] || [ "${NEEDS_GPUS:-0}" != 0 ]; then strict=1; fi
  machine=$(look_at_machine) # where it fails it has said why
  read -r gpus cores torch hidden <<<"$machine"
  if [ "$gpus" -gt 0 ]; then
    [ "${NPROC_PER_NODE:-0}" -le "$gpus" ] ||
      die "NPROC_PER_NODE=$NPROC_PER_NODE, but torch sees $gpus GPU(s): use at most $gpus, or BACKEND=gloo"
    [ "$wanted" -le "$gpus" ] || [ -z "$strict" ] || [ -n "${NPROC_PER_NODE:-}" ] ||
      die "torch sees $gpus GPU(s) on $(hostname), not $wanted: set GPUS_PER_NODE=$gpus on every node, or look at the node"
    [ "$wanted" -le "$gpus" ] || wanted=$gpus
  else
    [ "$wanted" -le "$cores" ] || wanted=$cores
  fi
  : "${NPROC_PER_NODE:=$wanted}"

  if [ "$gpus" -eq 0 ] && { [ "$BACKEND" = auto ] || [ "$BACKEND" = nccl ]; }; then
    [ "$hidden" -eq 0 ] ||
      say "WARNING: there are NVIDIA GPUs here, but torch $torch sees none: look at the driver," \
        "CUDA_VISIBLE_DEVICES, and whether this torch was built for CUDA"
    # A node that quietly took gloo would leave the others waiting for it in nccl.
    if [ -n "$strict" ] && [ "${NEEDS_GPUS:-0}$hidden$BACKEND" != 00auto ]; then
      die "torch $torch of $PYTHON sees no GPU on $(hostname): look at the node, or set BACKEND=gloo on every node to train on CPUs"
    fi
    say "no GPU found: training on the CPU with gloo (GPUS_PER_NODE=$GPUS_PER_NODE, $cores core(s)," \
      "at most one rank a core)"
    BACKEND=gloo
  fi
  # torchrun's own default is 1, with a warning.
  [ -n "${OMP_NUM_THREADS:-}" ] || OMP_NUM_THREADS=$((cores / NPROC_PER_NODE))
  [ "$OMP_NUM_THREADS" != 0 ] || OMP_NUM_THREADS=1
  export BACKEND OMP_NUM_THREADS
  say "$NPROC_PER_NODE rank(s) here, backend $BACKEND, $OMP_NUM_THREADS thread(s) each;" \
    "torch $torch of $PYTHON"
}

# --- the network --------------------------------------------------------------------------------

# Fails where torch would hang. Prints the interface that leads to node 0; a 1 where nccl would not find
# it by itself, as this host's name stands for a loopback address; and the interface's address, if any.
check_network() {
  "${INTERPRETER[@]}" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK" "${NNODES#*:}" "$NETWORK_INTERFACE" \
    "${SCAFFOLD_ALLOW_LOOPBACK:-}" "${KUBERNETES_SERVICE_HOST:+$NODE_WAIT}" <<'PYTHON_CODE'
import errno, fcntl, ipaddress, signal, socket, struct, sys, time

host, port, rank, nodes, chosen, allow_loopback, patience = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_DFL)


def fail(message):
    sys.exit(f"launch: {message}")


def is_loopback(name):
    return ipaddress.ip_address(socket.getaddrinfo(name, None)[0][4][0].split("%")[0]).is_loopback


def address_of(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()))  # SIOCGIFADDR
        except OSError:
            return ""  # it has none
    return socket.inet_ntoa(reply[20:24])


end, told = time.monotonic() + float(patience or 0), False
while True:  # in Kubernetes the name of a pod appears when the pod does
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        break
    except OSError as error:
        if time.monotonic() >= end:
            fail(f"MASTER_ADDR={host} cannot be resolved here ({error.strerror}): give node 0's address")
    if not told:
        print(f"launch: waiting for the name {host} to appear", file=sys.stderr)
        told = True
    time.sleep(1)
if int(nodes) > 1 and is_loopback(host) and allow_loopback != "1":
    fail(f"MASTER_ADDR={host} is {address[0]} here, this machine itself: give the address of node 0"
         " that the other nodes reach (SCAFFOLD_ALLOW_LOOPBACK=1 if all of them are on this machine)")
if rank == "0":
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", int(port)))
            server.listen()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            fail(f"port {port} of this machine " + ("is taken: end the process that has it, or set"
                 if taken else f"cannot be used ({error.strerror}): set") + " another MASTER_PORT on every node")
    with socket.socket(family) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:  # an address that others reach it by may be translated, so it is no error
            print(f"launch: WARNING: MASTER_ADDR={host} ({address[0]}) is no address of this machine: is it"
                  " node 0? The others look for it there", file=sys.stderr)

interfaces = [name for _, name in socket.if_nameindex()]
if chosen:
    for name in chosen.split(","):
        if name not in interfaces:
            fail(f"NETWORK_INTERFACE={name} is not on this machine, which has: {' '.join(interfaces)}")
    print(chosen, 1, address_of(chosen.split(",")[0]))
    sys.exit()
if int(nodes) > 1 and sys.platform == "linux" and family == socket.AF_INET:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing; the kernel picks the address to send from
        except OSError as error:
            fail(f"no way from here to MASTER_ADDR={host}: {error.strerror}")
        own = probe.getsockname()[0]
    try:
        nameless = is_loopback(socket.gethostname())
    except OSError:
        nameless = True  # a name without an address serves no better
    for name in interfaces:
        if address_of(name) == own:
            print(name, int(nameless), own)
            break
PYTHON_CODE
}

choose_interface() { # sets those of gloo and nccl, and own_address
  local network interface nameless
  network=$(check_network) # where it fails it has said why
  # shellcheck disable=SC2034 # node.sh uses own_address
  read -r interface nameless own_address <<<"$network"
  [ -n "$interface" ] || return 0
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  [ "$nameless" = 0 ] || export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
}

# Waits until node 0 answers, and says why it does not: torch would be silent for minutes.
await_node_0() {
  exec "${INTERPRETER[@]}" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_WAIT" <<'PYTHON_CODE'
import socket, sys, time

host, port, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end, told = time.monotonic() + limit, None
while True:
    try:
        socket.create_connection((host, port), timeout=3).close()
        break
    except ConnectionRefusedError:
        reason = "refused: nothing listens there, is node 0 started, or does it still prepare data?"
    except TimeoutError:
        reason = "no answer: a firewall, or the wrong address?"
    except OSError as error:
        reason = error.strerror
    if time.monotonic() > end:
        sys.exit(f"launch: gave up on node 0 at {host}:{port} after {limit:.0f} s (NODE_WAIT): {reason}")
    if reason != told:
        print(f"launch: waiting for node 0 at {host}:{port} ({reason})", file=sys.stderr)
        told = reason
    time.sleep(1)
PYTHON_CODE
}

# --- signals ------------------------------------------------------------------------------------

SIGNALS=0   # signals so far
ASKED_AT='' # when the first one came, in seconds
KILLED=''   # set when the ranks were ended without saving
CHILD=''    # the process being waited for
AGENT=''    # torchrun's process, once it is started

on_signal() { # NAME
  SIGNALS=$((SIGNALS + 1))
  if [ -z "$AGENT" ]; then
    [ -z "$CHILD" ] || kill "$CHILD" 2>/dev/null || true
    die "ended by SIG$1 before training began"
  elif [ "$1" != QUIT ] && [ -z "$ASKED_AT" ]; then
    ASKED_AT=$SECONDS
    stop_ranks
    say "SIG$1: the ranks finish their step, save and end; a second signal ends them at once"
  elif [ "$1" = QUIT ] || { [ -z "${PREEMPTED_STATUS:-}" ] && [ $((SECONDS - ASKED_AT)) -ge 2 ]; }; then
    # Sooner it is the same signal, come by two ways: timeout(1) sends it twice. And a scheduler, for which
    # a launch that saved ends well, ends it itself when its patience is over.
    KILLED=1
    kill_ranks
  fi
}

stop_ranks() { : >"$SCAFFOLD_CONTROL/stop"; }

kill_ranks() {
  local worker
  kill -STOP "$AGENT" 2>/dev/null || return 0 # so that it starts no other meanwhile
  # Each worker leads a session of its own: its group has its data loaders, and no one else.
  for worker in $(pgrep -P "$AGENT" 2>/dev/null || cat "/proc/$AGENT/task"/*/children); do
    kill -KILL -- "-$worker" 2>/dev/null || kill -KILL "$worker" 2>/dev/null || true
  done
  kill -KILL "$AGENT" 2>/dev/null || true
}

finish() { # PID: its exit status once it has ended, whatever signals come meanwhile
  local seen status
  CHILD=$1
  while :; do
    seen=$SIGNALS status=0
    wait "$1" 2>/dev/null || status=$?
    [ "$SIGNALS" -ne "$seen" ] || break # else it may have been a signal that ended the wait
  done
  CHILD=''
  return "$status"
}

# --- the launch ---------------------------------------------------------------------------------

prepare() { # TRAIN.PY OPTIONS...: the data, before any rank, so that none waits for another
  local status=0
  if [ -f prepare.py ]; then
    env -u SCAFFOLD_CONTROL "${INTERPRETER[@]}" prepare.py "$@" & # it says itself what is wrong
    finish $! || status=$?
    [ "$status" -le 128 ] || die "prepare.py was killed by signal $((status - 128))"
    [ "$status" -eq 0 ] || exit 1
  fi
}

# Where ranks failed without a word: what is wrong with the code, or a package, was said by each of them.
explain_import() {
  local why
  why=$(env -u SCAFFOLD_CONTROL "${INTERPRETER[@]}" -c 'import train' 2>&1) && return
  printf '%s\nerror: train.py cannot be imported on %s: %s\n' "$why" "$(hostname)" "${why##*$'\n'}" >&2
  exit 1
}

launch() { # TRAIN.PY OPTIONS...; torchrun's options are in RENDEZVOUS. Ends the script.
  local status=0
  if [ "$PREFLIGHT" != 0 ]; then # one process a node: it looks at the network before any rank could hang on it
    export NNODES GPUS_PER_NODE NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT NETWORK_INTERFACE
    "${INTERPRETER[@]}" launch/preflight.py "$@" &
    finish $! || status=$?
    exit "$status"
  fi
  # An elastic run is one that restarts.
  case $NNODES in *:*) : "${MAX_RESTARTS:=3}" ;; *) : "${MAX_RESTARTS:=0}" ;; esac
  # Without this a restarted rank may look for its peers where they were before.
  [ "$MAX_RESTARTS" -eq 0 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  (
    # The ranks' own handlers and the file "stop" end a run well; torchrun must not end first.
    trap '' HUP INT TERM USR1
    # The lone -- keeps torchrun from reading train.py's options as abbreviations of its own.
    exec "${INTERPRETER[@]}" -m torch.distributed.run "${RENDEZVOUS[@]}" \
      --nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS" \
      --signals-to-handle=SIGQUIT --shutdown-timeout=5 --log-dir="$SCAFFOLD_CONTROL/logs" \
      -- train.py "$@"
  ) &
  AGENT=$!
  finish "$AGENT" || status=$?

  if [ -n "$KILLED" ]; then
    die "ended at once, without saving: the next launch goes on from the last checkpoint"
  elif [ -s "$SCAFFOLD_CONTROL/error" ]; then # also where all ranks ended alike, with 0
    cat "$SCAFFOLD_CONTROL/error" >&2
    exit 1
  elif [ -e "$SCAFFOLD_CONTROL/preempted" ]; then
    say "stopped after saving a checkpoint, exit status ${PREEMPTED_STATUS:=75}"
    exit "$PREEMPTED_STATUS"
  elif [ "$status" -ne 0 ] && [ ! -e "$SCAFFOLD_CONTROL/run" ]; then
    explain_import
    [ "$NNODES" = 1 ] || die "failed before the ranks had met: have all $NNODES nodes started, with numbers of their own? A rank may have said more above"
  fi
  [ "$status" -eq 0 ] || die "failed: the report above names the rank (exitcode -9 is often memory run out)"
  exit 0
}

# --- set up -------------------------------------------------------------------------------------

trap '' PIPE # a reader gone from a pipe must not take the launch down
trap 'on_signal HUP' HUP
trap 'on_signal INT' INT
trap 'on_signal QUIT' QUIT
trap 'on_signal TERM' TERM
trap 'on_signal USR1' USR1

whole_number NODE_WAIT "${NODE_WAIT:=300}" 0 # seconds that nodes may start apart
# Times that torchrun starts failed ranks again, from the last checkpoint.
[ -z "${MAX_RESTARTS:-}" ] || whole_number MAX_RESTARTS "$MAX_RESTARTS" 0
if [ "${OFFLINE:=0}" = 1 ]; then
  export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE="${WANDB_MODE:-offline}"
fi
# Of another launch that this one may be part of: they would be taken for this one's.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE

find_python # before cd, since PYTHON may be relative
cd -- "$PROJECT_DIR" || exit 1 # paths in the config are relative to the project
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true # data loaders pass many open files around

if [ -L runs ] && [ ! -e runs ]; then
  die "runs is a link to $(readlink runs), which is gone: mount that disk, or remove the link to begin anew"
elif [ -n "${RUNS_DISK:-}" ] && [ ! -e runs ]; then
  sum=$(cksum <<<"$PROJECT_DIR") # two projects of one name have runs of their own
  folder=$RUNS_DISK/${PROJECT_DIR##*/}-${sum%% *}
  mkdir -p "$folder" || die "RUNS_DISK=$RUNS_DISK cannot be written"
  ln -s "$folder" runs 2>/dev/null || [ -e runs ] || # another node was quicker
    die "runs, a link to $folder, cannot be made in $PROJECT_DIR"
  say "runs is a link to $folder from now on (RUNS_DISK)"
fi

if [ -n "${SCAFFOLD_CONTROL:-}" ]; then # of a launcher that looks into it afterwards
  mkdir -p "$SCAFFOLD_CONTROL"
else
  SCAFFOLD_CONTROL=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXX")
  trap 'rm -rf "$SCAFFOLD_CONTROL"' EXIT
fi
export SCAFFOLD_CONTROL
if [ -n "$wants_help" ]; then # after what the script says of itself
  env -u SCAFFOLD_CONTROL "${INTERPRETER[@]}" train.py --help
  exit
fi
