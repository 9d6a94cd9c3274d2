"""One layer set for many replicas: two real replicas follow a directory and an HTTP server, and haproxy weighs a canary."""

import functools
import http.server
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from attention_client import Client, ServiceError
from service.layers.layer_set import MANIFEST, LayerSet, publish
from service.layers.store import Store
from tests import processes
from tests.integration.running import small_layer
from tests.scale.balancer import Balancer
from tests.scale.replicas import Replica

POLL_S = 0.3
# Published as blue and as green; the layer of both has other bits in each.
BLUE = [small_layer("small"), small_layer("old")]
GREEN = [small_layer("small", scale=0.25), small_layer("fresh")]
X = np.random.default_rng(5).standard_normal((5, 16), np.float32)


def publish_set(directory: Path, layers) -> LayerSet:
    files = directory.with_name(f"{directory.name}-files")
    shutil.rmtree(files, ignore_errors=True)
    return publish({Store(files).save(layer): layer.digest for layer in layers}, directory)


def layer_set(url: str) -> Any:
    return httpx2.get(f"{url}/v1/layers").json().get("layer_set", {})


def serves(replica: Replica, wanted: LayerSet, within_s: float = 30) -> None:
    processes.eventually(lambda: layer_set(replica.url)["digest"] == wanted.digest, "the set is served", within_s)


def reports(replica: Replica, part: str) -> None:
    processes.eventually(lambda: part in (layer_set(replica.url)["fault"] or ""), f"the fault {part!r}", 30)


def log_of(replica: Replica) -> str:
    """Opened anew, because the replica writes at the place of the file that is open here."""
    return Path(f"/proc/self/fd/{replica._log.fileno()}").read_text(encoding="utf-8")


class Replicas:
    """Two replicas of two workers, each with a directory of its own for what it fetches."""

    def __init__(self, directory: Path, *sources: str, workers: int = 2) -> None:
        self.caches = [directory / f"cache{number}" for number in range(len(sources))]
        self.all = []
        for cache, source in zip(self.caches, sources, strict=True):
            env = {"ATTENTION_LAYERS_SOURCE": source, "ATTENTION_LAYERS_SOURCE_POLL_S": str(POLL_S)}
            self.all.append(Replica(cache, workers=workers, env=env))

    def __enter__(self) -> list[Replica]:
        for replica in self.all:
            replica.start()
        for replica in self.all:
            replica.ready()
        return self.all

    def __exit__(self, *_: object) -> None:
        for replica in self.all:
            replica.end()


class Traffic:
    """Callers of some addresses; the outputs that each digest gave, and what failed."""

    def __init__(self, *urls: str) -> None:
        self.outputs: dict[str, set[bytes]] = {}
        self.digests: Counter[str] = Counter()
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(url,)) for url in urls for _ in range(2)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, url: str) -> None:
        with Client(url) as client:
            while not self._is_over.wait(0.01):
                try:
                    answer = client.attend("small", X)
                except ServiceError as error:
                    self.failures.append(repr(error))
                else:
                    self.outputs.setdefault(answer.digest, set()).add(answer.output.tobytes())
                    self.digests[answer.digest] += 1


class FaultyServer(http.server.ThreadingHTTPServer):
    """Serves a directory; `fault` is what it does to the files of a set, or to the manifest too."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(FaultyHandler, directory=str(directory)))
        self.fault = ""
        self.is_for_all = False
        self.num_fetched = 0
        self.address = f"http://user:secret@127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class FaultyHandler(http.server.SimpleHTTPRequestHandler):
    server: FaultyServer

    def do_GET(self) -> None:
        fault = self.server.fault if self.server.is_for_all or MANIFEST not in self.path else ""
        self.server.num_fetched += MANIFEST not in self.path
        if fault == "refused":
            self.send_error(503)
        elif fault == "cut":
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        elif fault == "silent":
            time.sleep(60)
        elif fault == "damaged":
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content[::-1])
        elif fault == "gone":
            self.send_error(404)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def published(tmp_path):
    return tmp_path / "published"


@pytest.fixture
def server(published):
    published.mkdir()
    server = FaultyServer(published)
    yield server
    server.shutdown()
    server.server_close()


def test_two_replicas_of_a_directory_and_of_a_server_change_the_set_under_load(tmp_path, published, server):
    blue = publish_set(published, BLUE)
    with Replicas(tmp_path, str(published), server.address, workers=1) as two:
        for replica in two:
            serves(replica, blue)
        with Traffic(*(replica.url for replica in two)) as traffic:
            green = publish_set(published, GREEN)
            for replica in two:
                serves(replica, green)
            time.sleep(1)
        assert not traffic.failures
        assert sorted(traffic.digests) == sorted([BLUE[0].digest, GREEN[0].digest])
        assert [len(outputs) for outputs in traffic.outputs.values()] == [1, 1], "each digest has its own bits"
        assert layer_set(two[1].url)["source"] == f"http://127.0.0.1:{server.server_port}"
        assert "secret" not in log_of(two[1]) + httpx2.get(f"{two[1].url}/metrics").text
        names = [layer["name"] for layer in httpx2.get(f"{two[0].url}/v1/layers").json()["layers"]]
        assert names == ["fresh", "small"]


FAULTS = {
    "refused": "ClientResponseError",
    "cut": "ClientPayloadError",
    "damaged": "other bytes",
    "gone": "no such file",
}


@pytest.mark.long
def test_a_fault_of_the_server_changes_nothing_and_ends_with_it(tmp_path, published, server):
    sets = [publish_set(published, BLUE)]
    with Replicas(tmp_path, server.address) as (one,):
        for number, (fault, reason) in enumerate([*FAULTS.items(), ("silent", "Timeout")]):
            server.fault = fault
            sets.append(publish_set(published, [small_layer("small", scale=2.0**-number)]))
            reports(one, reason)
            assert layer_set(one.url)["digest"] == sets[-2].digest
            assert processes.is_ready(one.url)
            server.fault = ""
            serves(one, sets[-1])
            processes.eventually(lambda: layer_set(one.url)["fault"] is None, "the fault is over", 30)
        num_lines = log_of(one).count('"layers_source_failed"')
        assert len(FAULTS) <= num_lines < 4 * len(FAULTS), "a line when a fault begins, and none at each look"


@pytest.mark.long
def test_a_worker_that_dies_in_the_middle_of_a_fetch_is_replaced_and_another_one_follows(tmp_path, published, server):
    blue = publish_set(published, BLUE)
    with Replicas(tmp_path, server.address) as (one,):
        serves(one, blue)
        server.fault, server.num_fetched = "silent", 0
        green = publish_set(published, GREEN)
        processes.eventually(lambda: server.num_fetched, "it fetches")
        with Traffic(one.url) as traffic:
            (leader,) = {int(pid) for pid in locks(tmp_path / "cache0" / ".lock")}
            os.kill(leader, signal.SIGKILL)
            server.fault = ""
            serves(one, green, 60)
            one.ready()
        assert not traffic.failures
        server.fault = "silent"
        publish_set(published, [small_layer("small", scale=0.125)])
        reports(one, "Timeout")
        one.drain()
        assert one.drained() == 0


def locks(path: Path) -> list[str]:
    """The processes that have this file open."""
    found = []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            is_it = descriptor.readlink() == path
        except OSError:
            continue
        if is_it and "LOCK" in (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text().upper():
            found.append(descriptor.parts[2])
    return found


@pytest.mark.long
def test_a_replica_waits_for_its_first_set_and_starts_again_without_the_source(tmp_path, published):
    replicas = Replicas(tmp_path, str(published))
    (one,) = replicas.all
    try:
        one.start()
        wanted = "layer-set.json: the file does not exist"
        processes.eventually(lambda: wanted in (why_not_ready(one) or ""), "it says why it is not ready", 60)
        blue = publish_set(published, BLUE)
        one.ready()
        one.kill()
        published.rename(tmp_path / "away")
        one.start()
        one.ready()
        serves(one, blue)
        reports(one, wanted)
    finally:
        replicas.__exit__()


def why_not_ready(replica: Replica) -> Any:
    try:
        return httpx2.get(f"{replica.url}/readyz").json().get("detail")
    except httpx2.TransportError:
        return None


@pytest.mark.long
def test_a_canary_by_weight_of_two_replicas_that_follow_two_sets(tmp_path):
    """The walk of docs/layer-sets.md."""
    blue, green = publish_set(tmp_path / "blue", BLUE), publish_set(tmp_path / "green", GREEN)
    with (
        Replicas(tmp_path, str(tmp_path / "blue"), str(tmp_path / "green"), workers=1) as two,
        Balancer([replica.url for replica in two], env={"BALANCER_ALGORITHM": "random(2)"}) as balancer,
    ):
        for replica, wanted in zip(two, (blue, green), strict=True):
            serves(replica, wanted)
        balancer.command("set server attention/replica2 weight 10%")
        with Traffic(*[balancer.url] * 3) as traffic:
            processes.eventually(lambda: sum(traffic.digests.values()) > 300, "enough calls", 60)
            few = traffic.digests[GREEN[0].digest] / sum(traffic.digests.values())
            assert 0.02 <= few <= 0.25
            publish_set(tmp_path / "blue", GREEN)
            serves(two[0], green)
            balancer.command("set server attention/replica2 weight 100%")
            time.sleep(0.5)
            traffic.digests.clear()
            time.sleep(1)
            assert set(traffic.digests) == {GREEN[0].digest}
        assert not traffic.failures
