"""The image as it is shipped: a real engine starts it, it serves requests, and it stops. `make image-test` runs this.

R1: another user than root, a read-only root, no capability, no way to get one, the engine's default seccomp filter.
"""

import contextlib
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from attention_client import Client
from tests.e2e.namespace import inner_pid, num_threads, status
from tests.e2e.started import Started
from tests.image.container import ENGINE, IMAGE, Container, engine
from tests.processes import eventually

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / ".layers"
UID = 10001

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def start():
    started: list[Container] = []

    def begin(*options, **settings) -> Container:
        started.append(Container(LAYERS, *options, **settings))
        return started[-1]

    yield begin
    for container in started:
        container.remove()


@pytest.fixture(scope="module")
def container(start):
    """A ready container that several tests share."""
    container = start()
    container.wait_healthy()
    return container


def question() -> dict:
    query = np.random.default_rng(7).standard_normal((3, 24, 384)).astype(np.float32)
    return {
        "query": query.tolist(),
        "masks": [{"kind": "causal"}],
        "weights": {"form": "heads"},
        "encoding": "base64",
    }


def test_r1_it_serves_as_an_unknown_user_on_a_read_only_root(container):
    for pid in container.pids():
        fields = status(pid)
        assert fields["Uid"].split() == [str(UID)] * 4
        assert fields["Gid"].split() == [str(UID)] * 4
        assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2", "a filter"
        mounts = [line.split() for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()]
        options = {mount[1]: mount[3].split(",") for mount in mounts}
        assert "ro" in options["/"]
        assert "ro" in options["/layers"]
    assert httpx2.get(f"{container.url}/readyz").json() == {"status": "ready"}


def test_the_answers_have_the_bits_of_the_same_layer_here(container):
    here = Started(LAYERS, workers=1)
    try:
        here.wait_ready()
        for layer in ("minilm-l0", "minilm-l3"):
            answers = []
            for url in (here.url, container.url):
                with Client(url) as client:
                    answers.append(client.attend_json(layer, question()))
            for name in ("output", "weights"):
                assert answers[0][name] == answers[1][name]
    finally:
        here.process.kill()
        here.process.communicate()


@pytest.mark.parametrize("volume", [None, "attention-layers-of-a-test"])
def test_without_layers_of_the_host_it_serves_those_of_the_image(container, volume):
    """As compose starts it, in a volume that is new."""
    fresh = Container(volume)
    try:
        fresh.wait_healthy()
        found, expected = (
            {one["name"]: one["digest"] for one in httpx2.get(f"{url}/v1/layers").json()["layers"]}
            for url in (fresh.url, container.url)
        )
        assert found == expected
        assert len(found) == 6
    finally:
        fresh.remove()
        if volume is not None:
            engine("volume", "rm", volume)


def test_l12_the_service_is_process_1_and_only_its_processes_exist(container):
    inside = {inner_pid(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] for pid in container.pids()}
    assert inside[1][:3] == ["/opt/attention/bin/python", "-m", "service.supervisor.supervisor"], (
        "serve has exchanged its program"
    )
    workers = [words for number, words in inside.items() if number != 1]
    assert len(workers) == min(2, os.cpu_count() or 1)
    assert all(words[:4] == ["/opt/attention/bin/python", "-m", "service", "worker"] for words in workers)


def test_l12_an_orphan_is_adopted_and_reaped(container):
    before = container.pids()
    engine("exec", container.name, "/bin/sh", "-c", "(sleep 0.3 & sleep 0.3 &)")
    assert len(container.pids()) > len(before), "two were left behind"
    eventually(lambda: container.pids() == before, "nobody is left, not as a zombie either", within_s=5)


def test_a_killed_worker_is_replaced_and_leaves_no_zombie(container):
    victim = next(pid for pid in container.pids() if pid != container.pid)
    number = len(container.pids())
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in container.pids(), "it is buried", within_s=5)
    eventually(
        lambda: container.health().returncode == 0 and len(container.pids()) == number, "it is replaced", within_s=60
    )


def test_it_writes_only_the_files_that_its_processes_share_in_memory(container):
    assert list(Path(f"/proc/{container.pid}/root/tmp").iterdir()) == []
    shared = Path(f"/proc/{container.pid}/root/dev/shm")
    assert [path.name.startswith("attention-1-") for path in shared.iterdir()] == [True]
    layer = Path(f"/proc/{container.pid}/root")
    for place in ("/", "/opt/attention", "/layers", "/var/tmp", "/etc"):
        done = engine("exec", container.name, "/opt/attention/bin/python", "-c", f"open('{place}/x', 'w')", check=False)
        assert "Read-only file system" in done.stderr, place
    assert not (layer / "x").exists()


def test_r3_threads_stay_few_within_limits_of_processes_and_cores(start):
    container = start()
    container.wait_healthy()
    seen = []

    def ask(number: int) -> None:
        with Client(container.url) as client:
            for _ in range(20):
                client.attend("minilm-l1", np.ones((8 + number, 384), np.float32), weights="heads")
                seen.append(num_threads(container.pids()))

    with ThreadPoolExecutor(32) as crowd:
        list(crowd.map(ask, range(32)))
    print(f"{max(seen)} threads at most")  # noqa: T201 (docs/container.md has the figure)
    assert max(seen) <= 32, "of 128 that the limit allows"
    cgroup = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{container.pid}/cgroup").read_text().splitlines())
    name, place = ("pids", "pids/") if "pids" in cgroup else ("", "")
    limit = Path(f"/sys/fs/cgroup/{place}{cgroup[name]}/pids.max")
    assert limit.read_text().strip() == "128"


@pytest.mark.parametrize(("cpus", "workers"), [("1", 1), ("1.5", 1)])
def test_r3_the_cpu_quota_decides_the_number_of_processes(start, cpus, workers):
    container = start(limits=(f"--cpus={cpus}", "--memory=2g"))
    container.wait_healthy()
    assert len(container.pids()) == 1 + workers


def test_it_runs_as_any_other_user(start):
    container = start("--user=54321:54321")
    container.wait_healthy()
    assert {status(pid)["Uid"].split()[0] for pid in container.pids()} == {"54321"}


def test_by_default_it_listens_on_every_address_and_logs_that_no_key_is_required(start):
    """In a network of its own, without options: the port, the address and the layers are the image's."""
    container = start("--network=none", port=8000)
    container.wait_healthy()
    listening = [line.split()[1] for line in Path(f"/proc/{container.pid}/net/tcp").read_text().splitlines()[1:]]
    assert f"00000000:{8000:04X}" in listening
    assert '"event":"open_to_all"' in container.logs()


def test_an_unready_service_is_unhealthy(start, tmp_path):
    container = Container(tmp_path, "--env=ATTENTION_STRICT_LAYERS=false")
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(container.remove)
        eventually(
            lambda: "listening" in container.logs() or container.inspect("{{.State.Running}}") == "false", "it is up"
        )
        done = container.health()
        assert done.returncode != 0


def test_l12_stopping_it_loses_nothing_and_takes_less_than_the_grace(start):
    container = start()
    container.wait_healthy()
    statuses, is_stopping = [], threading.Event()

    def ask() -> None:
        with httpx2.Client(base_url=container.url) as session:
            while True:
                try:
                    statuses.append(session.post("/v1/layers/minilm-l2/attend", json=question()).status_code)
                except httpx2.ConnectError:
                    assert is_stopping.is_set()
                    return

    with ThreadPoolExecutor(8) as crowd:
        asking = [crowd.submit(ask) for _ in range(8)]
        eventually(lambda: len(statuses) > 40, "it is busy")
        is_stopping.set()
        started = time.monotonic()
        exit_code = container.stop(within_s=30)
        assert (exit_code, time.monotonic() - started < 10) == (0, True)
        for one in asking:
            one.result(30)
    assert set(statuses) <= {200, 503}
    assert statuses.count(503) <= 16
    assert '"exit_code":0' in container.logs().splitlines()[-1]
    assert "Traceback" not in container.logs()


def test_the_image_has_its_configuration_and_labels():
    (config,) = [json.loads(engine("image", "inspect", "--format", "{{json .Config}}", IMAGE).stdout)]
    assert config["User"] == f"{UID}:{UID}"
    assert config["Entrypoint"] == ["/opt/attention/bin/attention-service"]
    assert config["Cmd"] == ["serve"]
    assert config["StopSignal"] in ("SIGTERM", "15")
    assert list(config["Volumes"]) == ["/layers"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["title"] == "attention-service"
    assert labels["licenses"] == "Apache-2.0"
    assert len(labels["revision"]) == 40
    assert labels["version"]
    assert labels["created"].endswith("Z")


def test_the_image_has_no_compiler_test_cache_or_installer(tmp_path):
    made = engine("create", IMAGE).stdout.strip()
    try:
        archive = tmp_path / "image.tar"
        engine("export", "--output", str(archive), made)
    finally:
        engine("rm", made)
    with tarfile.open(archive) as files:
        members = {member.name: member for member in files}
    names = set(members)
    assert "opt/attention/lib/python3.11/site-packages/service/cli.py" in names
    programs = {name.rpartition("/")[2] for name in names if "/bin/" in f"/{name}" or "/sbin/" in f"/{name}"}
    assert "python3" in programs
    assert not programs & {"gcc", "cc", "g++", "c++", "make", "ld", "as", "gfortran"}
    ours = {name for name in names if name.startswith("opt/attention/")}
    assert not {name for name in ours if "/site-packages/pip/" in name or name.endswith(".whl")}
    left_out = ("/torch/test/", "/torch/include/", "/sympy/core/tests/", "/numpy/_core/tests/")
    assert not {name for name in ours if any(place in name for place in left_out)}
    assert not {name for name in names if name.startswith("build") or ".cache/pip" in name}
    assert not {
        name for name in ours if members[name].uid != 0 or (members[name].isfile() and members[name].mode & 0o6022)
    }


LOCUST = ROOT / ".venv-load" / "bin" / "locust"


@pytest.mark.skipif(not LOCUST.exists(), reason="the load test is not installed: make install-load")
def test_the_smoke_load_test_passes_against_it(start, tmp_path):
    container = start()
    container.wait_healthy()
    environment = {**os.environ, "URL": container.url, "REPORTS": str(tmp_path), "LOCUST": str(LOCUST)}
    done = subprocess.run(
        ["loadtest/run.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout[-2000:])  # noqa: T201
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_container_engine_is_docker_or_podman():
    assert engine("version").stdout
    assert ENGINE in ("docker", "podman")
