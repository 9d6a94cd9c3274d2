"""The Kubernetes manifests, by their schema and by the Restricted pod security standard (R1)."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from service.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = DEPLOY / "kubernetes" / "attention-service.yaml"


def manifests(text: str | None = None) -> dict[str, dict]:
    read = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8") if text is None else text)
    return {one["kind"]: one for one in read}


@pytest.fixture(scope="module")
def on_a_gpu() -> dict[str, dict]:
    """The manifests with the overlay, by the program that applies them."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    command = [program, "kustomize", str(DEPLOY / "kubernetes-gpu")]
    return manifests(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_r1_the_manifests_are_valid_strictly():
    for one in manifests().values():
        kubernetes_validate.validate(one, "1.37", strict=True)


def test_r1_the_overlay_for_a_gpu_is_valid_strictly_and_restricted(on_a_gpu):
    assert on_a_gpu.keys() == manifests().keys()
    for one in on_a_gpu.values():
        kubernetes_validate.validate(one, "1.37", strict=True)
    assert violations(on_a_gpu["Deployment"]["spec"]["template"]["spec"]) == set()


def test_the_overlay_names_device_and_memory_and_keeps_the_rest(on_a_gpu):
    (plain,), (container,) = (
        one["Deployment"]["spec"]["template"]["spec"]["containers"] for one in (manifests(), on_a_gpu)
    )
    told = {entry["name"]: entry["value"] for entry in container["env"]}
    assert told == {"ATTENTION_DRAIN_DELAY_S": "5", "ATTENTION_DEVICE": "cuda", "ATTENTION_WORKERS": "1"}
    assert container["image"] == f"{plain['image']}-cuda"
    resources = container["resources"]
    assert resources["limits"] == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 1}
    assert resources["requests"]["nvidia.com/gpu"] == 1
    changed = {"env", "image", "resources", "startupProbe"}
    assert {key: value for key, value in container.items() if key not in changed} == {
        key: value for key, value in plain.items() if key not in changed
    }
    assert container["startupProbe"]["httpGet"] == plain["startupProbe"]["httpGet"]


def violations(pod: dict) -> set[str]:
    """What the Restricted pod security standard would refuse, by its own names of the controls."""
    found = set()
    shared = pod.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        found |= {"Host Namespaces"} if pod.get(name) else set()
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found |= {"Volume Types"} if any(set(volume) - {"name"} - allowed for volume in pod.get("volumes", ())) else set()
    found |= {"Sysctls"} if shared.get("sysctls") else set()
    for container in (*pod["containers"], *pod.get("initContainers", ()), *pod.get("ephemeralContainers", ())):
        found |= _violations_of(container, {**shared, **container.get("securityContext", {})})
    return found


def _violations_of(container: dict, context: dict) -> set[str]:
    checks = {
        "Privileged Containers": not context.get("privileged"),
        "Capabilities": context.get("capabilities", {}).get("drop") == ["ALL"]
        and set(context.get("capabilities", {}).get("add", ())) <= {"NET_BIND_SERVICE"},
        "Host Ports": not any(port.get("hostPort") for port in container.get("ports", ())),
        "/proc Mount Type": context.get("procMount", "Default") == "Default",
        "Seccomp": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
        "Privilege Escalation": context.get("allowPrivilegeEscalation") is False,
        "Running as Non-root": context.get("runAsNonRoot") is True,
        "Running as Non-root user": context.get("runAsUser") != 0,
    }
    return {name for name, is_kept in checks.items() if not is_kept}


def test_r1_a_restricted_namespace_accepts_the_pod():
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    assert violations(pod) == set()
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("changes", "control"),
    [
        ({"capabilities": {"drop": ["NET_RAW"]}}, "Capabilities"),
        ({"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}, "Capabilities"),
        ({"allowPrivilegeEscalation": True}, "Privilege Escalation"),
        ({"runAsNonRoot": False}, "Running as Non-root"),
        ({"runAsUser": 0}, "Running as Non-root user"),
        ({"seccompProfile": {"type": "Unconfined"}}, "Seccomp"),
        ({"privileged": True}, "Privileged Containers"),
    ],
)
def test_the_check_of_the_standard_detects_violations(changes, control):
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"] |= changes
    assert violations(pod) == {control}


def test_the_termination_of_the_pod_matches_the_drain_of_the_service():
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    told = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert told == {"ATTENTION_DRAIN_DELAY_S": "5"}
    assert pod["terminationGracePeriodSeconds"] > 5 + Settings.model_fields["shutdown_grace_s"].default
    probes = {
        name: pod["containers"][0][name]["httpGet"]["path"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert probes == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
