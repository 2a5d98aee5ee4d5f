# shellcheck shell=bash
# What every launch begins with: a launch script sources it. It takes the options of the launch (--site
# NAME, --preflight) from those of the script, and reads site.env and topology.env; a variable that is set
# in the environment wins over theirs. Needs no Python, and runs under Bash 3.2 too.

say() { printf 'launch: %s\n' "$*" >&2 || true; }
die() { say "$@"; exit 1; }

whole_number() { # NAME VALUE LEAST: ends the launch unless VALUE is a whole number from LEAST on
  case $2 in
    '' | *[!0-9]* | 0?* | ??????????*) ;;
    *) [ "$2" -lt "$3" ] || return 0 ;;
  esac
  die "$1 must be a whole number, at least $3; it is '$2'"
}

options=() # of train.py
while [ $# -gt 0 ]; do
  case $1 in
    --site) [ $# -gt 1 ] || die "--site needs a name"; SITE=$2; shift ;;
    --site=*) SITE=${1#*=} ;;
    --preflight) PREFLIGHT=1 ;;
    *) options+=("$1") ;;
  esac
  shift
done
set -- ${options[@]+"${options[@]}"}
: "${PREFLIGHT:=0}"

PROJECT_DIR=$(CDPATH='' cd -- "$PROJECT_DIR" && pwd -P)
[ -f "$PROJECT_DIR/train.py" ] || die "no train.py in $PROJECT_DIR"
case ${SITE:=} in *[!A-Za-z0-9_-]*) die "SITE must be a name of letters, digits, - and _; it is '$SITE'" ;; esac
SITE_FILE=launch/site${SITE:+.$SITE}.env
activate() { :; }
if [ -f "$PROJECT_DIR/$SITE_FILE" ]; then
  set +eu # it is the person's
  # shellcheck source=/dev/null
  . "$PROJECT_DIR/$SITE_FILE"
  set -eu
elif [ -n "$SITE" ]; then
  die "no $SITE_FILE in $PROJECT_DIR: copy launch/site.env to it"
fi
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/topology.env"
case $NNODES in
  *:*) # MIN:MAX, for node.sh
    whole_number "the least of NNODES='$NNODES'" "${NNODES%%:*}" 1
    whole_number "the most of NNODES='$NNODES'" "${NNODES#*:}" "${NNODES%%:*}"
    ;;
  *) whole_number NNODES "$NNODES" 1 ;;
esac
whole_number GPUS_PER_NODE "$GPUS_PER_NODE" 1
[ -z "${NPROC_PER_NODE:-}" ] || whole_number NPROC_PER_NODE "$NPROC_PER_NODE" 1
if [ -n "$MASTER_PORT" ]; then
  whole_number MASTER_PORT "$MASTER_PORT" 1
  [ "$MASTER_PORT" -le 65535 ] || die "MASTER_PORT must be at most 65535; it is $MASTER_PORT"
fi
case $BACKEND in
  auto | nccl | gloo | mpi) ;;
  *) die "BACKEND must be auto, nccl, gloo or mpi; it is '$BACKEND'" ;;
esac
