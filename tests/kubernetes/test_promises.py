"""What the manifests promise holds in the service, its settings, its metrics and its documents."""

import re
import shutil
import subprocess

import pytest
import yaml

from service import __version__
from service.api.auth.access import METRICS, OPEN
from service.settings import Settings
from service.supervisor.supervisor import FORCE_S
from tests.doubles import lone_metrics
from tests.kubernetes.manifests import COMBINATIONS, COMPONENTS, ON_BASE, ROOT, one, pods, render

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CONTAINER = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")
SERVING = [names for names in COMBINATIONS if len(names) == 1 and names[0] in {*ON_BASE, "kserve"}]
MARGIN_S = 5


def serving(*names: str) -> tuple[dict, dict]:
    """The container of the service, and its pod."""
    ((pod, container),) = (
        (pod, container)
        for pod in pods(render(*names))
        for container in pod["containers"]
        if container["image"].startswith("attention-service:")
    )
    return container, pod


def told(container: dict) -> dict[str, str]:
    return {entry["name"].removeprefix("ATTENTION_").lower(): entry["value"] for entry in container["env"]}


def settings(container: dict) -> Settings:
    return Settings(**told(container))  # type: ignore[arg-type]


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


@pytest.mark.parametrize("names", SERVING, ids="+".join)
def test_image_settings_and_probes_are_those_of_the_service(names):
    container, pod = serving(*names)
    assert container["image"] == f"attention-service:{__version__}{'-cuda' * (names == ('gpu',))}"
    (port,) = container["ports"]
    assert settings(container).port == port["containerPort"], "an unknown setting or a value that it does not take"
    asked = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(each["path"] in OPEN and each["port"] in (port["name"], port["containerPort"]) for each in asked)
    # A pod that waits for its layers is kept: the kubelet restarts one whose startup or liveness probe fails.
    assert ["ready" in each["path"] for each in asked] == [False, True, False]
    assert pod.get("enableServiceLinks") is False or "port" in told(container)


@pytest.mark.parametrize("names", SERVING, ids="+".join)
def test_the_grace_period_is_the_drain_delay_the_grace_and_a_margin(names):
    container, pod = serving(*names)
    drain_s = settings(container).drain_delay_s
    # KServe has the period in the InferenceService and the variables in the runtime.
    owner = one(render(*names), "InferenceService")["spec"]["predictor"] if names == ("kserve",) else pod
    assert owner["terminationGracePeriodSeconds"] == drain_s + settings(container).shutdown_grace_s + MARGIN_S
    assert drain_s > 0
    assert FORCE_S < MARGIN_S
    assert "lifecycle" not in container


@pytest.mark.parametrize("names", SERVING, ids="+".join)
def test_memory_is_requested_as_measured_and_limited_by_the_number_of_workers(names):
    idle, model = re.findall(r"about (\d+) MB a process when idle, about (\d+) MB more", CONTAINER)[0]
    container, pod = serving(*names)
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    workers = settings(container).workers or int(limits["cpu"])
    in_memory = sum(mebibytes(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if "emptyDir" in volume)
    assert requests["cpu"] == limits["cpu"]
    assert mebibytes(requests["memory"]) * 1.05 >= workers * (int(idle) + int(model))
    assert mebibytes(limits["memory"]) >= workers * 1024 >= workers * (int(idle) + int(model)) + in_memory


@pytest.mark.parametrize("overlay", ON_BASE)
def test_everything_selects_the_pods_and_a_port_that_they_have(overlay):
    deployment, service, budget, policy = (
        one(render(overlay), kind)["spec"] for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
    )
    policies = [each["spec"] for each in render(overlay) if each["kind"] == "NetworkPolicy"]
    labels = deployment["template"]["metadata"]["labels"]
    container, pod = serving(overlay)
    spread = [each["labelSelector"] for each in pod["topologySpreadConstraints"]]
    selectors = [deployment["selector"], budget["selector"], *(each["podSelector"] for each in policies), *spread]
    assert all(each == {"matchLabels": labels} for each in (*selectors, {"matchLabels": service["selector"]}))
    ports = {port["port"] for each in policies for rule in each["ingress"] for port in rule["ports"]}
    assert ports == {service["ports"][0]["targetPort"]} == {container["ports"][0]["name"]}
    assert (policy["policyTypes"], policy.get("egress")) == (["Ingress", "Egress"], None)
    assert one(render(overlay), "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("layers-")])
def test_layers_are_mounted_where_the_image_looks_for_them(name):
    container, pod = serving("cpu", name)
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "layers")
    assert f"ATTENTION_LAYERS_DIR={mount['mountPath']} " in DOCKERFILE
    assert mount.get("readOnly", False) is (name != "layers-source"), "what is fetched is kept in /layers"
    assert "layers" in [volume["name"] for volume in pod["volumes"]]
    assert told(container).get("layers_source") in (None, *(each["mountPath"] for each in container["volumeMounts"]))
    claimed = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    claims = [each["metadata"]["name"] for each in render("cpu", name) if each["kind"] == "PersistentVolumeClaim"]
    assert claimed == claims
    for init in pod.get("initContainers", ()):
        assert init["command"][-1] == f"{init['volumeMounts'][0]['mountPath']}/"


def test_the_load_test_may_reach_the_service_and_its_workers_find_the_master():
    resources, service = render("loadtest"), one(render("cpu"), "Service")
    (admitted,) = one(render("cpu"), "NetworkPolicy")["spec"]["ingress"][0]["from"]
    jobs = {each["metadata"]["name"]: each["spec"] for each in resources if each["kind"] == "Job"}
    (front,) = (each for each in resources if each["kind"] == "Service")
    master, workers = jobs["attention-loadtest"], jobs["attention-loadtest-workers"]
    sends, judges = (job["template"]["spec"]["containers"][0] for job in (workers, master))
    known = (ROOT / "loadtest/attention_load/options.py").read_text(encoding="utf-8")
    assert all(f'("{each["name"].removeprefix("LOADTEST_").lower()}", ' in known for each in judges["env"])
    for job in jobs.values():
        assert admitted["podSelector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
    assert front["spec"]["selector"].items() <= master["template"]["metadata"]["labels"].items()
    assert not front["spec"]["selector"].items() <= workers["template"]["metadata"]["labels"].items()
    assert after("--master-host", sends) == front["metadata"]["name"]
    assert after("--host", judges) == f"http://{service['metadata']['name']}"
    assert service["spec"]["ports"][0]["port"] == 80
    assert after("--expect-workers", judges) == str(workers["completions"]) == str(workers["parallelism"])


def after(option: str, container: dict) -> str:
    arguments: list[str] = container["args"]
    return arguments[arguments.index(option) + 1]


def test_the_overlay_for_a_gpu_names_device_and_memory_and_keeps_the_rest():
    (plain, plain_pod), (container, pod) = serving("cpu"), serving("gpu")
    assert told(container) == told(plain) | {"device": "cuda", "workers": "1"}
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 1}
    assert container["resources"]["requests"]["nvidia.com/gpu"] == 1
    changed = {key: container[key] for key in ("env", "image", "resources")}
    probe = plain["startupProbe"] | {"failureThreshold": 150}
    assert container == plain | changed | {"startupProbe": probe}
    assert pod == plain_pod | {"containers": [container], "tolerations": pod["tolerations"]}


@pytest.mark.parametrize(("overlay", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_an_autoscaler_owns_the_number_of_replicas(overlay, kind):
    spec = one(render(overlay), kind)["spec"]
    assert "replicas" not in one(render(overlay), "Deployment")["spec"]
    assert spec["scaleTargetRef"]["name"] == "attention"
    assert spec.get("minReplicas", spec.get("minReplicaCount")) == one(render("cpu"), "Deployment")["spec"]["replicas"]


def test_prometheus_scrapes_the_service_as_the_job_of_the_rules():
    service, monitor = one(render("keda"), "Service"), one(render("keda"), "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert (endpoint["path"], endpoint["port"]) == (METRICS, service["spec"]["ports"][0]["name"])
    rules = (ROOT / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8")
    assert f'job="{service["metadata"]["name"]}"' in rules


def triggers() -> list[dict]:
    return [trigger["metadata"] for trigger in one(render("keda"), "ScaledObject")["spec"]["triggers"]]


def test_the_triggers_read_series_that_exist_and_no_sample_is_an_error():
    known = lone_metrics()._registry._names_to_collectors.keys()
    for trigger in triggers():
        assert set(re.findall(r"attention_\w+", trigger["query"])) <= known
        assert trigger["ignoreNullValues"] == "false"


@pytest.mark.parametrize(
    ("replicas", "wanted"),  # compute seconds a second, processes, sustained overload; replicas that each trigger wants
    [
        pytest.param([(0.0, 2, 0)] * 2, (0, 0), id="idle"),
        pytest.param([(0.8, 2, 0)] * 3, (3, 0), id="at-the-aim"),
        pytest.param([(1.2, 2, 0)] * 2, (3, 0), id="busy-with-short-requests"),
        pytest.param([(1.9, 2, 1)] * 2, (4.75, 3), id="overloaded"),
        pytest.param([(0.2, 2, 1)] * 4, (1, 6), id="refusing-though-hardly-busy"),
        pytest.param([(0.4, 2, 0), (0.4, 2, 0), (2.0, 2, 1)], (3.5, 0), id="one-slow-replica"),
        pytest.param([(0.4, 1, 0), (0.8, 2, 0)], (2, 0), id="unequal-replicas"),
    ],
)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_the_triggers_want_as_many_replicas_as_the_load_needs(tmp_path, replicas, wanted):
    series = [
        {"series": f'attention_{name}{{job="attention", instance="{index}"}}', "values": f"{values}x40"}
        for index, (busy, processes, overload) in enumerate(replicas)
        for name, values in (
            ("compute_busy_seconds_total", f"0+{busy * 15}"),
            ("expected_processes", processes),
            ("queue_standing", overload),
        )
    ]
    checks = [
        {
            "expr": f"round(({trigger['query']}) / {trigger['threshold']}, 0.01)",
            "eval_time": "8m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for trigger, value in zip(triggers(), wanted, strict=True)
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": checks}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    command = ["promtool", "test", "rules", tmp_path / "test.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kserve_finds_the_container_the_protocol_and_the_layers():
    runtime, predictor = one(render("kserve"), "ServingRuntime"), one(render("kserve"), "InferenceService")["spec"]
    model = predictor["predictor"]["model"]
    container, _ = serving("kserve")
    assert (container["name"], told(container)["layers_dir"]) == ("kserve-container", "/mnt/models")
    assert model["runtime"] == runtime["metadata"]["name"]
    assert runtime["spec"]["protocolVersions"] == [model["protocolVersion"]] == ["v2"]
    assert runtime["spec"]["supportedModelFormats"] == [model["modelFormat"] | {"autoSelect": True}]
    (port,) = container["ports"]
    assert (
        runtime["spec"]["annotations"]["prometheus.kserve.io/port"]
        == told(container)["port"]
        == str(port["containerPort"])
    )


def test_pods_of_kserve_are_not_selected_by_the_base():
    labels = one(render("kserve"), "InferenceService")["metadata"].get("labels", {})  # KServe copies them to its pods
    assert not one(render("cpu"), "Service")["spec"]["selector"].items() <= labels.items()
