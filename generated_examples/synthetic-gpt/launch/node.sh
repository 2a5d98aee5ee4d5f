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
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh"

: "${MASTER_PORT:=29500}"
[ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give node 0's host name or address"
most=${NNODES#*:}
[ -n "${NODE_RANK:-}" ] || die "NODE_RANK is not set: give this node's number, 0 to $((most - 1))"
whole_number NODE_RANK "$NODE_RANK" 0
[ "$NODE_RANK" -lt "$most" ] ||
  die "NODE_RANK=$NODE_RANK, but with NNODES=$NNODES nodes are numbered 0 to $((most - 1))"

# shellcheck disable=SC2034 # common.sh uses it
[ "$BACKEND" != nccl ] || NEEDS_GPUS=1
choose_ranks
[ "$PREFLIGHT" = 0 ] || launch "$@" # it looks for itself, and tells more
choose_interface
say "node $NODE_RANK of $NNODES ($(hostname)); node 0 is at $MASTER_ADDR:$MASTER_PORT"
if [ "$NODE_RANK" -gt 0 ]; then
  await_node_0 &
  finish $! || exit 1
fi
prepare "$@" # node 0 first: the others may find it done
case $NNODES:${MAX_RESTARTS:-0} in
  *:*:* | *:[1-9]*)
    # Only c10d takes nodes that come and go, and tells restarted ranks where their peers are now. It ignores
    # --node-rank; its store is on node 0.
    RENDEZVOUS=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
      --rdzv-id="${RDZV_ID:-$MASTER_ADDR:$MASTER_PORT}" --rdzv-conf="is_host=$((NODE_RANK == 0))${RDZV_CONF:+,$RDZV_CONF}")
    [ -z "$own_address" ] || RENDEZVOUS+=(--local-addr="$own_address")
    ;;
  *)
    # Static rendezvous numbers the nodes as told.
    # shellcheck disable=SC2034 # common.sh uses it
    RENDEZVOUS=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --rdzv-id="${RDZV_ID:-none}"
      --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
      --rdzv-conf="timeout=$((NODE_WAIT + 30))") # how long node 0 waits for the others
    ;;
esac
launch "$@"
