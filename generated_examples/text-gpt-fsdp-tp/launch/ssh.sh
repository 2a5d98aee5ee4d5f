#!/usr/bin/env bash
# Trains on several machines over SSH. Start it where you can log in to all of them without a password:
#     bash launch/ssh.sh [--hosts FILE] [--site NAME] [--preflight] [train.py options]
# The machines stand in launch/hosts.txt, or in --hosts FILE. Each has this folder at the same path, or
# in REMOTE_DIR, and starts launch/node.sh there. Exit status as local.sh. Ctrl-C, TERM, HUP and USR1
# let all ranks save; a second signal ends them at once. SSH="ssh -F file" is another ssh;
# PASS_ENV="NAME NAME" names variables that the hosts get too. Runs under Bash 3.2, the one of macOS.
#
# There is one connection a host. What runs there comes through its stdin, so that no login shell has
# to quote it; then a line every few seconds while this script lives, and signals as lines. A host that
# hears nothing more saves and stops: nothing is left behind, however this script ended.
set -euo pipefail

say() { printf 'launch: %s\n' "$*" >&2 || true; }
die() { say "$@"; exit 1; }

# --- what runs on a host: under Bash of any version, from stdin ---------------------------------------

code() { # a number that two folders share if their code is the same
  local package
  LC_ALL=C # the order of names
  {
    cat -- *.py launch/*.sh launch/topology.env
    for package in */__init__.py; do cat -- "${package%/*}"/*.py; done
  } 2>/dev/null | cksum
}

on_host() { # TAG FOLDER HEAD TRAIN.PY OPTIONS...: takes a look; when told "go", becomes the node's launch
  local tag=$1 folder=$2 head=$3 sum address=unknown port=0 line='' i
  shift 3
  exec 3<&0 </dev/null
  case $folder in \~/*) folder=$HOME/${folder#??} ;; esac
  if ! cd -- "$folder" 2>/dev/null || ! [ -f train.py ] || ! [ -f launch/node.sh ]; then
    echo "launch: no project in $folder: copy this folder there, or say where it is by REMOTE_DIR" >&2
    exit 1
  fi
  sum=$(code)
  if command -v getent >/dev/null; then
    address=$(getent ahostsv4 "$head" || getent ahosts "$head") || address=none
  fi
  while [ "$port" = 0 ] || (exec 4<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do # until none listens
    port=$((20000 + RANDOM % 10000))
  done
  echo "$tag ${sum%% *} $port ${address%%[[:space:]]*}"

  while [ "$line" != go ]; do read -r -t 60 line MASTER_ADDR MASTER_PORT <&3 || exit 1; done
  SCAFFOLD_CONTROL=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXX") || exit 1
  export MASTER_ADDR MASTER_PORT SCAFFOLD_CONTROL
  ( # beside the node's launch, which is process $$
    while read -r -t 60 line <&3 && kill -0 $$; do
      case $line in HUP | INT | QUIT | TERM | USR1) kill -s "$line" $$ ;; esac
    done
    kill -s TERM $$ # the way to the launcher is lost, unless it has ended
    for ((i = 0; i < 120; i++)); do
      kill -0 $$ || break
      sleep 1
    done
    [ "$i" -lt 120 ] || kill -s QUIT $$
    rm -rf "$SCAFFOLD_CONTROL" # ranks that were left without node.sh see that, and stop
  ) >/dev/null 2>&1 &
  exec "$BASH" launch/node.sh "$@" 3<&-
}

# --- the connections ----------------------------------------------------------------------------------

quote() { # WORD...: each as Bash reads it back, whatever is in it
  local rest quoted
  for rest in "$@"; do
    quoted=''
    while case $rest in *\'*) true ;; *) false ;; esac; do
      quoted="$quoted${rest%%\'*}'\\''"
      rest=${rest#*\'}
    done
    printf "'%s%s' " "$quoted" "$rest"
  done
}

program() { # I TRAIN.PY OPTIONS...: what host I is given to run
  printf '%s' "$settings"
  echo "export NNODES=$NNODES NODE_RANK=$1"
  shift
  declare -f code on_host
  echo "on_host $(quote "$TAG" "$REMOTE_DIR" "$head" "$@")"
}

connect() { # I: the connection to host I, from its start to its end
  local i
  trap '' HUP INT QUIT TERM TTOU USR1 # a terminal sends them to all its processes
  set +e
  for ((i = 0; i < $1; i++)); do eval "exec $((FIRST_LINE + i))>&-"; done # or they outlive this script
  {
    {
      "${ssh[@]}" -T -a -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
        -o ServerAliveCountMax=3 "${HOSTS[$1]}" bash -s <"$TEMP/$1" 2>&1 >&4 4>&- 9>&-
      echo $? >"$TEMP/$1.status"
    } | show_errors "$1" >&2 4>&-
  } 4>&1 | show_output "$1"
  echo "ended $1" >&9
  kill -0 $$ 2>/dev/null || rm -rf "$TEMP" # the launcher was killed
}

show_output() { # I: host I's stdout, its name before each line
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in
      "$TAG "*) echo "ready $1 ${line#* }" >&9 ;;
      *) printf '%s%s\n' "${PREFIX[$1]}" "$line" ;;
    esac
  done 2>/dev/null
}

show_errors() { # I: the same of its stderr, once its launch has begun; keeps the last words
  local line before='' last='' cause='' more=0
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line%$'\r'} # ssh's own
    [ ! -e "$TEMP/go" ] || printf '[%s] %s\n' "${HOSTS[$1]#*@}" "$line"
    [ -n "$line" ] || continue
    [ -e "$TEMP/go" ] || before=$last
    last=$line
    case $line in
      launch:* | error:*) cause=$line more=2 ;; # it may have more than one line
      *) [ "$more" = 0 ] || cause=$cause$'\n'$line more=$((more - 1)) ;;
    esac
  done 2>/dev/null
  [ -e "$TEMP/go" ] || last="$before${before:+ }$last" # ssh may need two lines to say why
  printf '%s\n' "$last" >"$TEMP/$1.last"
  printf '%s\n' "${cause:-$last}" >"$TEMP/$1.cause"
}

tell() { # LINE: to each host that is still connected
  local i
  for ((i = 0; i < COUNT; i++)); do
    [ -n "${STATUS[$i]}" ] || echo "$1" >&$((FIRST_LINE + i)) || true
  done 2>/dev/null
}

cause() { # I: why host I ended, in words
  local host=${HOSTS[$1]} last=''
  read -r last <"$TEMP/$1.last" || true
  case ${READY[$1]:+ready}${STATUS[$1]}$last in
    255*"Permission denied"*) echo "$host: cannot log in: $last: ssh-copy-id $host lets you in without a password" ;;
    255*"Host key verification failed"*) echo "$host: cannot log in: $last: see what ssh $host says" ;;
    255*) echo "$host: cannot log in: $last" ;;
    ready255* | ready1[2-9]?*) echo "$host: the connection is lost${last:+ ($last)}" ;;
    *) echo "$host: $(sed -e '1s/^launch: //' -e '1s/^error: //' "$TEMP/$1.cause")" ;;
  esac
}

next() { # waits up to a second for an EVENT of host I; so each wait has an end, and signals are heard
  EVENT=''
  read -r -t 1 EVENT I REST <&9 || true
  if [ "$EVENT" = ended ]; then
    read -r "STATUS[$I]" <"$TEMP/$I.status"
    LIVE=$((LIVE - 1))
  fi
  if [ $((SECONDS - BEAT)) -ge 10 ]; then
    BEAT=$SECONDS
    tell alive
  fi
}

# --- signals ------------------------------------------------------------------------------------------

STARTED=''  # set when the hosts' launches begin
ASKED_AT='' # when the first signal came, in seconds
KILLED=''   # set when the ranks are ended without saving
END_AT=''   # when the hosts that are left are ended

on_signal() { # NAME
  if [ -z "$STARTED" ]; then
    die "ended by SIG$1 before training began"
  elif [ "$1" != QUIT ] && [ -z "$ASKED_AT" ]; then
    ASKED_AT=$SECONDS
    say "SIG$1: the ranks finish their step, save and end; a second signal ends them at once"
    tell "$1"
  elif [ "$1" = QUIT ] || [ $((SECONDS - ASKED_AT)) -ge 2 ]; then
    KILLED=1 END_AT=$SECONDS # sooner it is the same signal, come by two ways
  fi
}

leave() { # with what is left of the connections
  local pid
  for pid in ${PIDS[@]+"${PIDS[@]}"}; do kill -s KILL -- "-$pid" 2>/dev/null || true; done
  rm -rf "$TEMP"
}

# --- set up -------------------------------------------------------------------------------------------

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # macOS has no readlink -f
  target=$(readlink "$script")
  case $target in /*) script=$target ;; *) script=$(dirname "$script")/$target ;; esac
done

case " ${PASS_ENV:=}" in
  *[!A-Za-z0-9_\ ]* | *\ [0-9]*) die "PASS_ENV must be names of variables; it is '$PASS_ENV'" ;;
esac
# The hosts get what the person has set for this launch; the rest stands in the files that they have.
settings=''
for name in GPUS_PER_NODE NPROC_PER_NODE BACKEND NETWORK_INTERFACE NODE_WAIT RDZV_CONF MAX_RESTARTS \
  OFFLINE RUNS_DISK PYTHON OMP_NUM_THREADS CUDA_VISIBLE_DEVICES \
  ${!NCCL_@} ${!GLOO_@} ${!TORCH_@} $PASS_ENV; do
  [ -z "${!name:-}" ] || settings=$settings"export $name=$(quote "${!name}")"$'\n'
done

case ${HOSTS_FILE:=} in '' | /*) ;; *) HOSTS_FILE=$PWD/$HOSTS_FILE ;; esac
PROJECT_DIR=$(CDPATH='' cd -- "${PROJECT_DIR:-$(dirname "$script")/..}" && pwd)
here=$PROJECT_DIR # without resolving links, which may differ on the hosts
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/settings.sh"
: "${REMOTE_DIR:=$here}"
[ -z "$wants_help" ] || exit 0
[ -z "$SITE" ] || settings=$settings"export SITE=$SITE"$'\n'
[ "$PREFLIGHT" = 0 ] || settings=$settings$'export PREFLIGHT=1\n'

options=() chosen='' # options are train.py's
while [ $# -gt 0 ]; do
  case $1 in
    --hosts) [ $# -gt 1 ] || die "--hosts needs a name"; chosen=$2; shift ;;
    --hosts=*) chosen=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
case $chosen in '' | /*) ;; *) chosen=$PWD/$chosen ;; esac
cd -- "$PROJECT_DIR"
: "${HOSTS_FILE:=$PROJECT_DIR/launch/hosts.txt}"
HOSTS_FILE=${chosen:-$HOSTS_FILE}
least=${NNODES%%:*} most=${NNODES#*:}

read -r -a ssh <<<"${SSH:-ssh}"
command -v "${ssh[0]}" >/dev/null || die "no ${ssh[0]} here: install OpenSSH's client"
[ -r "$HOSTS_FILE" ] || die "no $HOSTS_FILE: write one [user@]host a line into it"
HOSTS=() COUNT=0
while read -r host rest || [ -n "$host" ]; do
  host=${host%$'\r'} rest=${rest%$'\r'}
  case $host in
    '' | '#'*) continue ;;
    -*) die "$HOSTS_FILE: '$host' is no host name" ;;
  esac
  case $rest in '' | '#'*) ;; *) die "$HOSTS_FILE: one [user@]host a line, not '$host $rest'" ;; esac
  case " ${HOSTS[*]:-} " in *" $host "*) die "$HOSTS_FILE names $host twice" ;; esac
  HOSTS+=("$host") COUNT=$((COUNT + 1))
done <"$HOSTS_FILE"
[ "$COUNT" -gt 0 ] || die "$HOSTS_FILE names no host: write one [user@]host a line into it"
[ "$COUNT" -ge "$least" ] ||
  die "NNODES is $NNODES, but $HOSTS_FILE names $COUNT host(s): add hosts, or set NNODES=$COUNT"
if [ "$COUNT" -gt "$most" ]; then
  say "NNODES is $NNODES: the first of the $COUNT hosts of $HOSTS_FILE"
  COUNT=$most
fi
head=${HOSTS[0]#*@}
# Where ssh's config says more of it than its name.
name=$("${ssh[@]}" -G "${HOSTS[0]}" 2>/dev/null </dev/null | sed -n 's/^hostname //p') || true
head=${name:-$head}

# --- a look at each host ------------------------------------------------------------------------------

TEMP=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXX")
TAG=launch-$$-$RANDOM$RANDOM # begins the line that is this script's, in what a host prints
FIRST_LINE=20                # file descriptor of the line to host 0
PIDS=() READY=() STATUS=() PREFIX=()
trap leave EXIT
trap '' PIPE # a reader gone from a pipe must not take the launch down
for name in HUP INT QUIT TERM USR1; do
  # shellcheck disable=SC2064 # its name now
  trap "on_signal $name" "$name"
done
mkfifo "$TEMP/events"
exec 9<>"$TEMP/events" # "ready I CODE PORT ADDRESS" and "ended I"

for ((i = 0; i < COUNT; i++)); do
  READY[i]='' STATUS[i]='' PREFIX[i]="[${HOSTS[i]#*@}] "
  [ "$i$PREFLIGHT" != 01 ] || PREFIX[i]='' # node 0's table, or its JSON for scripts
  mkfifo "$TEMP/$i"
  set -m # a group of its own: no signal of the terminal, or of timeout(1), ends the connection
  connect "$i" &
  set +m
  PIDS+=("$!")
  disown
  eval "exec $((FIRST_LINE + i))>\"\$TEMP/$i\""
  program "$i" ${options[@]+"${options[@]}"} >"$TEMP/program"
  { cat "$TEMP/program" >&$((FIRST_LINE + i)); } 2>/dev/null || true # it may have ended
done

LIVE=$COUNT BEAT=$SECONDS waiting=$COUNT limit=$((SECONDS + 60))
while [ "$waiting" -gt 0 ]; do
  next
  case $EVENT in
    ready) READY[I]=$REST waiting=$((waiting - 1)) ;;
    ended)
      [ -n "${READY[I]}" ] || waiting=$((waiting - 1))
      say "$(cause "$I")"
      ;;
  esac
  if [ "$SECONDS" -ge "$limit" ]; then
    for ((i = 0; i < COUNT; i++)); do
      [ -n "${READY[i]}${STATUS[i]}" ] || die "${HOSTS[i]}: no answer within a minute of the login"
    done
  fi
done
[ "$LIVE" -ge "$least" ] && [ -z "${STATUS[0]}" ] || exit 1 # the causes are said

mine=$(code) seen_by=0 differ=''
for ((i = COUNT - 1; i >= 0; i--)); do
  read -r sum port address <<<"${READY[i]}" || true
  [ -z "${STATUS[i]}" ] || continue
  [ "$sum" = "${mine%% *}" ] || differ="${HOSTS[i]} $differ"
  [ "$i" = 0 ] || seen_by=$i
done
[ -z "$differ" ] || die "the code in $REMOTE_DIR is another than here on: $differ- copy this folder there again"
: "${MASTER_PORT:=$port}" # free on host 0
if [ -z "${MASTER_ADDR:-}" ]; then
  read -r _ _ address <<<"${READY[seen_by]}"
  case $address in
    unknown) MASTER_ADDR=$head ;; # it has no getent to ask
    none) die "${HOSTS[seen_by]} does not know node 0 by its name, $head: write its address into $HOSTS_FILE, or set MASTER_ADDR" ;;
    127.* | ::1)
      [ "$most" = 1 ] ||
        die "$head is ${HOSTS[seen_by]} itself there ($address): write node 0's address into $HOSTS_FILE, or set MASTER_ADDR"
      MASTER_ADDR=$address
      ;;
    *) MASTER_ADDR=$address ;;
  esac
fi

# --- the launch ---------------------------------------------------------------------------------------

live=''
for ((i = 0; i < COUNT; i++)); do [ -n "${STATUS[i]}" ] || live="$live ${HOSTS[i]}"; done
say "$LIVE host(s):$live; node 0 at $MASTER_ADDR:$MASTER_PORT"
: >"$TEMP/go"
STARTED=1
tell "go $MASTER_ADDR $MASTER_PORT"
FAILED=() failures=$((COUNT - LIVE)) preempted=''
while [ "$LIVE" -gt 0 ]; do
  next
  if [ "$EVENT" = ended ]; then
    case ${STATUS[I]} in
      0) ;;
      75) preempted=1 ;;
      *)
        FAILED+=("$I") failures=$((failures + 1))
        why=$(cause "$I")
        if [ "$LIVE" -ge "$least" ]; then
          say "$why; the others go on"
        elif [ "$LIVE" -gt 0 ] && [ -z "$END_AT" ]; then
          say "$why"
          case $why in
            *"the connection is lost"*) # it may still train, and then all can save
              END_AT=$((SECONDS + 60))
              tell TERM
              ;;
            *) END_AT=$((SECONDS + 15)) ;; # they notice it by themselves
          esac
        fi
        ;;
    esac
  fi
  if [ -n "$END_AT" ] && [ "$SECONDS" -ge "$END_AT" ]; then
    [ -z "${quit:-}" ] || die "some hosts do not answer: look whether processes of this run are left there"
    quit=1 END_AT=$((SECONDS + 30))
    tell QUIT
  fi
done

[ -z "$KILLED" ] || die "ended at once, without saving: the next launch goes on from the last checkpoint"
if [ $((COUNT - failures)) -lt "$least" ]; then
  [ "$PREFLIGHT" = 0 ] || [ "$(cat "$TEMP/0.status")" = 255 ] || die "the preflight has failed: see above"
  for kind in own connection any; do # what other hosts only suffered from comes last
    for i in "${FAILED[@]}"; do
      why=$(cause "$i")
      case $kind:$why in
        own:*": the connection is lost"* | own:*"lost the other ranks"* | own:*"ended at once"*) ;;
        own:* | connection:*": the connection is lost"* | any:*) die "$why" ;;
      esac
    done
  done
elif [ -n "$preempted" ]; then
  say "stopped after saving a checkpoint, exit status 75"
  exit 75
fi
