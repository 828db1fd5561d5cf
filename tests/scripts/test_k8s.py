"""The job for Kubernetes against the rules of Kubeflow's PyTorchJob, and what its pods run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import Checkout, commands

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = yaml.safe_load((ROOT / "scripts/k8s/pretrain.yaml").read_text(encoding="utf-8"))
PROCESSES = ROOT / "scripts/k8s/processes.sh"
POD = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "2"}


def quantity(value: Any) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?([KMGTPE]i?|m|k)?", str(value)) is not None


# Of kubeflow.org/v1's PyTorchJob and the pod in it, the fields that the manifest has use for, as in the definition that
# the operator publishes: a type, a check, a list of one form, or fields; "*" stands for any name.
SCHEMA = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": lambda v: v in ("All", "Running", "None")},
        "pytorchReplicaSpecs": {
            "*": {
                "replicas": int,
                "restartPolicy": lambda v: v in ("Always", "OnFailure", "Never", "ExitCode"),
                "template": {
                    "spec": {
                        "terminationGracePeriodSeconds": int,
                        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
                        "containers": [
                            {
                                "name": str,
                                "image": str,
                                "command": [str],
                                "args": [str],
                                "env": [{"name": str, "value": str}],
                                "resources": {"limits": {"*": quantity}},
                                "volumeMounts": [{"name": str, "mountPath": str}],
                            }
                        ],
                        "volumes": [
                            {
                                "name": str,
                                "persistentVolumeClaim": {"claimName": str},
                                "emptyDir": {"medium": str, "sizeLimit": quantity},
                            }
                        ],
                    }
                },
            }
        },
    },
}


def faults(value: Any, form: Any, where: str = "") -> list[str]:
    """Where `value` is not of the form."""
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [fault for i, item in enumerate(value) for fault in faults(item, form[0], f"{where}[{i}]")]
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return [f"{where}: has no fields"]
        found = [f"{where}.{name}: unknown" for name in value if name not in form and "*" not in form]
        for name in value.keys() & form.keys() if "*" not in form else value:
            found += faults(value[name], form.get(name, form.get("*")), f"{where}.{name}")
        return found
    fits = type(value) is form if isinstance(form, type) else form(value)
    return [] if fits else [f"{where}: {value!r}"]


def test_the_job_has_the_fields_of_its_kind() -> None:
    assert faults(MANIFEST, SCHEMA) == []
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert faults({"spec": {"nprocPerNode": 8, "runpolicy": {}}}, SCHEMA) == [
        ".spec.runpolicy: unknown",
        ".spec.nprocPerNode: 8",
    ]


def test_the_job_keeps_the_rules_that_the_operator_checks() -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", MANIFEST["metadata"]["name"])
    replicas = MANIFEST["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1 and replicas["Worker"]["replicas"] >= 1
    for spec in replicas.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"]
        # Its processes are one per GPU, its statuses those of the program, and nothing runs as root.
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(MANIFEST["spec"]["nprocPerNode"])
        assert spec["restartPolicy"] == "ExitCode" and pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}
        assert pod["terminationGracePeriodSeconds"] > 60


def test_a_pod_runs_a_script_that_is_there(checkout: Checkout) -> None:
    (container,) = MANIFEST["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    bash, script = container["command"]
    assert bash == "bash" and (ROOT / script).is_file()
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    done = checkout.run(Path(script).name, *container["args"], **env | POD | {"STATUS": "200"})
    launched, *_ = commands(done)
    assert launched[:3] == ["bash", "scripts/k8s/processes.sh", "python3"]
    assert launched[-2:] == container["args"] and done.returncode == 200


def run(*command: str, **environment: str) -> subprocess.Popen[str]:
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = ["bash", str(PROCESSES), *command]
    return subprocess.Popen(words, env=os.environ | POD | environment, text=True, **pipe)


def test_processes_know_their_place() -> None:
    process = run("bash", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"')
    assert sorted(process.communicate()[0].splitlines()) == ["4 0 6", "5 1 6"]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("statuses", "status"), [("0 0", 0), ("200 1", 1), ("2 200", 2), ("0 137", 137), ("143 0", 143)]
)
def test_the_status_is_that_of_the_gravest_fault(statuses: str, status: int) -> None:
    process = run("bash", "-c", "statuses=($STATUSES); exit ${statuses[LOCAL_RANK]}", STATUSES=statuses)
    assert process.wait() == status


def test_sigterm_is_passed_on_and_waited_for() -> None:
    saving = "trap 'sleep 0.2; echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    process = run("bash", "-c", saving)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "saved\nsaved\n"
    assert process.returncode == 143


def test_outside_a_pod_it_says_so() -> None:
    process = run("true", PET_NPROC_PER_NODE="auto")
    assert process.communicate()[1].startswith("error: PET_NPROC_PER_NODE is 'auto', not a number")
    assert process.returncode == 2
