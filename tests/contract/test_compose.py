"""docker-compose.yml and what is laid over it, read by the program that runs them and by the specification of today.

R1: every service without a writable root and without a capability; R3: within a limit of processes.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

from service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = ("docker-compose.yml", "deploy/compose.keys.yml")
PROFILES = ("observability", "loadtest", "gpu", "replicas")
PORTS = {"attention", "attention-gpu", "balancer", "prometheus", "grafana", "locust"}


@pytest.fixture(scope="module")
def composed(tmp_path_factory) -> dict:
    """The services of both compose files, all profiles on, variables filled in, by the program that runs them."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    keys = tmp_path_factory.mktemp("keys")
    files = [word for name in COMPOSE for word in ("--file", name)]
    told = subprocess.run(
        [program, *files, *(word for name in PROFILES for word in ("--profile", name)), "config"],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "KEYS": str(keys)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    PyCompose.from_yaml(told.stdout).validate()  # raises; the specification has grown since that program was written
    read = yaml.safe_load(told.stdout)
    services: dict = read["services"]
    return services


def test_the_compose_files_parse_and_match_the_specification(composed):
    assert composed.keys() == PORTS | {"replica", "locust-worker"}
    assert {name: service.get("profiles") for name, service in composed.items()} == {
        "attention": None, "attention-gpu": ["gpu"], "prometheus": ["observability"], "grafana": ["observability"],
        "locust": ["loadtest"], "locust-worker": ["loadtest"], "replica": ["replicas"], "balancer": ["replicas"],
    }  # fmt: skip


def test_r1_every_service_has_a_read_only_root_no_capability_and_no_way_to_get_one(composed):
    for name, service in composed.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name
        assert str(service.get("user", "10001")).split(":")[0] != "0", name


def test_r3_every_service_has_limits_of_memory_and_of_processes(composed):
    for name, service in composed.items():
        assert service["mem_limit"], name
        assert service["pids_limit"] <= 512, name
    assert composed["attention"]["pids_limit"] == 128


def test_the_gpu_profile_names_its_device_and_memory_and_does_not_fall_back_to_the_cpu(composed):
    service = composed["attention-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", ["0"], ["gpu"])
    assert service["environment"].items() >= {"ATTENTION_DEVICE": "cuda", "ATTENTION_WORKERS": "1"}.items()
    assert service["environment"].keys() > composed["attention"]["environment"].keys()
    assert service["mem_limit"] != composed["attention"]["mem_limit"]
    assert service["build"]["args"].items() >= {"LOCK": "requirements.cuda.lock", "EXTRA_INDEX_URL": ""}.items()


def test_without_a_directory_the_layers_are_those_of_the_image(composed):
    """A new volume gets what the image has at its path; a directory of the host would hide it."""
    for name in ("attention", "attention-gpu", "replica"):
        assert "layers:/layers:ro" in composed[name]["volumes"]


def test_what_the_lock_is_made_for_runs_on_that_platform(composed):
    """torch has one hash in requirements.lock."""
    platforms = {name: service.get("platform") for name, service in composed.items() if "platform" in service}
    assert platforms == dict.fromkeys(("attention", "attention-gpu", "replica"), "linux/amd64")


def test_cores_and_memory_are_set_together_and_fit_the_workers(composed):
    service = composed["attention"]
    assert float(service["cpus"]) * 2**30 <= memory(service["mem_limit"])
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert text.index("CPUS=4 MEMORY=4g") < text.index("services:")


def memory(limit: str | int) -> int:
    """The bytes of a limit as docker-compose writes it: `2g` or 2147483648."""
    number, unit = re.fullmatch(r"(\d+)([gm]?)b?", str(limit)).groups()  # type: ignore[union-attr]
    return int(number) * {"g": 2**30, "m": 2**20, "": 1}[unit]


def test_every_published_port_is_on_loopback(composed):
    assert {name for name, service in composed.items() if "ports" in service} == PORTS
    for name in PORTS:
        assert all(port.startswith("127.0.0.1:") for port in composed[name]["ports"]), name


def test_every_third_party_image_has_a_tag_and_can_be_pinned_by_digest(composed):
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert ":latest" not in text
    for name in ("PROMETHEUS_IMAGE", "GRAFANA_IMAGE", "LOCUST_IMAGE", "HAPROXY_IMAGE", "IMAGE", "GPU_IMAGE", "BASE"):
        assert f"${{{name}:-" in text
    for name, service in composed.items():
        assert re.fullmatch(r"[a-z./-]+:v?\d+\.\d+\.\d+(-cuda|-alpine)?", service["image"]), name


def test_every_server_has_a_health_check_that_needs_no_shell(composed):
    own = {name: service["healthcheck"]["test"] for name, service in composed.items() if "healthcheck" in service}
    assert own.keys() == {"prometheus", "grafana", "locust", "balancer"}, (
        "the service's is in its image; a Locust worker serves no requests"
    )
    assert {test[0] for test in own.values()} == {"CMD"}


def test_the_grace_period_of_the_container_exceeds_the_grace_of_the_service(composed):
    assert composed["attention"]["stop_grace_period"] == "40s"
    assert Settings.model_fields["shutdown_grace_s"].default < 40


def test_the_replicas_behind_the_balancer_are_the_service_and_have_time_to_be_left_out(composed):
    one, service = composed["replica"], composed["attention"]
    differing = {"profiles", "environment", "scale", "deploy", "ports", "build"}
    assert {k: v for k, v in one.items() if k not in differing} == {
        k: v for k, v in service.items() if k not in differing
    }
    assert 2 < float(one["environment"]["ATTENTION_DRAIN_DELAY_S"]) <= 8
    assert composed["balancer"]["environment"]["REPLICAS"] == "3"
    assert composed["balancer"]["environment"]["REPLICAS_DNS"] == "replica:8000"
    assert "ports" not in one


def test_every_mounted_path_of_the_repository_exists(composed):
    for service in composed.values():
        for volume in service.get("volumes", ()):
            source = Path(volume.split(":")[0])
            assert not source.is_relative_to(ROOT / "deploy") or source.exists(), volume
