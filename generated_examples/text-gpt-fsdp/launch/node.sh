#!/usr/bin/env bash
# Trains on several machines together. Run it on each one, with its number and node 0's address:
#     NODE_RANK=1 MASTER_ADDR=10.0.0.5 bash launch/node.sh [train.py options]
# The same options on every node. Exit status as local.sh. NODE_WAIT is how many seconds node 0
# may take to start (300); SCAFFOLD_ALLOW_LOOPBACK=1 lets several "nodes" run on one machine.
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # macOS has no readlink -f
  target=$(readlink "$script")
  case $target in /*) script=$target ;; *) script=$(dirname "$script")/$target ;; esac
done
PROJECT_DIR=${PROJECT_DIR:-$(dirname "$script")/..}
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh"

: "${MASTER_PORT:=29500}" "${NODE_WAIT:=300}"
[ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give node 0's host name or address"
[ -n "${NODE_RANK:-}" ] || die "NODE_RANK is not set: give this node's number, 0 to $((NNODES - 1))"
whole_number NODE_RANK "$NODE_RANK" 0
whole_number MASTER_PORT "$MASTER_PORT" 1
whole_number NODE_WAIT "$NODE_WAIT" 0
[ "$NODE_RANK" -lt "$NNODES" ] ||
  die "NODE_RANK=$NODE_RANK, but with NNODES=$NNODES nodes are numbered 0 to $((NNODES - 1))"
[ "$MASTER_PORT" -le 65535 ] || die "MASTER_PORT must be at most 65535; it is $MASTER_PORT"

# Fails where torch would hang. Prints the interface towards node 0, or nothing where torch finds
# it by itself: it takes the address of this host's name, which must not be a loopback one.
check_network() {
  "$PYTHON" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK" "$NNODES" "$NETWORK_INTERFACE" \
    "${SCAFFOLD_ALLOW_LOOPBACK:-}" <<'PYTHON_CODE'
import errno, fcntl, ipaddress, signal, socket, struct, sys

host, port, rank, nodes, chosen, allow_loopback = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_DFL)


def fail(message):
    sys.exit(f"launch: {message}")


def is_loopback(name):
    return ipaddress.ip_address(socket.getaddrinfo(name, None)[0][4][0].split("%")[0]).is_loopback


try:
    family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
except OSError as error:
    fail(f"MASTER_ADDR={host} cannot be resolved here ({error.strerror}): give node 0's address")
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
    print(chosen)
    sys.exit()
try:
    needed = int(nodes) > 1 and is_loopback(socket.gethostname())
except OSError:
    needed = int(nodes) > 1  # a name without an address serves no better
if needed and sys.platform == "linux" and family == socket.AF_INET:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing; the kernel picks the address to send from
        except OSError as error:
            fail(f"no way from here to MASTER_ADDR={host}: {error.strerror}")
        own = probe.getsockname()[0]
        for name in interfaces:
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR: its address
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(reply[20:24]) == own:
                print(name)
                break
PYTHON_CODE
}

# Waits until node 0 answers, and says why it does not: torch would be silent for minutes.
await_node_0() {
  exec "$PYTHON" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_WAIT" <<'PYTHON_CODE'
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
interface=$(check_network) # where it fails it has said why
if [ -n "$interface" ]; then
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
fi
say "node $NODE_RANK of $NNODES ($(hostname)); node 0 is at $MASTER_ADDR:$MASTER_PORT"
if [ "$NODE_RANK" -gt 0 ]; then
  await_node_0 &
  finish $! || exit 1
fi
# Static rendezvous numbers the nodes as told; torchrun's c10d ignores --node-rank.
# shellcheck disable=SC2034 # common.sh uses it
RENDEZVOUS=(--nnodes="$NNODES" --node-rank="$NODE_RANK"
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
launch "$@"
