#!/usr/bin/env bash
# Submits a job array, a run for each line of a file:
#     bash launch/sweep.sh FILE [%K] [sbatch options] [-- train.py options of every run]
# A line holds train.py options, with quotes as in a shell; it is read, never executed. Empty lines and
# those that begin with # are left out. The n-th run is called FILE-n (without its suffix), unless its
# line has a --run.name. %K: at most K run at a time; --array=2,5 submits some of the runs only.
#     --train.lr 1e-3
#     --train.lr 3e-4 --run.name slower
set -euo pipefail

script=$(readlink -f "${BASH_SOURCE[0]}")
case ${1:--h} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$script"; exit ;;
  -*) printf 'launch: the file comes first: launch/sweep.sh FILE [sbatch options]\n' >&2; exit 1 ;;
esac
[ -f "$1" ] || { printf 'launch: %s is not a file\n' "$1" >&2; exit 1; }
SWEEP_FILE=$1 exec bash "$(dirname "$script")/submit.sh" "${@:2}"
