"""Kubernetes: manifests that the real schemas accept, and pods that train as the manifests say.

There is no cluster here. What its controllers make of a manifest (pods, their names and variables)
is written down in this file, after Kubernetes, Kubeflow Trainer 2.3 and Training Operator 1.9; the
containers' commands then run for real, each pod a host of its own with process numbers of its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from helpers import LAYOUT, scaffold
from hosts import Hosts, require
from launches import checkpoints, descendants, eventually, launch, losses, new
from scaffold import catalog, questions
from scaffold.answers import Answers
from scaffold.errors import AnswerError
from scaffold.render import context, kubernetes_name

Document = dict[str, Any]
JOB, TRAINJOB, PYTORCHJOB = FILES = (
    "launch/kubernetes.yaml",
    "launch/kubernetes-trainjob.yaml",
    "launch/kubernetes-pytorchjob.yaml",
)
OURS = (*FILES, "launch/Dockerfile", "launch/Dockerfile.dockerignore")
OLDEST = "1.29"  # that has the fields of the Job by default
LABEL = re.compile(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
)  # RFC 1035; RFC 1123 lets it begin with a digit
NAMES = ("demo", "My_Model-2", "Null", "yes", "e1", "A" + "_b" * 31 + "C")
PAIRS = [  # of model and data: made up, of one's own, and text that Python brings along
    ("gpt", "synthetic", ""),
    ("mlp", "csv", "/somewhere/table.csv"),
    ("gpt", "text", ""),
]


def topologies() -> Iterator[Answers]:
    """Every shape of cluster with each strategy that fits it, under changing names and data."""
    names, pairs = itertools.cycle(NAMES), itertools.cycle(PAIRS)
    shapes = itertools.product((1, 2, 5), (1, 8), ("auto", "gloo"), catalog.STRATEGIES)
    for nodes, gpus, backend, strategy in shapes:
        model, data, path = next(pairs) if strategy != "fsdp-tp" else PAIRS[0]
        keys = ("nodes", "gpus-per-node", "backend", "strategy", "model", "data", "data-path")
        values = dict(zip(keys, (nodes, gpus, backend, strategy, model, data, path), strict=True))
        if not questions.problem(values):
            yield chosen(name=next(names), **values)


def chosen(**values: Any) -> Answers:
    return Answers.of({"name": "demo", "launcher": ("torchrun", "kubernetes"), **values})


TOPOLOGIES = list(topologies())
each_topology = pytest.mark.parametrize(
    "answers",
    TOPOLOGIES,
    ids=lambda a: f"{a.name[:10]}-{a.nodes}x{a.gpus_per_node}-{a.backend}-{a.strategy}-{a.data}",
)


@functools.cache
def texts(answers: Answers) -> dict[str, str]:
    """The files of the launcher, without those of the rest of a project: quickly."""
    variables = {"cookiecutter": context(answers)}
    return {path: template(path).render(variables).rstrip("\n") + "\n" for path in OURS}


@functools.cache
def template(path: str) -> Template:
    parts = FileSystemLoader(LAYOUT.parent / "templates")
    return Environment(loader=parts, undefined=StrictUndefined).from_string(
        (LAYOUT / path).read_text()
    )


@functools.cache
def documents(answers: Answers, path: str) -> dict[str, Document]:
    """The objects in a manifest, by their kind."""
    return objects_in(texts(answers)[path])


def objects_in(text: str) -> dict[str, Document]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {document["kind"]: document for document in yaml.load_all(text, loader)}
    assert len(found) == text.count("\n---\n") + 1
    return found


# --- schemas --------------------------------------------------------------------------------------


class Invalid(Exception):
    """What a schema finds wrong with a document; an unknown field is wrong."""


# Each validation reads the same two large files again.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)


def check(document: Document, version: str = "") -> None:
    """Raises Invalid unless the schema of the document's kind accepts it."""
    kind = document["kind"]
    if kind in ("TrainJob", "TrainingRuntime", "JobSet"):
        check_kubeflow(document)
    elif kind == "PyTorchJob":
        check_pytorchjob(document)
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            spec = {**replica["template"]["spec"], "restartPolicy": replica["restartPolicy"]}
            check(job_of({"template": {"spec": spec}}))
    else:
        try:
            version = version or kubernetes_validate.latest_version()
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as e:
            raise Invalid(e.message)
    if kind in ("TrainingRuntime", "JobSet"):  # the Jobs inside, against Kubernetes' own schema too
        inside = document["spec"]["template"] if kind == "TrainingRuntime" else document
        for replicated in inside["spec"]["replicatedJobs"]:
            check(job_of(replicated["template"]["spec"]))


def job_of(spec: Document) -> Document:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inside"}, "spec": spec}


def check_kubeflow(document: Document) -> None:
    from kubeflow_trainer_api import models

    group = "JobsetV1alpha2" if document["kind"] == "JobSet" else "TrainerV1alpha1"
    api = "jobset.x-k8s.io/v1alpha2" if group[0] == "J" else "trainer.kubeflow.org/v1alpha1"
    if document["apiVersion"] != api:
        raise Invalid(document["apiVersion"])
    try:
        back = getattr(models, group + document["kind"]).from_dict(document).to_dict()
    except ValueError as error:
        raise Invalid(str(error))
    raise_if_lost(document, back)


def check_pytorchjob(document: Document) -> None:
    import kubeflow.training

    if document["apiVersion"] != "kubeflow.org/v1":
        raise Invalid(document["apiVersion"])
    client = kubeflow.training.ApiClient()
    try:
        answer = SimpleNamespace(data=json.dumps(document))
        job = client.deserialize(answer, "KubeflowOrgV1PyTorchJob")
    except (ValueError, TypeError) as error:
        raise Invalid(str(error))
    raise_if_lost(document, client.sanitize_for_serialization(job))


def raise_if_lost(given: Document, back: Document) -> None:
    """The models drop what they do not know, and turn a 2 into a "2"."""
    if lost := list(differences(given, back)):
        raise Invalid(f"unknown, or of another type: {', '.join(lost)}")


def differences(given: Any, back: Any, path: str = "") -> Iterator[str]:
    if isinstance(given, dict) and isinstance(back, dict):
        for key, value in given.items():
            yield from differences(value, back.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for i, (one, other) in enumerate(zip(given, back, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    elif given != back or type(given) is not type(back):
        yield path


@each_topology
def test_the_real_schemas_accept_every_manifest(answers: Answers) -> None:
    kinds = {path: list(documents(answers, path)) for path in FILES}
    assert kinds == {  # a NetworkPolicy would have to let all ports through
        JOB: ["PersistentVolumeClaim", "Service", "Job"],
        TRAINJOB: ["PersistentVolumeClaim", "TrainingRuntime", "TrainJob"],
        PYTORCHJOB: ["PersistentVolumeClaim", "PyTorchJob"],
    }
    for path in FILES:
        for document in documents(answers, path).values():
            check(document)
    for document in documents(answers, JOB).values():
        check(document, OLDEST)
    check(jobset(documents(answers, TRAINJOB)))  # what Trainer makes of it


def at(document: Any, path: str) -> Any:
    """What stands at a dotted path; a number is an index."""
    return functools.reduce(
        lambda node, key: node[int(key) if key.isdigit() else key], path.split("."), document
    )


BROKEN = [  # where, which field, and what it is there; "" takes the field's name apart
    (JOB, "Job", "spec", "completions", "two"),
    (JOB, "Job", "spec", "backoffLimitPerIndex", ""),
    (JOB, "Job", "spec.podFailurePolicy.rules.0", "action", None),
    (JOB, "Job", "spec.template.spec.containers.0", "volumeMounts", ""),
    (JOB, "Job", "spec.template.spec.containers.0.env.0", "value", 2),
    (JOB, "Service", "spec", "publishNotReadyAddresses", "true"),
    (JOB, "PersistentVolumeClaim", "spec", "accessModes", "ReadWriteMany"),
    (JOB, "Job", "", "kind", "IndexedJob"),
    (TRAINJOB, "TrainJob", "spec.trainer", "numNodes", ""),
    (TRAINJOB, "TrainJob", "spec.trainer", "numProcPerNode", "all"),
    (TRAINJOB, "TrainJob", "", "apiVersion", "trainer.kubeflow.org/v1"),
    (TRAINJOB, "TrainingRuntime", "spec.mlPolicy", "torch", {"numProcPerNode": 8}),
    (TRAINJOB, "TrainingRuntime", "spec.template.spec.failurePolicy", "maxRestarts", ""),
    (TRAINJOB, "TrainingRuntime", "spec.template.spec.replicatedJobs.0", "replicas", "1"),
    (
        TRAINJOB,
        "TrainingRuntime",
        "spec.template.spec.replicatedJobs.0.template.spec.template.spec.containers.0",
        "volumeMounts",
        "",
    ),
    (PYTORCHJOB, "PyTorchJob", "spec", "nprocPerNode", 8),
    (PYTORCHJOB, "PyTorchJob", "spec.runPolicy", "backoffLimit", ""),
    (PYTORCHJOB, "PyTorchJob", "spec.pytorchReplicaSpecs.Worker", "replicas", "one"),
    (
        PYTORCHJOB,
        "PyTorchJob",
        "spec.pytorchReplicaSpecs.Master.template.spec.containers.0",
        "securityContext",
        "",
    ),
]


@pytest.mark.parametrize(("path", "kind", "where", "field", "value"), BROKEN)
def test_the_schemas_find_a_broken_field(
    path: str, kind: str, where: str, field: str, value: Any
) -> None:
    document = copy.deepcopy(documents(chosen(nodes=2), path)[kind])
    check(document)
    node = at(document, where) if where else document
    if value == "":
        node[field + "s"] = node.pop(field)
    else:
        assert field in node
        node[field] = value
    with pytest.raises(Invalid):
        check(document)


# --- what no schema sees --------------------------------------------------------------------------


def pod_specs(answers: Answers) -> dict[str, Document]:
    """The specs of the pods that each manifest leads to."""
    worker = documents(answers, PYTORCHJOB)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    made = jobset(documents(answers, TRAINJOB))["spec"]["replicatedJobs"][0]["template"]["spec"]
    specs = {
        JOB: documents(answers, JOB)["Job"]["spec"]["template"]["spec"],
        TRAINJOB: made["template"]["spec"],
    }
    return specs | {role: replica["template"]["spec"] for role, replica in worker.items()}


@each_topology
def test_pods_find_each_other_and_have_what_training_needs(answers: Answers) -> None:
    objects = documents(answers, JOB)
    job, service = objects["Job"]["spec"], objects["Service"]
    assert job["completions"] == job["parallelism"] == answers.nodes
    assert job["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    labels = job["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()

    pods = every_pod(answers)
    for path, kind in ((JOB, "Job"), (TRAINJOB, "TrainJob"), (PYTORCHJOB, "PyTorchJob")):
        own = pods[path]
        assert len({pod.address for pod in own}) == answers.nodes
        for pod in own:
            assert pod.argv[:2] == ["bash", "launch/node.sh"]
            assert address_in(pod) == own[0].address
            assert pod.address.startswith(documents(answers, path)[kind]["metadata"]["name"])
            assert ("--data.path=/data" in pod.argv) == (answers.data == "csv")

    roles = ["Worker"] if answers.nodes > 1 else []
    assert list(pod_specs(answers)) == [JOB, TRAINJOB, "Master", *roles]
    for spec in pod_specs(answers).values():
        (container,) = spec["containers"]
        requests, limits = (container["resources"][key] for key in ("requests", "limits"))
        gpus = {} if answers.backend == "gloo" else {"nvidia.com/gpu": str(answers.gpus_per_node)}
        for resources in (requests, limits):
            assert {k: v for k, v in resources.items() if "gpu" in k} == gpus
        assert int(requests["cpu"]) >= answers.gpus_per_node
        assert requests["memory"] == limits["memory"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert gibibytes(volumes["shm"]["emptyDir"]["sizeLimit"]) < gibibytes(limits["memory"])
        claim = volumes[mounts["/app/runs"]]["persistentVolumeClaim"]["claimName"]
        for path in FILES:
            assert documents(answers, path)["PersistentVolumeClaim"]["metadata"]["name"] == claim
        assert ("/data" in mounts) == (answers.data == "csv")
        assert spec["terminationGracePeriodSeconds"] >= 120


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity[:-2])


def address_in(pod: Pod) -> str:
    return pod.env.get("PET_MASTER_ADDR") or pod.env["MASTER_ADDR"]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_pods_keep_to_the_restricted_security_standard(backend: str) -> None:
    for spec in pod_specs(chosen(nodes=2, backend=backend)).values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "runAsUser"} & set(security)


def test_only_failures_count_against_the_job_not_preemption() -> None:
    answers = chosen(nodes=8)
    job = documents(answers, JOB)["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # else the policy is refused
    assert tolerated(job, "train") == {"Ignore"}
    # A limit for all pods together would be used up by one failure on eight nodes.
    assert job["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in job

    made = jobset(documents(answers, TRAINJOB))["spec"]
    inner = made["replicatedJobs"][0]["template"]["spec"]
    assert inner["template"]["spec"]["restartPolicy"] == "Never"
    assert tolerated(inner, "node") == {"FailJob"}
    (rule,) = made["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"

    pytorchjob = documents(answers, PYTORCHJOB)["PyTorchJob"]["spec"]
    assert pytorchjob["runPolicy"]["backoffLimit"] >= 2 * 8
    for replica in pytorchjob["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] == "OnFailure"  # ExitCode takes 75 for the end


def tolerated(job: Document, container: str) -> set[str]:
    """What a Job does about a pod that was told to stop, or lost its node."""
    codes, conditions = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"containerName": container, "operator": "In", "values": [75]}
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    return {codes["action"], conditions["action"]}


@settings(max_examples=40)
@given(st.from_regex(questions._NAME, fullmatch=True))
def test_every_project_name_makes_valid_names(name: str) -> None:
    try:
        questions.check_name(name)
    except AnswerError:
        return
    answers = chosen(name=name, nodes=2, model="mlp")
    short = kubernetes_name(name)
    assert LABEL.fullmatch(short)
    assert len(short) <= 40
    last = questions.MAX_COUNT - 1
    # The longest that controllers make of it, with the five letters that they append to a pod's.
    for longest in (f"{short}-{last}", f"{short}-node-0-{last}-abcde", f"{short}-worker-{last}"):
        assert LABEL.fullmatch(longest)
    for path in FILES:
        for document in documents(answers, path).values():
            metadata = document["metadata"]
            assert LABEL.fullmatch(metadata["name"])
            assert metadata["name"].startswith(short)
            assert metadata["labels"]["app.kubernetes.io/name"] == short
            check(document)


def test_manifests_are_tidy() -> None:
    from yamllint import linter
    from yamllint.config import YamlLintConfig

    rules = (
        "comments: {min-spaces-from-content: 1}, document-start: disable, line-length: {max: 160}"
    )
    config = YamlLintConfig(f"extends: default\nrules: {{{rules}}}")
    for answers in TOPOLOGIES[::5]:
        for path in FILES:
            found = [str(problem) for problem in linter.run(texts(answers)[path], config)]
            assert not found, (path, answers, found)


def test_an_edited_manifest_follows_a_new_topology(tmp_path: Path) -> None:
    """What everybody edits lies apart from what the topology decides."""
    options = "--model mlp --nodes 2 --gpus-per-node 2 --launcher kubernetes"
    project = new(tmp_path, "demo", *options.split())
    for path, text in texts(chosen(model="mlp", nodes=2, gpus_per_node=2)).items():
        assert text == (project / path).read_text()
    for path in FILES:
        text = (project / path).read_text()
        text = text.replace("registry.example.com/demo:1", "ghcr.io/me/demo:7")
        text = text.replace("args: []", "args: [--train.lr=1e-4]")
        text = text.replace("  # storageClassName: of", "  storageClassName: nfs # of")
        (project / path).write_text(text)
    done = scaffold("regenerate", project, "--nodes", "4", "--gpus-per-node", "8")
    assert done.code == 0, done
    for path in FILES:
        text = (project / path).read_text()
        assert "image: ghcr.io/me/demo:7\n" in text
        assert "args: [--train.lr=1e-4]" in text
        assert "storageClassName: nfs" in text
    assert "parallelism: 4" in (project / JOB).read_text()
    assert "numNodes: 4" in (project / TRAINJOB).read_text()
    assert "replicas: 3" in (project / PYTORCHJOB).read_text()


# --- the image ------------------------------------------------------------------------------------


def test_the_dockerfile_passes_its_linter(tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or "hadolint"
    require(hadolint)
    for text, code in ((texts(chosen())["launch/Dockerfile"], 0), ("FROM debian\nRUN cd /\n", 1)):
        (tmp_path / "Dockerfile").write_text(text)
        done = subprocess.run(
            [hadolint, tmp_path / "Dockerfile"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr


def test_the_image_is_the_one_that_the_manifests_expect(project: Path) -> None:
    answers = chosen(nodes=2)
    dockerfile = texts(answers)["launch/Dockerfile"]
    (workdir,) = re.findall(r"^WORKDIR (.+)$", dockerfile, re.M)
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.M)  # by number: runAsNonRoot asks for it
    for spec in pod_specs(answers).values():
        assert str(spec["securityContext"]["runAsUser"]) == user
        assert str(spec["securityContext"]["fsGroup"]) == user
        paths = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
        assert f"{workdir}/runs" in paths
    assert dockerfile.index("pip install") < dockerfile.index("COPY --chown")

    # The line that lists the dependencies, run as it stands.
    (listing,) = re.findall(r"^RUN (python3 -c '.+') >", dockerfile, re.M)
    done = subprocess.run(
        ["bash", "-c", listing], cwd=project, env=container_path(), capture_output=True, text=True
    )
    needed = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    assert done.stdout.splitlines() == needed


# --- what the controllers make of a manifest ------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """A pod as its container sees it.

    Attributes:
        name: its host name.
        address: the name by which other pods reach it.
        argv: what the container runs, in the folder of the project.
        env: its variables.
    """

    name: str
    address: str
    argv: list[str]
    env: dict[str, str]


def container_path() -> dict[str, str]:
    """Where programs are found, this interpreter first: as in an image that has nothing else set."""
    return {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}


def pod(name: str, address: str, spec: Document, given: dict[str, str], labels: Document) -> Pod:
    """A pod whose controller sets the variables `given`."""
    (container,) = spec["containers"]
    env = container_path() | {"HOME": "/tmp", "HOSTNAME": name, "PYTHONUNBUFFERED": "1"}
    env |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            field = variable["valueFrom"]["fieldRef"]["fieldPath"]
            (label,) = re.fullmatch(r"metadata\.labels\['(.+)'\]", field).groups()  # type: ignore[union-attr]
            env[variable["name"]] = labels[label]
        else:
            env[variable["name"]] = variable["value"]
    return Pod(name, address, [*container["command"], *container["args"]], env | given)


def job_pods(objects: dict[str, Document], uid: str = "1c2d") -> list[Pod]:
    """Of an Indexed Job: the index in a variable, `<job>-<index>.<subdomain>` in the DNS."""
    name, spec = objects["Job"]["metadata"]["name"], objects["Job"]["spec"]
    labels = {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        **spec["template"]["metadata"]["labels"],
    }
    template = spec["template"]["spec"]
    return [
        pod(
            f"{name}-{i}",
            f"{name}-{i}.{template['subdomain']}",
            template,
            {"JOB_COMPLETION_INDEX": str(i)},
            labels,
        )
        for i in range(spec["completions"])
    ]


def jobset(objects: dict[str, Document]) -> Document:
    """The JobSet that Trainer makes of a TrainJob and its runtime."""
    runtime, job = objects["TrainingRuntime"], objects["TrainJob"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = spec["replicatedJobs"]
    # Trainer looks for these names, and sets nothing where it does not find them.
    assert replicated["name"] == "node"
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    inner = replicated["template"]["spec"]
    inner["completions"] = inner["parallelism"] = trainer["numNodes"]
    (container,) = inner["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container |= {key: trainer[key] for key in ("image", "command", "args")}
    container["resources"] = trainer["resourcesPerNode"]
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    container["env"] += [
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": index}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": spec,
    }


def trainjob_pods(objects: dict[str, Document], uid: str = "1c2d") -> list[Pod]:
    """Of a TrainJob: those of the one Job in its JobSet, whose service bears the JobSet's name."""
    made = jobset(objects)
    name, inner = made["metadata"]["name"], made["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec = copy.deepcopy(inner["template"]["spec"])
    env = spec["containers"][0]["env"]
    spec["containers"][0]["env"] = [v for v in env if v["name"] != "PET_NODE_RANK"]
    labels = {"jobset.sigs.k8s.io/jobset-uid": uid, "jobset.sigs.k8s.io/jobset-name": name}
    return [
        pod(
            f"{name}-node-0-{i}",
            f"{name}-node-0-{i}.{name}",
            spec,
            {"JOB_COMPLETION_INDEX": str(i), "PET_NODE_RANK": str(i)},
            labels,
        )
        for i in range(inner["completions"])
    ]


def pytorchjob_pods(objects: dict[str, Document]) -> list[Pod]:
    """Of a PyTorchJob: a service for each pod; WORLD_SIZE and RANK are not those of torch."""
    name, job = objects["PyTorchJob"]["metadata"]["name"], objects["PyTorchJob"]["spec"]
    replicas = job["pytorchReplicaSpecs"]
    ranks = int(job["nprocPerNode"])
    nodes = sum(replica["replicas"] for replica in replicas.values())
    assert replicas["Master"]["replicas"] == 1
    pods = []
    for role in replicas:
        for i in range(replicas[role]["replicas"]):
            own, node = f"{name}-{role.lower()}-{i}", i + (role == "Worker")
            given = {
                "MASTER_ADDR": f"{name}-master-0",
                "MASTER_PORT": "23456",
                "PET_MASTER_ADDR": f"{name}-master-0",
                "PET_MASTER_PORT": "23456",
                "WORLD_SIZE": str(nodes * ranks),
                "RANK": str(node),
                "PET_NODE_RANK": str(node),
                "PET_NPROC_PER_NODE": str(ranks),
                "PET_NNODES": str(nodes),
            }
            spec = replicas[role]["template"]["spec"]
            assert spec["containers"][0]["name"] == "pytorch"  # the operator looks for it
            pods.append(pod(own, own, spec, given, {}))
    return pods


def every_pod(answers: Answers) -> dict[str, list[Pod]]:
    """The pods of each manifest."""
    return {
        JOB: job_pods(documents(answers, JOB)),
        TRAINJOB: trainjob_pods(documents(answers, TRAINJOB)),
        PYTORCHJOB: pytorchjob_pods(documents(answers, PYTORCHJOB)),
    }


# --- pods that run --------------------------------------------------------------------------------

STEPS = 100
SMALL = (
    "--data.samples 600 --train.global_batch_size 32 --train.micro_batch_size 8 --data.workers 0 "
    f"--train.steps {STEPS} --train.warmup_steps 5 --train.log_every 1 --train.eval_every 0 "
    "--train.precision fp32 --checkpoint.every 20"
).split()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for two nodes of one CPU each."""
    options = "--model mlp --backend gloo --nodes 2 --gpus-per-node 1 --launcher kubernetes"
    return new(tmp_path_factory.mktemp("pods"), "My_Net", *options.split())


@pytest.fixture(scope="module")
def expected(project: Path) -> dict[int, float]:
    """The losses of one rank without any launcher."""
    done = launch(project / "train.py", "--run.name", "alone", *SMALL)
    assert done.code == 0, done
    return losses(project / "runs" / "alone")


class Cluster:
    """Pods on hosts of their own, all of them with the project as their image and the same volume."""

    def __init__(self, hosts: Hosts, project: Path, pods: list[Pod], run: str) -> None:
        self.hosts, self.project, self.pods = hosts, project, pods
        self.run = project / "runs" / run
        self.options = ["--run.name", run, *SMALL]
        self.logs = project / f"logs-{run}"
        self.logs.mkdir()
        for i, pod in enumerate(pods):
            assert hosts.run(i + 1, ["hostname", pod.name]).returncode == 0
        self.dns(True)

    def dns(self, known: bool) -> None:
        """Lets the pods find each other's names, or only their own host names."""
        for i, pod in enumerate(self.pods):
            own = f"127.0.0.1 localhost\n{self.hosts.address(i + 1)} {pod.name}\n"
            named = enumerate(self.pods)
            all_of_them = "".join(f"{self.hosts.address(j + 1)} {p.address}\n" for j, p in named)
            self.hosts.names(i + 1, own + all_of_them * known)

    def start(self, i: int, **env: str) -> subprocess.Popen[str]:
        """Starts the container of pod i; its command is process 1 there, as in a real one."""
        container = "unshare --pid --fork --mount-proc --kill-child".split()
        with self.log(i).open("a") as log:
            return self.hosts.start(
                i + 1,
                [*container, f"--wd={self.project}", *self.pods[i].argv, *self.options],
                env=self.pods[i].env | {"OMP_NUM_THREADS": "1"} | env,  # the cores are few here
                stdout=log,
            )

    def log(self, i: int) -> Path:
        return self.logs / f"{i}.txt"

    def main(self, process: subprocess.Popen[str]) -> int:
        """The container's process 1, as this machine numbers it: below nsenter and unshare."""
        assert eventually(lambda: len(descendants(process.pid)) >= 2, timeout=10)
        return descendants(process.pid)[1]

    def ends(self, *processes: subprocess.Popen[str], timeout: float = 120) -> list[int]:
        return [process.wait(timeout=timeout) for process in processes]

    def __repr__(self) -> str:
        return "\n".join(f"--- pod {i}\n{self.log(i).read_text()}" for i in range(len(self.pods)))


@pytest.fixture
def cluster(project: Path) -> Iterator[Callable[[list[Pod], str], Cluster]]:
    """Makes pods; they are gone after the test."""
    with contextlib.ExitStack() as stack:

        def make(pods: list[Pod], run: str) -> Cluster:
            return Cluster(stack.enter_context(Hosts(len(pods))), project, pods, run)

        yield make


Make = Callable[[list[Pod], str], Cluster]


@pytest.mark.slow
def test_a_job_waits_for_names_saves_on_sigterm_and_gives_the_losses_of_one_rank(
    project: Path, expected: dict[int, float], cluster: Make
) -> None:
    """Two pods whose names the DNS learns late; one is told to go; both come back."""
    pods = cluster(job_pods(objects_in((project / JOB).read_text())), "job")
    pods.dns(False)
    both = [pods.start(i) for i in (0, 1)]
    assert eventually(
        lambda: all(looks_up(p.pid, pods.pods[0].address) for p in both), timeout=60
    ), pods
    assert not eventually(lambda: any(p.poll() is not None for p in both), timeout=2)
    pods.dns(True)
    assert eventually(lambda: len(losses(pods.run)) >= 10), pods
    os.kill(pods.main(both[1]), signal.SIGTERM)
    assert pods.ends(*both) == [75, 75], pods
    assert 0 < checkpoints(pods.run)[-1] < STEPS

    both = [pods.start(i) for i in (1, 0)]
    assert pods.ends(*both) == [0, 0], pods
    assert losses(pods.run) == pytest.approx(expected, rel=1e-5)
    assert (pods.run / "export" / "model.safetensors").exists()


def looks_up(launch: int, name: str) -> bool:
    """Whether a launch has a process that was given this name, beside the ranks' own."""
    for child in descendants(launch):
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return True
    return False


@pytest.mark.slow
def test_a_killed_pod_ends_the_others_and_all_go_on_together(
    project: Path, expected: dict[int, float], cluster: Make
) -> None:
    """Pod 0, whose rank holds the lock of the run's folder; the other comes back first and waits."""
    pods = cluster(job_pods(objects_in((project / JOB).read_text())), "killed")
    both = [pods.start(i) for i in (0, 1)]
    assert eventually(lambda: len(checkpoints(pods.run)) > 0), pods
    os.kill(pods.main(both[0]), signal.SIGKILL)
    assert pods.ends(*both, timeout=60)[1] == 1, pods
    assert (pods.run / "lock").exists()

    later = pods.start(1)
    assert eventually(lambda: "waiting for node 0" in pods.log(1).read_text(), timeout=60), pods
    assert pods.ends(pods.start(0), later) == [0, 0], pods
    assert losses(pods.run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_name_that_never_appears_ends_the_pod_with_the_cause(
    project: Path, cluster: Make
) -> None:
    pods = cluster(job_pods(objects_in((project / JOB).read_text()))[:1], "nameless")
    pods.dns(False)
    assert pods.ends(pods.start(0, NODE_WAIT="1"), timeout=60) == [1]
    last = pods.log(0).read_text().splitlines()[-1]
    assert last.startswith(f"launch: MASTER_ADDR={pods.pods[0].address} cannot be resolved"), pods


@pytest.mark.slow
def test_a_trainjob_s_pods_train_with_the_losses_of_one_rank(
    project: Path, expected: dict[int, float], cluster: Make
) -> None:
    pods = cluster(trainjob_pods(objects_in((project / TRAINJOB).read_text())), "trainjob")
    assert pods.ends(pods.start(1), pods.start(0)) == [0, 0], pods
    assert losses(pods.run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_pytorchjob_s_ranks_are_not_its_pods(
    expected: dict[int, float], project: Path, cluster: Make
) -> None:
    """Two pods of two ranks: the operator sets WORLD_SIZE=4 in both, and a RANK that is the pod's."""
    answers = chosen(name="My_Net", model="mlp", backend="gloo", nodes=2, gpus_per_node=2)
    pods = cluster(pytorchjob_pods(documents(answers, PYTORCHJOB)), "pytorchjob")
    assert [(pod.env["RANK"], pod.env["WORLD_SIZE"]) for pod in pods.pods] == [
        ("0", "4"),
        ("1", "4"),
    ]
    assert pods.ends(pods.start(1), pods.start(0)) == [0, 0], pods
    assert "run by 4 data-parallel rank(s)" in pods.log(0).read_text()
    assert losses(pods.run) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_job_of_one_node_trains_all_its_ranks(
    project: Path, expected: dict[int, float], cluster: Make
) -> None:
    answers = chosen(name="My_Net", model="mlp", backend="gloo", nodes=1, gpus_per_node=2)
    pods = cluster(job_pods(documents(answers, JOB)), "single")
    assert pods.ends(pods.start(0)) == [0], pods
    assert "2 rank(s) here, backend gloo" in pods.log(0).read_text()
    assert losses(pods.run) == pytest.approx(expected, rel=1e-5)
