#!/usr/bin/env bash
# Trains on this machine with all its ranks:   bash launch/local.sh [train.py options]
#     --preflight    only checks that it would: devices, memory, disk, all-reduce
#     --site NAME    settings of launch/site.NAME.env in place of launch/site.env
# From any folder; PROJECT_DIR says where the project is if not beside this script. Exit status:
# 0 finished, 1 failed, 75 told to stop (Ctrl-C, TERM, HUP, USR1) and saved.
set -euo pipefail

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # macOS has no readlink -f
  target=$(readlink "$script")
  case $target in /*) script=$target ;; *) script=$(dirname "$script")/$target ;; esac
done
PROJECT_DIR=${PROJECT_DIR:-$(dirname "$script")/..}
asked_nodes=${NNODES:-1}
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh"

[ "$asked_nodes" = 1 ] || die "NNODES=$asked_nodes: this script is for one machine, run launch/node.sh on each"
[ "$NNODES" = 1 ] || say "this machine alone; launch/node.sh starts one of the $NNODES machines of topology.env"
# shellcheck disable=SC2034 # common.sh uses them
NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT='' # whatever another launch has left there
choose_ranks
[ "$PREFLIGHT" != 0 ] || prepare "$@"
# shellcheck disable=SC2034 # common.sh uses it. Standalone: on a free port, so launches never clash.
RENDEZVOUS=(--standalone --nnodes=1)
launch "$@"
