"""The Slurm launcher of generated projects on a real Slurm: two nodes, a controller, no stand-ins."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launches
from faults import OPTIONS
from slurm import Slurm

pytestmark = pytest.mark.slow

# A person's change to the model: in a job's first start each micro-batch takes $SLOW seconds, and
# rank $FAIL fails.
CHANGE = """

_loss = loss


def loss(model, batch):
    import os, time

    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        time.sleep(float(os.environ.get("SLOW", "0")))
        if os.environ.get("RANK", "0") == os.environ.get("FAIL"):
            raise ValueError("sample 7 is broken")
    return _loss(model, batch)


import os

if os.environ.get("BROKEN", "none") == os.environ.get("SLURMD_NODENAME"):
    import no_such_package
"""


def environment(**changes: str) -> dict[str, str]:
    """The environment of a person who submits: topology.env decides on ranks and backend."""
    found = launches.environment()
    for name in ("NPROC_PER_NODE", "BACKEND"):
        del found[name]
    return found | changes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with Slurm() as started:
        yield started


@pytest.fixture(autouse=True)
def free_nodes(cluster: Slurm) -> Iterator[None]:
    """Every test finds an idle cluster, and leaves no process behind."""
    cluster.await_nodes()
    yield
    cluster.run("scancel", "--user=root")
    assert launches.eventually(lambda: not cluster.left("train.py"), 30), cluster.left("train.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for two nodes with a rank each, in a folder whose name scripts stumble over."""
    folder = tmp_path_factory.mktemp("my projects \N{LATIN SMALL LETTER E WITH ACUTE}")
    answers = "--model mlp --backend gloo --launcher slurm --nodes 2 --gpus-per-node 1"
    made = launches.new(folder, "demo", *answers.split())
    with (made / "demo" / "model.py").open("a") as model:
        model.write(CHANGE)
    (made / ".venv").symlink_to(sys.prefix)  # what a job without its submitter's variables finds
    return made


@pytest.fixture(scope="module")
def losses(project: Path) -> dict[int, float]:
    """What one rank trains, without any launcher."""
    run = launches.launch(project / "train.py", *OPTIONS, "--run.name=one")
    assert run.code == 0, run
    return launches.losses(project / "runs" / "one")


def train(
    cluster: Slurm, project: Path, run: str, *options: str, sbatch: str = "", **changes: str
) -> str:
    """Submits a job by plain sbatch, from the cluster's folder, and returns its number."""
    script = project / "launch" / "slurm.sbatch"
    argv: list[str | Path] = [*sbatch.split(), script, *OPTIONS, f"--run.name={run}", *options]
    return cluster.sbatch(*argv, env=environment(**changes))


def submitted(cluster: Slurm, project: Path, *argv: str, **changes: str) -> str:
    """Submits a job by submit.sh and returns its number."""
    done = cluster.run("bash", project / "launch" / "submit.sh", *argv, env=environment(**changes))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def await_step(run: Path, step: int) -> None:
    """Returns once the run has logged this step."""
    assert launches.eventually(lambda: any(m["step"] >= step for m in launches.metrics(run)))


def refusal(cluster: Slurm, job: str) -> str:
    """The last line of a job that ends at once, which is no traceback."""
    ended = cluster.await_end(job, 30)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), cluster.log(job)
    assert "Traceback" not in cluster.log(job)
    return cluster.log(job).splitlines()[-1]


def test_a_job_on_two_nodes_has_the_losses_of_one_rank_wherever_it_is_submitted(
    cluster: Slurm, project: Path, losses: dict[int, float]
) -> None:
    job = train(cluster, project, "plain", sbatch="--export=NONE")
    assert cluster.await_end(job)["JobState"] == "COMPLETED", cluster.log(job)
    assert launches.losses(project / "runs" / "plain") == pytest.approx(losses, rel=1e-5)
    assert "node 1 of 2 (node2)" in cluster.log(job)


def test_a_job_saves_before_its_time_limit_and_goes_on_until_it_is_finished(
    cluster: Slurm, project: Path, losses: dict[int, float]
) -> None:
    job = train(cluster, project, "limit", sbatch="--time=1 --signal=B:USR1@15", SLOW="2")
    # Meanwhile: a run that is finished already, as after a requeue that came too late.
    finished = train(cluster, project, "one", sbatch="--nodes=1")
    ended = cluster.await_end(finished)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.log(finished)
    assert "already at 9 of 9" in cluster.log(finished)

    ended = cluster.await_end(job, 240)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.log(job)
    assert int(ended["Restarts"]) >= 1
    assert launches.losses(project / "runs" / "limit") == pytest.approx(losses, rel=1e-5)
    resumed = int(re.findall(r"resuming from .*step_(\d+)", cluster.log(job))[0])
    assert 0 < resumed < 9


def test_a_job_of_higher_priority_costs_no_step_but_those_since_the_last_checkpoint(
    cluster: Slurm, project: Path, losses: dict[int, float]
) -> None:
    low = train(cluster, project, "low", sbatch="--partition=low", SLOW="1")
    brief = train(cluster, project, "brief", sbatch="--partition=brief --nodes=1", SLOW="0.5")
    for run in ("low", "brief"):
        await_step(project / "runs" / run, 2)
    cluster.sbatch("--exclusive", "--nodes=2", "--partition=urgent", "--wrap=sleep 1")
    for job, run in ((low, "low"), (brief, "brief")):
        ended = cluster.await_end(job, 180)
        assert ended["JobState"] == "COMPLETED", cluster.log(job)
        assert ended["Restarts"] == "1"
        assert launches.losses(project / "runs" / run) == pytest.approx(losses, rel=1e-5)
        assert "resuming from" in cluster.log(job)
    assert "launch: saved: the job goes back into the queue" in cluster.log(low)


def test_a_job_that_may_not_be_requeued_goes_on_as_another_one(
    cluster: Slurm, project: Path, losses: dict[int, float]
) -> None:
    array = cluster.sbatch(
        *"--no-requeue --array=7 --nodes=1 --time=9 --signal=B:USR1@1".split(),
        project / "launch" / "slurm.sbatch",
        *OPTIONS,
        env=environment(SLOW="0.5"),
    )
    # Beside it: the same from the copy that submit.sh makes.
    argv = "--no-requeue --nodes=1 --exclude=node1 -- --run.name=submitted".split()
    job = submitted(cluster, project, *argv, *OPTIONS, SLOW="0.5")
    own = project / "runs" / "submitted"
    (owner,) = own.glob("code/*.job")
    assert owner.read_text() == f"{job}\n"
    run = project / "runs" / f"{array}_7"  # an array's tasks are runs of their own
    for number, folder in ((f"{array}_7", run), (job, own)):
        await_step(folder, 2)
        cluster.run("scancel", "--batch", "--signal=USR1", number)
    assert cluster.await_end(job)["ExitCode"] == "75:0"
    assert cluster.await_end(owner.read_text().strip())["JobState"] == "COMPLETED"
    assert owner.read_text() != f"{job}\n"  # it names who has the run
    assert launches.losses(own) == pytest.approx(losses, rel=1e-5)
    first = cluster.await_end(f"{array}_7")
    assert (first["JobState"], first["ExitCode"]) == ("FAILED", "75:0"), cluster.log(array)
    told = re.search(r"job (\d+) goes on when this one has ended", cluster.log(array))
    assert told, cluster.log(array)
    second = cluster.await_end(told[1])
    assert second["JobState"] == "COMPLETED", cluster.log(told[1])
    assert [second[key] for key in ("NumNodes", "TimeLimit")] == ["1", "00:09:00"]
    assert launches.losses(run) == pytest.approx(losses, rel=1e-5)
    assert cluster.log(told[1]) == cluster.log(array)  # one log
    assert "start 2" in cluster.log(array)


def test_scancel_ends_every_process_and_the_job_does_not_come_back(
    cluster: Slurm, project: Path
) -> None:
    run = project / "runs" / "cancelled"
    env = {"SLOW": "0.2", "TMPDIR": "/of the login node"}
    job = train(cluster, project, run.name, "--train.steps=99", **env)
    await_step(run, 2)
    # Nobody else can have the run meanwhile, and nothing asks the internet.
    submit = project / "launch" / "submit.sh"
    again = cluster.run("bash", submit, "--", f"--run.name={run.name}", env=environment())
    assert again.returncode == 1
    assert re.search(
        f"^launch: {re.escape(str(run))} is taken by process .* on node1", again.stderr
    )
    environ = "tr '\\0' '\\n' < /proc/$(pgrep -f '[t]rain.py' | tail -n 1)/environ"
    assert "HF_HUB_OFFLINE=1" in cluster.hosts.run(2, ["bash", "-c", environ]).stdout
    cluster.run("scancel", job)
    assert cluster.await_end(job)["JobState"] == "CANCELLED"
    assert launches.eventually(lambda: not cluster.left(str(project)), 10), cluster.left("")
    assert cluster.job(job)["Restarts"] == "0"
    # What it was at is saved, and free for the next.
    assert launches.checkpoints(run)
    assert not (run / "lock").exists()


def test_a_job_that_is_told_to_stop_before_training_loses_nothing(
    cluster: Slurm, project: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 5\nexit 1\n")
    python.chmod(0o755)
    job = train(cluster, project, "early", PYTHON=str(python), MAX_REQUEUES="0")
    cluster.await_state(job, "RUNNING")
    assert launches.eventually(lambda: len(cluster.left(str(python))) == 2, 20)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.await_end(job)
    assert (ended["ExitCode"], ended["Restarts"]) == ("75:0", "0"), cluster.log(job)
    assert cluster.log(job).splitlines()[-1] == (
        "launch: told to stop before training began; started 1 times (MAX_REQUEUES=0):"
        " submit it again to go on"
    )


def test_a_rank_that_fails_ends_the_job_and_its_traceback_is_the_last_that_is_printed(
    cluster: Slurm, project: Path
) -> None:
    job = train(cluster, project, "fails", FAIL="1")
    ended = cluster.await_end(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert ended["Restarts"] == "0"
    cause = cluster.log(job)[cluster.log(job).rindex("Traceback") :].splitlines()
    assert cause[-1] == "error: rank 1 failed: ValueError: sample 7 is broken"
    assert cause[-2] == "ValueError: sample 7 is broken"
    job = train(cluster, project, "broken", BROKEN="node2")  # before its ranks can have a run
    assert cluster.await_end(job)["ExitCode"] == "1:0"
    last = cluster.log(job).splitlines()[-1]
    assert last.startswith("launch: failed: train.py cannot be imported on node2: ModuleNotFound")


def test_a_node_that_is_lost_sends_the_job_back_into_the_queue(
    cluster: Slurm, project: Path, losses: dict[int, float]
) -> None:
    job = train(cluster, project, "lost", SLOW="1")
    await_step(project / "runs" / "lost", 3)
    cluster.hosts.run(2, ["bash", "-c", "kill -9 -1"])  # all that it runs
    assert launches.eventually(lambda: cluster.job(job)["Restarts"] == "1"), cluster.log(job)
    cluster.boot(2)
    ended = cluster.await_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), cluster.log(job)
    assert launches.losses(project / "runs" / "lost") == pytest.approx(losses, rel=1e-5)


def test_a_node_is_missed_before_slurm_notices(
    cluster: Slurm, project: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho launch: no good >&2\nsleep 3\nexit 1\n")
    python.chmod(0o755)
    job = train(cluster, project, "missed", PYTHON=str(python))
    cluster.await_state(job, "RUNNING")
    time.sleep(1)
    cluster.hosts.run(2, ["pkill", "-9", "-x", "slurmd"])
    assert launches.eventually(lambda: "not all of node1 node2 answer" in cluster.log(job), 40)
    cluster.boot(2)
    ended = cluster.await_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "1"), cluster.log(job)
    assert cluster.log(job).splitlines()[-1] == "launch: failed: no good"


def test_jobs_of_a_wrong_shape_end_at_once_with_one_line(
    cluster: Slurm, project: Path, tmp_path: Path
) -> None:
    script = project / "launch" / "slurm.sbatch"

    def last_line(*argv: str | Path, **changes: str) -> str:
        job = cluster.sbatch(*argv, env=environment(**changes))
        ended = cluster.await_end(job, 30)
        assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), cluster.log(job)
        assert "Traceback" not in cluster.log(job)
        return cluster.log(job).splitlines()[-1]

    two = "2 tasks on 1 node(s): give --ntasks-per-node=1"
    assert two in last_line("--nodes=1", "--ntasks-per-node=2", script)
    assert "4 tasks on 2 node(s)" in last_line("--ntasks-per-node=2", script)
    assert "a heterogeneous job" in last_line("--nodes=1", ":", "--nodes=1", script)
    assert "ask for them with --gpus-per-node" in last_line("--gpus=3", script)
    too_many = last_line("--gpus-per-node=2", script, NPROC_PER_NODE="3", BACKEND="nccl")
    assert too_many == "launch: NPROC_PER_NODE=3, but the job has 2 GPU(s) on each node"
    assert "NETWORK_INTERFACE=ib7 has no address" in last_line(script, NETWORK_INTERFACE="ib7")
    # What the job has GPUs for does not train on CPUs for hours.
    gpu = last_line("--nodes=1", "--gpus-per-node=1", script, BACKEND="auto")
    assert "sees no GPU on node1: look at the node" in gpu
    assert "no launch/site.mars.env" in last_line(script, "--site", "mars")
    done = cluster.run("sbatch", "--gpus-per-node=3", script, env=environment())
    assert "Requested node configuration is not available" in done.stderr
    # Through standard input Slurm knows no path of the script: the folder is where it is.
    with script.open() as text:
        env = environment(SITE="mars")
        done = cluster.run("sbatch", "--parsable", stdin=text, cwd=project, env=env)
    assert cluster.await_end(done.stdout.strip())["ExitCode"] == "1:0"
    assert f"site.mars.env in {project}" in cluster.log(done.stdout.strip())
    stray = tmp_path / "stray.sbatch"
    shutil.copy(script, stray)
    assert "set PROJECT_DIR" in last_line(stray)


def path_without(tool: str, folder: Path) -> str:
    """A PATH with the system's commands but this one."""
    for found in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
        if found.name != tool and not (folder / found.name).exists():
            (folder / found.name).symlink_to(found)
    return f"PATH={folder}"


@pytest.mark.parametrize("missing", ["scontrol", "srun"])
def test_a_node_without_slurms_commands_says_so(
    cluster: Slurm, project: Path, tmp_path: Path, missing: str
) -> None:
    script = project / "launch" / "slurm.sbatch"
    sbatch = shutil.which("sbatch") or ""
    argv: list[str | Path] = ["env", path_without(missing, tmp_path), sbatch, "--parsable", script]
    job = cluster.run(*argv, env=environment()).stdout.strip()
    assert cluster.await_end(job, 30)["ExitCode"] == "1:0"
    assert f"launch: no {missing} on node1" in cluster.log(job)
    assert len(cluster.log(job).splitlines()) == 1


SWEEP = """\
# two of them
--train.steps=9

--run.name 'the other $(touch PWNED)' --train.lr "3e-3"
"""


def test_a_sweep_runs_what_was_submitted_whatever_is_edited_since(
    cluster: Slurm, project: Path, losses: dict[int, float], tmp_path: Path
) -> None:
    copy = tmp_path / "demo"
    shutil.copytree(project, copy, symlinks=True, ignore=shutil.ignore_patterns("runs"))
    file = tmp_path / "try this.txt"
    file.write_text(SWEEP)
    site = copy / "launch" / "site.moon.env"
    site.write_text("SRUN_OPTIONS=(--label)\n")
    # Both runs share the first node.
    argv = (
        "--site moon --hold --nodes=1 --nodelist=node1 --gres=gpu:1 -- --config mine.toml".split()
    )
    shutil.move(copy / "config.toml", copy / "mine.toml")
    env = environment(SLOW="0.25")
    sweep = copy / "launch" / "sweep.sh"
    done = cluster.run("bash", sweep, file, *argv, *OPTIONS, env=env)
    assert done.returncode == 0, done.stderr
    array = done.stdout.split()[1]
    runs = [copy / "runs" / "try this-1", copy / "runs" / "the other $(touch PWNED)"]
    assert done.stdout.splitlines()[-2:] == [f"run {run}" for run in runs]
    assert cluster.job(f"{array}_1")["TresPerNode"] == "gres:gpu:1"
    # Neither of them can be submitted again meanwhile.
    again = cluster.run("bash", sweep, file, "--", "--config", "mine.toml", env=env)
    assert again.returncode == 1
    assert f"try this-1 is taken by job {array}_1 (PENDING)" in again.stderr

    (code,) = (copy / "runs" / "try this.sweep" / "code").iterdir()
    assert [name for name in ("demo", "runs", ".venv") if (code / name).is_symlink()] == [
        "runs",
        ".venv",
    ]
    listed = cluster.run(sys.executable, copy / "runs.py").stdout
    assert len(re.findall("^(?:try this-1|the other .*) +queued ", listed, re.MULTILINE)) == 2

    for edited in (
        "train.py",
        "demo/model.py",
        "launch/node.sh",
        "launch/slurm.sbatch",
        "mine.toml",
    ):
        (copy / edited).write_text("exit 1 # not what was submitted\n")
    site.write_text("exit 1\n")
    file.write_text("--train.steps=1\n")
    cluster.run("scontrol", "release", array)
    for run in runs:
        await_step(run, 2)
    # The last task has the number of the whole array; what it is told does not reach the other.
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_2")
    restarts = []
    for task, run in enumerate(runs, 1):
        ended = cluster.await_end(f"{array}_{task}")
        log = (copy / "runs" / "try this.sweep" / "logs" / f"slurm-{array}_{task}.out").read_text()
        assert ended["JobState"] == "COMPLETED", log
        assert "0: launch:" in log  # --label
        assert launches.losses(run) == pytest.approx(losses, rel=1e-5)
        restarts.append(ended["Restarts"])
    assert restarts == ["0", "1"]
    assert not list(tmp_path.rglob("PWNED"))


def test_mistakes_are_told_before_a_job_waits_in_the_queue(
    cluster: Slurm, project: Path, tmp_path: Path
) -> None:
    queued = cluster.run("squeue", "--noheader").stdout

    def refused(script: str, *argv: str | Path, path: str = "A=") -> str:
        command = ["env", path, "bash", project / "launch" / script, *argv]
        done = cluster.run(*command, env=environment())
        assert done.returncode == 1, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr

    def sweep(text: str) -> str:
        (tmp_path / "sweep.txt").write_text(text)
        return refused("sweep.sh", tmp_path / "sweep.txt")

    assert "come after a lone --" in refused("submit.sh", "--train.lr=1")
    assert "sweep.txt, line 2: " in sweep("--train.lr=1\n--train.lr='1\n")
    assert "launch/sweep.sh FILE --array=1-2" in refused("submit.sh", "--array=1-2")
    assert "train.lrr" in sweep("--train.lrr=1\n")
    twice = sweep("--run.name=a\n\n--run.name=a\n")
    assert "sweep.txt, line 3: " in twice
    assert "is the folder of sweep.txt, line 1 too" in twice
    assert "has no line" in sweep("# nothing\n")
    assert "is not a file" in refused("sweep.sh", tmp_path / "none.txt")
    (tmp_path / "bin").mkdir()
    path = path_without("sbatch", tmp_path / "bin")
    assert "no sbatch here" in refused("submit.sh", path=path)
    assert cluster.run("squeue", "--noheader").stdout == queued
    assert not (project / "runs" / "a").exists()


def test_the_preflight_looks_at_every_node_of_a_job(cluster: Slurm, project: Path) -> None:
    script = project / "launch" / "submit.sh"
    done = cluster.run("bash", script, "--preflight", "--", "--run.name=flight", env=environment())
    job = done.stdout.split()[1]
    ended = cluster.await_end(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), cluster.log(job)
    assert re.search(r"^1 +node2 +10.77.0.2", cluster.log(job), re.MULTILINE)
    assert "preflight: all is well" in cluster.log(job)


def test_submit_shows_what_slurm_would_say_and_changes_nothing(
    cluster: Slurm, project: Path
) -> None:
    def shown(*argv: str, **changes: str) -> tuple[int, str]:
        script = project / "launch" / "submit.sh"
        done = cluster.run("bash", script, "--dry-run", *argv, env=environment(**changes))
        return done.returncode, done.stdout

    before = sorted(project.rglob("*"))
    code, text = shown("--partition=urgent", "--", "--run.name=dry run")
    assert code == 0
    assert "--nodes=2 --cpus-per-task=1" in text
    assert "--partition=urgent" in text
    assert "gpu" not in text.replace(str(project), "")  # gloo asks for none
    assert "to start at" in text
    gpus = {"BACKEND": "nccl", "GPUS_PER_NODE": "2", "GPU_REQUEST": "--gres=gpu:%d"}
    code, text = shown("-c1", SBATCH_PARTITION="low", **gpus)
    assert code == 0
    assert "--gres=gpu:2" in text
    assert "in partition low" in text
    code, text = shown("--nodes=3")
    assert code == 1
    assert "Requested node configuration is not available" in text
    assert sorted(project.rglob("*")) == before
