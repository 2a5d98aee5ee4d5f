# shellcheck shell=bash
# What every launch begins with: a launch script sources it, with PROJECT_DIR set. It takes the options of
# the launch (--site NAME, --preflight) from the script's, sets PREFLIGHT, SITE and SITE_FILE, and reads
# site.env and topology.env; a variable that the environment sets wins over theirs. Needs no Python, and
# runs under Bash 3.2 too.

say() { printf 'launch: %s\n' "$*" >&2 || true; }
die() { say "$@"; exit 1; }

whole_number() { # NAME VALUE LEAST: ends the launch unless VALUE is a whole number from LEAST on
  case $2 in
    '' | *[!0-9]* | 0?* | ??????????*) ;;
    *) [ "$2" -lt "$3" ] || return 0 ;;
  esac
  die "$1 must be a whole number, at least $3; it is '$2'"
}

train_options=() wants_help=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) wants_help=1 train_options+=("$1") ;;
    --site) [ $# -gt 1 ] || die "--site needs a name"; SITE=$2; shift ;;
    --site=*) SITE=${1#*=} ;;
    --preflight) PREFLIGHT=1 ;;
    *) train_options+=("$1") ;;
  esac
  shift
done
[ "${PREFLIGHT:=0}" = 0 ] || PREFLIGHT=1
[ -z "$wants_help" ] || sed -n '2,/^set /s/^# \{0,1\}//p' "$0" # what the script says of itself

PROJECT_DIR=$(CDPATH='' cd -- "$PROJECT_DIR" && pwd -P)
[ -f "$PROJECT_DIR/train.py" ] || die "no train.py in $PROJECT_DIR"
case ${SITE:=} in *[!A-Za-z0-9_-]*) die "SITE must be a name of letters, digits, - and _; it is '$SITE'" ;; esac
SITE_FILE=launch/site${SITE:+.$SITE}.env
activate() { :; }
if [ -f "$PROJECT_DIR/$SITE_FILE" ]; then
  "$BASH" -n "$PROJECT_DIR/$SITE_FILE" || die "$SITE_FILE is no valid Bash, see above"
  set +eu # it is the person's; "$@" is empty, or what it sources would take train.py's options for its own
  # shellcheck source=/dev/null
  . "$PROJECT_DIR/$SITE_FILE"
  set -eu
elif [ -n "$SITE" ]; then
  die "no $SITE_FILE in $PROJECT_DIR: copy launch/site.env to it"
fi
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/topology.env"
set -- ${train_options[@]+"${train_options[@]}"}
case ${OFFLINE:-} in '' | 0 | 1) ;; *) die "OFFLINE must be 0 or 1; it is '$OFFLINE'" ;; esac
case $NNODES in
  *:*) # MIN:MAX, an elastic run
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
