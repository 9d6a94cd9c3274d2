"""Every overlay with every component is valid, strictly, and within the Restricted pod security standard (R1)."""

import copy

import jsonschema
import kubernetes_validate
import pytest

from tests.kubernetes.manifests import COMBINATIONS, one, pods, render, validate

VOLUMES = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_r1_every_combination_is_valid_strictly_and_restricted(names):
    for resource in render(*names):
        validate(resource)
    for pod in pods(render(*names)):
        assert violations(pod) == set()


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value"),
    [
        ("cpu", "Deployment", "spec.template.spec.containers.0.readinessProb", {}),
        ("cpu", "NetworkPolicy", "spec.podSelectr", {}),
        ("cpu", "PodDisruptionBudget", "spec.unhealthyPodEvictionPolicy", 1),
        ("hpa", "HorizontalPodAutoscaler", "spec.metrics.0.resource.target.averageUtilisation", 70),
        ("keda", "ScaledObject", "spec.minReplicas", 2),
        ("keda", "ScaledObject", "spec.triggers.0.metadata.threshold", 0.4),
        ("keda", "ServiceMonitor", "spec.endpoints.0.scrapeTimeOut", "5s"),
        ("kserve", "ServingRuntime", "spec.protocolVersions", "v2"),
        ("kserve", "ServingRuntime", "spec.containers.0.ports.0.port", 8080),
        ("kserve", "InferenceService", "spec.predictor.model.storageURI", "pvc://x"),
        ("kserve", "InferenceService", "spec.predictor.enableServiceLink", False),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_is_detected(overlay, kind, path, value):
    resource = copy.deepcopy(one(render(overlay), kind))
    *way, last = path.split(".")
    place: object = resource
    for step in way:
        place = place[int(step) if step.isdigit() else step]  # type: ignore[index]
    place[last] = value  # type: ignore[index]
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(resource)


def violations(pod: dict) -> set[str]:
    """What the Restricted pod security standard would refuse, by its own names of the controls, and a writable root."""
    shared = pod.get("securityContext", {})
    checks = {
        "Host Namespaces": not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
        "Volume Types": all(set(volume) <= {"name", *VOLUMES} for volume in pod.get("volumes", ())),
        "Sysctls": not shared.get("sysctls"),
    }
    found = {name for name, is_kept in checks.items() if not is_kept}
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
        "writable root": context.get("readOnlyRootFilesystem") is True,
    }
    return {name for name, is_kept in checks.items() if not is_kept}


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
        ({"readOnlyRootFilesystem": False}, "writable root"),
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_the_check_of_the_standard_detects_violations(kind, changes, control):
    (pod,) = copy.deepcopy(pods(render("cpu", "layers-init")))
    pod[kind][0]["securityContext"] |= changes
    assert violations(pod) == {control}
