#!/usr/bin/env bash
# Submits a Slurm job that trains:   bash launch/submit.sh [sbatch options] [-- train.py options]
#     bash launch/submit.sh --nodes=4 --time=12:00:00 -- --run.name big --train.lr 1e-4
# with the settings of site.env and topology.env. What cannot work is said now, not when the job
# starts. The job runs from a copy of code and config in its run's folder: later edits do not reach
# it. --site NAME and --preflight are as local.sh has them; --dry-run shows what would be submitted.
set -euo pipefail

script=$(readlink -f "${BASH_SOURCE[0]}")
PROJECT_DIR=${PROJECT_DIR:-$(dirname "$script")/..}
from=$PWD               # relative paths among sbatch's options start here
sweep=${SWEEP_FILE:-}   # launch/sweep.sh sets it
case $sweep in '' | /*) ;; *) sweep=$from/$sweep ;; esac
# shellcheck source=/dev/null
. "$PROJECT_DIR/launch/common.sh" # goes into the project's folder

# --- options ------------------------------------------------------------------------------------

dry_run='' limit='' array='' output='' given=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --dry-run) dry_run=1; shift; continue ;;
    %[1-9]*) [ -n "$sweep" ] || die "$1 is for launch/sweep.sh"; limit=$1; shift; continue ;;
    -W | --wait) die "$1 is for sbatch itself: the job outlives this script, squeue tells of it" ;;
    -o | --output) output=${2-} ;;
    --output=*) output=${1#*=} ;;
    -a* | --array | --array=*)
      [ -n "$sweep" ] || die "an array's runs need options of their own: launch/sweep.sh FILE $*"
      array=1
      ;;
  esac
  [[ ${1%%=*} != --*.* ]] || die "$1 is an option of train.py: those come after a lone --"
  given+=("$1")
  shift
done
[ $# -eq 0 ] || shift # the lone --
[ -z "$limit" ] || [ -z "$array" ] || die "give $limit with the array: --array=...$limit"
for tool in sbatch squeue; do
  command -v $tool >/dev/null || die "no $tool here: submit from a login node of a Slurm cluster, or train here with launch/local.sh"
done

# --- checks, before anything waits in a queue ---------------------------------------------------

BACKEND=gloo look_at_machine >/dev/null # where it fails it has said why

# Writes the whole options of each run to a file of its number in the folder that is given, and
# prints the runs' folders. A sweep's runs have a line each, with quotes as in a shell.
list_runs() {
  "${INTERPRETER[@]}" - text_gpt_fsdp.config "$SCAFFOLD_CONTROL/runs" "$sweep" "$@" <<'PYTHON_CODE'
import contextlib, importlib, os, shlex, shutil, sys
from pathlib import Path

module, folder, sweep, *common = sys.argv[1:]
folder, project = Path(folder), Path.cwd()
folder.mkdir()


def fail(message):
    sys.exit(f"launch: {message}")


def fixed(options):
    """The options, with any other config file replaced by a copy that goes with the code."""
    options = list(options)
    for i, option in enumerate(options):
        name, _, value = option.partition("=")
        if name == "--config" and (value or i + 1 < len(options)):
            source = project / (value or options[i + 1])
            if source.is_file():
                copy = Path("launch", "configs", f"{len(list(folder.glob('configs/*')))}-{source.name}")
                (folder / "configs").mkdir(exist_ok=True)
                shutil.copy(source, folder / "configs" / copy.name)
                options[i if value else i + 1] = f"--config={copy}" if value else str(copy)
    return options


lines = [("", [])]
if sweep:
    lines = []
    try:
        text = Path(sweep).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{sweep} cannot be read: {error}")
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{Path(sweep).name}, line {number}: "
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                options = shlex.split(line)
            except ValueError as error:
                fail(f"{where}{error}")
            if not any(option.split("=")[0] in ("--run.name", "--run.dir") for option in options):
                options.append(f"--run.name={Path(sweep).stem}-{len(lines) + 1}")
            lines.append((where, options))
    if not lines:
        fail(f"{sweep} has no line with options of a run")

sys.path.insert(0, "")
try:
    config = importlib.import_module(module)
except ImportError as error:
    fail(f"{sys.executable} lacks what the project needs ({error}): pip install -e {project}")
known = {}
for task, (where, options) in enumerate(lines, 1):
    options = [*common, *options]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            chosen = config.load(options)
    except config.UserError as error:
        fail(f"{where}{error}")
    run = chosen.run_dir.resolve()
    if run in known:
        fail(f"{where}{run} is the folder of {known[run].removesuffix(': ')} too: give each a --run.name")
    known[run] = where
    if chosen.run.resume == "never" and any(run.glob("checkpoints/step_*")):
        fail(f"{where}{run} holds checkpoints, and run.resume is never: use another --run.name, or resume")
    options = [*fixed(options), f"--run.dir={run}"]
    for section, key in (("data", "path"), ("run", "resume"), ("run", "init_from")):
        value = str(getattr(getattr(chosen, section), key, ""))
        if value.startswith(".."):  # the copy of the project lies elsewhere
            options.append(f"--{section}.{key}={(project / value).resolve()}")
    (folder / str(task)).write_bytes(b"".join(os.fsencode(option) + b"\0" for option in options))
    print(run)
PYTHON_CODE
}

who_has() { # RUN: the job that has or awaits it, or the process; nothing where it is free
  local file job state
  for file in "$1"/code/*.job; do
    job=$(cat "$file" 2>/dev/null) || continue
    state=$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null) || continue
    [ -z "$state" ] || { echo "job $job (${state%%$'\n'*})"; return; }
  done
  # A lock that nobody has touched for a minute is of a launch that died.
  if [ -n "$(find "$1/lock" -mmin -1 2>/dev/null)" ]; then
    sed -n 's/.*"host": "\([^"]*\)", "pid": \([0-9]*\).*/process \2 on \1/p' "$1/lock"
  fi
}

list=$(list_runs "$@") # where it fails it has said why
mapfile -t runs <<<"$list"
if [ "$PREFLIGHT" = 0 ] && [ -z "$array" ]; then # of --array=2,5 the runs' own locks take care
  for run in "${runs[@]}"; do
    owner=$(who_has "$run")
    [ -z "$owner" ] || die "$run is taken by $owner: wait, cancel it, or use another --run.name"
  done
fi
if [ -f prepare.py ] && [ -z "$dry_run" ]; then # here, where there may be internet
  "${INTERPRETER[@]}" prepare.py "$@" || exit 1
fi

# --- the job ------------------------------------------------------------------------------------

base=${runs[0]} # what holds the copy and the log: the run's folder, or one beside those of a sweep
if [ -n "$sweep" ]; then
  base=${sweep##*/} base=$PROJECT_DIR/runs/${base%.*}.sweep
fi
copy=$base/code/$(date +%Y%m%d-%H%M%S)-$$

command=(sbatch --parsable --nodes="${NNODES/:/-}")
if [ "$BACKEND" = gloo ]; then
  command+=(--cpus-per-task="${NPROC_PER_NODE:-$GPUS_PER_NODE}")
else
  command+=(--cpus-per-task=$((4 * GPUS_PER_NODE)))
  read -ra request <<<"${GPU_REQUEST//%d/$GPUS_PER_NODE}"
  command+=(${request[@]+"${request[@]}"})
fi
if [ -z "$output" ]; then
  output=$base/logs/slurm-%j.out
  [ -z "$sweep" ] || output=$base/logs/slurm-%A_%a.out
  command+=(--output="$output")
fi
[ -z "$sweep" ] || [ -n "$array" ] || command+=(--array="1-$(wc -l <<<"$list")$limit")
command+=(${given[@]+"${given[@]}"})
arguments=() # a sweep's runs have theirs in the copy
[ -n "$sweep" ] || mapfile -d '' -t arguments <"$SCAFFOLD_CONTROL/runs/1"
[ "$PREFLIGHT" = 0 ] || arguments+=(--preflight)
[ -z "${!SBATCH_*}" ] || export "${!SBATCH_@}"
submit() { # SBATCH OPTIONS AND ARGUMENTS...
  (cd -- "$from" && PROJECT_DIR=$copy exec env -u SCAFFOLD_CONTROL -u SWEEP_FILE "${command[@]}" "$@")
}

# How GPUs are asked for is said on sbatch's command line, as the site wants it.
sed '/^#SBATCH --gpus-per-node=/d' launch/slurm.sbatch >"$SCAFFOLD_CONTROL/slurm.sbatch"
status=0
answer=$(submit --test-only "$SCAFFOLD_CONTROL/slurm.sbatch" 2>&1) || status=$?
if [ -n "$dry_run" ]; then
  printf '%q ' "${command[@]}" "$copy/launch/slurm.sbatch" ${arguments[@]+"${arguments[@]}"}
  printf '\n%s\n' "$answer"
  exit "$status"
fi
[ "$status" -eq 0 ] || say "this job cannot start as the cluster is now ($answer)"

# --- the copy -----------------------------------------------------------------------------------

goes_along() { # ENTRY: whether the job gets a copy of it (code, config), not a link (data, runs, environments)
  case $1 in runs | data | .git | .scaffold) return 1 ;; esac
  if [ ! -d "$1" ]; then
    [ -n "$(find -L "$1" -size -20480)" ] || return 1 # 10 MB
  elif [ -e "$1/pyvenv.cfg" ] || [ -e "$1/conda-meta" ] ||
    [ -z "$(find "$1/" -maxdepth 2 \( -name '*.py' -o -name '*.toml' \) -print -quit)" ]; then
    return 1
  elif [ "$(du -sk "$1/" | cut -f1)" -gt 102400 ]; then
    [ "$1" != launch ] || die "launch/ has more than 100 MB, and a job gets a copy of it: keep images elsewhere"
    say "$1 has more than 100 MB: the job uses it where it is, and edits there reach it"
    return 1
  fi
}

mkdir -p -- "$copy"
for entry in * .[!.]*; do
  if [ ! -e "$entry" ]; then
    continue # no hidden files; or a link to nothing, such as an editor's lock
  elif goes_along "$entry"; then
    cp -RpH -- "$entry" "$copy/"
  else
    ln -s -- "$PROJECT_DIR/$entry" "$copy/"
  fi
done
cp "$SCAFFOLD_CONTROL/slurm.sbatch" "$copy/launch/"
[ ! -f "$SITE_FILE" ] || cp -p "$SITE_FILE" "$copy/launch/site.env" # also where the job does not get SITE
[ ! -d "$SCAFFOLD_CONTROL/runs/configs" ] || mv "$SCAFFOLD_CONTROL/runs/configs" "$copy/launch/"
if [ -n "$sweep" ]; then
  mv "$SCAFFOLD_CONTROL/runs" "$copy/launch/sweep"
  cp -- "$sweep" "$copy/launch/sweep.txt"
fi
folder=$(dirname -- "$output")
case $folder in *%*) ;; *) (cd -- "$from" && mkdir -p -- "$folder") ;; esac # else the job would end without a log

if ! job=$(submit "$copy/launch/slurm.sbatch" ${arguments[@]+"${arguments[@]}"}); then # it has said why
  rm -rf -- "$copy"
  exit 1
fi
job=${job%%;*}
if [ "$PREFLIGHT" = 0 ]; then
  for i in "${!runs[@]}"; do # where the next submit looks for who has the run
    mkdir -p -- "${runs[i]}/code"
    printf '%s\n' "$job${sweep:+_$((i + 1))}" >"${runs[i]}/code/${copy##*/}.job"
  done
fi
output=${output//%j/$job} output=${output//%A/$job}
printf 'job %s\nlog %s\n' "$job" "$output"
printf 'run %s\n' "${runs[@]}"
