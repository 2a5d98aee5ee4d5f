#!/usr/bin/env bash
# Trains on several machines together. Run it on each one, with its number and node 0's address:
#     NODE_RANK=1 MASTER_ADDR=10.0.0.5 bash launch/node.sh [train.py options]
# The same options on every node; --preflight, --site NAME and the exit status are as local.sh has
# them. The launchers of clusters start it too. NNODES=2:4 is an elastic run: it begins with 2 nodes or more,
# and goes on from the last checkpoint when one comes or goes (not node 0). NODE_WAIT is how many seconds node 0
# may take to start (300); SCAFFOLD_ALLOW_LOOPBACK=1 lets several "nodes" run on one machine.
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # macOS has no readlink -f
  target=$(readlink "$script")
  case $target in /*) script=$target ;; *) script=$(dirname "$script")/$target ;; esac
done
PROJECT_DIR=${PROJECT_DIR:-$(dirname "$script")/..}
# In a Kubernetes Job and in Kubeflow's kinds of it the controller says which node this is.
: "${NNODES:=${PET_NNODES:-}}" "${NODE_RANK:=${PET_NODE_RANK:-${JOB_COMPLETION_INDEX:-}}}"
: "${MASTER_ADDR:=${PET_MASTER_ADDR:-}}" "${MASTER_PORT:=${PET_MASTER_PORT:-}}"
case ${PET_NPROC_PER_NODE:-} in *[!0-9]*) ;; *) : "${NPROC_PER_NODE:=${PET_NPROC_PER_NODE:-}}" ;; esac
unset "${!PET_@}" # torchrun reads them too
# An elastic run is one that restarts.
case $NNODES in *:*) : "${MAX_RESTARTS:=3}" ;; esac
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh"

: "${MASTER_PORT:=29500}" "${NODE_WAIT:=300}"
[ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give node 0's host name or address"
most=${NNODES#*:}
[ -n "${NODE_RANK:-}" ] || die "NODE_RANK is not set: give this node's number, 0 to $((most - 1))"
whole_number NODE_RANK "$NODE_RANK" 0
whole_number MASTER_PORT "$MASTER_PORT" 1
whole_number NODE_WAIT "$NODE_WAIT" 0
[ "$NODE_RANK" -lt "$most" ] ||
  die "NODE_RANK=$NODE_RANK, but with NNODES=$NNODES nodes are numbered 0 to $((most - 1))"
[ "$MASTER_PORT" -le 65535 ] || die "MASTER_PORT must be at most 65535; it is $MASTER_PORT"

# Fails where torch would hang. Prints the interface that leads to node 0 and its address, and a 1
# where nccl would not find it by itself: where this host's name stands for a loopback address.
check_network() {
  "${INTERPRETER[@]}" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK" "$most" "$NETWORK_INTERFACE" \
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


end = time.monotonic() + float(patience or 0)
while True:  # in Kubernetes the name of a pod appears when the pod does
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        break
    except OSError as error:
        if time.monotonic() >= end:
            fail(f"MASTER_ADDR={host} cannot be resolved here ({error.strerror}): give node 0's address")
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

interfaces = [name for _, name in socket.if_nameindex()]
if chosen:
    for name in chosen.split(","):
        if name not in interfaces:
            fail(f"NETWORK_INTERFACE={name} is not on this machine, which has: {' '.join(interfaces)}")
    print(chosen, address_of(chosen.split(",")[0]) or "-", 1)
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
            print(name, own, int(nameless))
            break
PYTHON_CODE
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
        reason = "refused: nothing listens there, is node 0 started?"
    except TimeoutError:
        reason = "no answer: a firewall, or the wrong address?"
    except OSError as error:
        reason = error.strerror
    if time.monotonic() > end:
        sys.exit(f"launch: gave up on node 0 at {host}:{port} after {limit:.0f} s: {reason}")
    if reason != told:
        print(f"launch: waiting for node 0 at {host}:{port} ({reason})", file=sys.stderr)
        told = reason
    time.sleep(1)
PYTHON_CODE
}

choose_ranks
case ${PREFLIGHT:-0} in 0 | '') ;; *) launch "$@" ;; esac # it looks for itself, and tells more
network=$(check_network) # where it fails it has said why
read -r interface address nameless <<<"$network"
if [ -n "$interface" ]; then
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  [ "$nameless" = 0 ] || export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
fi
say "node $NODE_RANK of $NNODES ($(hostname)); node 0 is at $MASTER_ADDR:$MASTER_PORT"
if [ "$NODE_RANK" -gt 0 ]; then
  await_node_0 &
  finish $! || exit 1
fi
case $NNODES in
  *:*)
    # Only c10d takes nodes that come and go. It ignores --node-rank; its store is on node 0.
    RENDEZVOUS=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
      --rdzv-id="${RDZV_ID:-$MASTER_ADDR:$MASTER_PORT}" --rdzv-conf="is_host=$((NODE_RANK == 0))${RDZV_CONF:+,$RDZV_CONF}")
    [ -z "$address" ] || RENDEZVOUS+=(--local-addr="$address")
    ;;
  *)
    # Static rendezvous numbers the nodes as told.
    # shellcheck disable=SC2034 # common.sh uses it
    RENDEZVOUS=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --rdzv-id="${RDZV_ID:-none}"
      --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
    ;;
esac
launch "$@"
