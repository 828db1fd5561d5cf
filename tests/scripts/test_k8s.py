"""The Kubernetes job against the schema of Kubeflow's PyTorchJob, and the processes in its pods."""

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


# The fields of kubeflow.org/v1's PyTorchJob and its pod that the manifest uses, from the operator's published
# definition: a type, a check, a list with one schema, or fields; "*" stands for any name.
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
                                "securityContext": {"capabilities": {"add": [str]}},
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


def faults(value: Any, schema: Any, where: str = "") -> list[str]:
    """Return the paths at which `value` does not match the schema."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [fault for i, item in enumerate(value) for fault in faults(item, schema[0], f"{where}[{i}]")]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: has no fields"]
        found = [f"{where}.{name}: unknown" for name in value if name not in schema and "*" not in schema]
        for name in value.keys() & schema.keys() if "*" not in schema else value:
            found += faults(value[name], schema.get(name, schema.get("*")), f"{where}.{name}")
        return found
    fits = type(value) is schema if isinstance(schema, type) else schema(value)
    return [] if fits else [f"{where}: {value!r}"]


def test_the_job_matches_the_schema() -> None:
    assert faults(MANIFEST, SCHEMA) == []
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert faults({"spec": {"nprocPerNode": 8, "runpolicy": {}}}, SCHEMA) == [
        ".spec.runpolicy: unknown",
        ".spec.nprocPerNode: 8",
    ]


def test_the_job_passes_the_operators_checks() -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", MANIFEST["metadata"]["name"])
    replicas = MANIFEST["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1 and replicas["Worker"]["replicas"] >= 1
    for spec in replicas.values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"]
        # One process per GPU, restart decided by the program's exit code, and no root.
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(MANIFEST["spec"]["nprocPerNode"])
        assert spec["restartPolicy"] == "ExitCode" and pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}
        assert pod["terminationGracePeriodSeconds"] > 60


def test_a_pod_runs_an_existing_script(checkout: Checkout) -> None:
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


def test_processes_get_their_ranks() -> None:
    process = run("bash", "-c", 'echo "$RANK $LOCAL_RANK $WORLD_SIZE"')
    assert sorted(process.communicate()[0].splitlines()) == ["4 0 6", "5 1 6"]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("statuses", "status"), [("0 0", 0), ("200 1", 1), ("2 200", 2), ("0 137", 137), ("143 0", 143)]
)
def test_the_exit_status_is_the_most_severe(statuses: str, status: int) -> None:
    process = run("bash", "-c", "statuses=($STATUSES); exit ${statuses[LOCAL_RANK]}", STATUSES=statuses)
    assert process.wait() == status


def test_sigterm_is_forwarded_and_awaited() -> None:
    saving = "trap 'sleep 0.2; echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    process = run("bash", "-c", saving)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "saved\nsaved\n"
    assert process.returncode == 143


def test_outside_a_pod_is_an_error() -> None:
    process = run("true", PET_NPROC_PER_NODE="auto")
    assert process.communicate()[1].startswith("error: PET_NPROC_PER_NODE is 'auto', not a number")
    assert process.returncode == 2
