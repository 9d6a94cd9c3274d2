"""The real service in real processes, with faults: stuck and failing engines, killed and paused processes, slow loads."""

import concurrent.futures
import contextlib
import functools
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx2
import pytest

from service.layers.store import Store
from service.supervisor.supervisor import EXIT_ENGINE_DOWN
from tests.e2e.faulty_service import DEVICE, SLOW, SLOW_S, STUCK
from tests.e2e.started import Started, X
from tests.integration.running import small_layer
from tests.processes import eventually
from tests.torture import process_tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
FAULTY = Path(__file__).with_name("faulty_service.py")
# Every batch runs on the compute thread, so the event loop reports a pass that never ends. For inline batches see test_inline.py.
IN_THE_THREAD = {"FAULTY_INLINE": "0"}


class Faulty(Started):
    """A service with faults. Each request has a connection of its own, for which the kernel chooses the process."""

    def __init__(self, directory, **settings) -> None:
        super().__init__(directory, program=(FAULTY,), device="cpu", **settings)

    def pids(self) -> list[int]:
        """The pid of the process that started last in each slot, by slot."""
        lines = {line["worker"]: line["pid"] for line in self.lines if line["event"] == "worker_started"}
        return [lines[slot] for slot in sorted(lines)]

    def ask(self, mark: float = 0.5, layer: str = "small", **kwargs) -> httpx2.Response:
        body = {"query": [[mark, *[0.25] * 15], [0.125] * 16]}
        return httpx2.post(f"{self.url}/v1/layers/{layer}/attend", json=body, timeout=60, **kwargs)

    def change(self, method: str, layer: str) -> httpx2.Response:
        return httpx2.request(method, f"{self.url}/v1/layers/{layer}", timeout=60)

    def seen(self, layer: str = "small", times: int = 24) -> set[str]:
        """The digests of the layer in answers to so many requests, and the statuses of other answers."""
        answers = [self.ask(layer=layer) for _ in range(times)]
        return {
            answer.json()["layer"]["digest"] if answer.status_code == 200 else str(answer.status_code)
            for answer in answers
        }

    def until(self, condition, within_s: float = 30) -> None:
        eventually(condition, "what the test waits for", within_s)

    def end(self) -> None:
        for pid in self.pids():  # a paused process does not see its supervisor end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        super().end()


@pytest.fixture
def serve(serve):
    return functools.partial(serve, kind=Faulty)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "layers")


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(24) as made:
        yield made


@pytest.mark.long
def test_layers_are_loaded_replaced_and_unloaded_in_every_process_and_in_its_replacement(serve, store):
    service = serve(workers=2, heartbeat_s=10)
    service.wait_ready()
    fresh = small_layer("fresh")
    store.save(fresh)
    assert service.seen("fresh") == {"404"}
    started = time.monotonic()
    assert service.change("PUT", "fresh").status_code == 201
    assert time.monotonic() - started < 5, "a rollout waits for no heartbeat"
    assert service.seen("fresh") == {fresh.digest}
    newer = small_layer("fresh", scale=0.25)
    store.save(newer)
    assert service.change("PUT", "fresh").status_code == 200
    assert service.seen("fresh") == {newer.digest}
    assert service.change("PUT", "fresh").status_code == 200
    assert service.change("DELETE", "fresh").status_code == 204
    assert service.seen("fresh") == {"404"}
    assert service.change("DELETE", "fresh").status_code == 404
    assert service.change("PUT", "fresh").status_code == 201
    assert service.change("DELETE", "zero").status_code == 204
    victim = service.pids()[0]
    os.kill(victim, signal.SIGKILL)
    service.line(event="worker_died", pid=victim)
    service.wait_ready()
    assert service.seen("fresh") == {newer.digest}
    assert service.seen("zero") == {"404"}


@pytest.mark.long
def test_a_replaced_process_gets_its_share_of_connections_and_no_request_fails_D9(serve, pool):
    service = serve(workers=2)
    service.wait_ready()
    victim, survivor = service.pids()
    idle = process_tree.num_sockets(survivor)
    is_over, has_joined = threading.Event(), threading.Event()
    failures: list[str] = []

    def ask_repeatedly() -> None:
        url = service.url
        with httpx2.Client() as client:
            while not is_over.is_set():
                is_late = has_joined.is_set()
                try:
                    answer = client.post(f"{url}/v1/layers/small/attend", json=X)
                    failure = "" if answer.status_code == 200 else str(answer.status_code)
                except httpx2.HTTPError as error:
                    failure = repr(error)
                if failure and is_late:
                    failures.append(failure)

    callers = [pool.submit(ask_repeatedly) for _ in range(16)]
    try:
        service.until(lambda: process_tree.num_sockets(survivor) > idle)
        os.kill(victim, signal.SIGKILL)
        service.until(lambda: service.pids()[0] != victim)
        replacement = service.pids()[0]
        service.wait_ready()
        has_joined.set()
        # Of 16 clients that reconnect, it gets 8 on average, and fewer than 3 once in 500 times.
        service.until(lambda: process_tree.num_sockets(replacement) >= idle + 3, within_s=20)
    finally:
        is_over.set()
    for caller in callers:
        caller.result()
    assert failures == []
    assert service.find(event="rebalancing")[-1]["connections"] > 0


@pytest.mark.long
def test_a_paused_process_aborts_a_rollout_and_reconciles_when_it_wakes(serve, store):
    service = serve(workers=2, layer_change_s=3)
    service.wait_ready()
    before = service.seen()
    store.save(small_layer("small", scale=0.25))
    paused = service.pids()[0]
    os.kill(paused, signal.SIGSTOP)
    try:
        for _ in range(20):  # the kernel gives half of the connections to the paused process, which answers none
            with contextlib.suppress(httpx2.TimeoutException):
                answer = httpx2.put(f"{service.url}/v1/layers/small", timeout=8)
                break
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    finally:
        os.kill(paused, signal.SIGCONT)
    service.wait_ready()
    # The paused process may now carry out a PUT that it had received. In any case all processes serve the same layer.
    time.sleep(1)
    assert len(service.seen()) == 1
    assert service.change("PUT", "small").status_code == 200
    assert service.seen() == {small_layer("small", scale=0.25).digest} != before


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_during_a_rollout_leaves_all_with_the_same_layers(serve, store, pool, victim):
    service = serve(workers=2, environment={"FAULTY_LOAD_S": "0.3"})
    service.wait_ready()
    store.save(small_layer("fresh"))
    changing = pool.submit(service.change, "PUT", "fresh")
    time.sleep(0.45)
    os.kill(service.pids()[victim], signal.SIGKILL)
    status = None
    with contextlib.suppress(httpx2.HTTPError):  # the killed process may be the one that got the request
        status = changing.result().status_code
    service.line(event="worker_died")
    service.wait_ready()
    seen = service.seen("fresh")
    assert len(seen) == 1
    assert status in (None, 201, 503)
    assert status is None or (seen == {"404"}) == (status == 503)
    answer = service.change("PUT", "fresh")
    assert answer.status_code in (200, 201), answer.text
    assert service.seen("fresh") == {small_layer("fresh").digest}


@pytest.mark.long
@pytest.mark.parametrize(
    ("computing", "queued", "workers"),
    [(STUCK, 0.5, 2), (STUCK, 0.5, 1), (SLOW, DEVICE, 1)],
    ids=["stuck-of-two", "stuck", "device"],
)
def test_a_lost_engine_fails_all_waiting_requests_and_its_process_is_replaced(
    serve, tmp_path, pool, computing, queued, workers
):
    passes = tmp_path / "passes.txt"
    environment = {**IN_THE_THREAD, "FAULTY_PASSES": str(passes)}
    service = serve(workers=workers, stuck_s=2 * SLOW_S, heartbeat_s=0.2, environment=environment)
    service.wait_ready()
    before = service.seen()
    running = pool.submit(service.ask, computing)
    service.until(lambda: str(computing) in passes.read_text(encoding="ascii"))
    waiting = [pool.submit(service.ask, mark) for mark in (queued, *[0.5] * 6)]
    culprit = running if computing == STUCK else waiting[0]
    answer = culprit.result()
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")
    assert int(answer.headers["retry-after"]) >= 1
    # Of two processes, the other one answers the requests that the kernel gives it.
    statuses = {one.result().status_code for one in waiting}
    assert statuses <= ({503} if workers == 1 else {200, 503})
    assert running.result().status_code == (503 if computing == STUCK else 200)
    assert service.line(event="worker_died")["exit_code"] == EXIT_ENGINE_DOWN
    service.wait_ready()
    assert service.seen() == before
    assert len(service.pids()) == workers


@pytest.mark.long
def test_x5_a_process_killed_in_mid_batch_fails_only_its_own_requests(serve, pool):
    service = serve(workers=2)
    service.wait_ready()
    # Enough requests that the kernel gives each process some.
    pending = [pool.submit(service.ask, SLOW) for _ in range(24)]
    time.sleep(1)
    victim = service.pids()[0]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ends = [one.exception() or one.result().status_code for one in pending]
    cut = [end for end in ends if end != 200]
    assert all(isinstance(end, httpx2.HTTPError) for end in cut), "connections are cut off; no answer is wrong"
    assert 200 in ends, "the other process answered its requests"
    service.line(event="worker_died", pid=victim)
    service.wait_ready()
    assert time.monotonic() - killed < 20, "an idle machine takes 10 s"
    assert len(service.find(event="worker_died")) == 1
    killed_requests = service.samples()['attention_cancelled_total{stage="killed"}']
    assert killed_requests == len(cut), "every request that was cut off was in the process that died"
    assert service.seen() == {small_layer("small").digest}


@pytest.mark.long
def test_l8_a_signal_while_a_large_layer_is_loaded_ends_the_service_in_time(serve):
    service = serve(workers=2, environment={"FAULTY_LOAD_S": "60"})
    service.line(event="listening")
    time.sleep(0.5)
    signalled = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(30) == 0
    assert time.monotonic() - signalled < 5


@pytest.mark.long
def test_l8_a_signal_while_a_replacement_loads_ends_the_service_in_time(serve):
    service = serve(workers=1, environment={"FAULTY_LOAD_S": "2"})
    service.wait_ready()
    os.kill(service.pids()[0], signal.SIGKILL)
    service.until(lambda: len(service.find(event="worker_started")) == 2)
    time.sleep(5)  # torch is imported, a layer is being read
    signalled = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(30) == 0
    assert time.monotonic() - signalled < 5


@pytest.mark.long
@pytest.mark.parametrize("grace_s", [0, 1])
def test_l6_a_forward_pass_longer_than_the_grace_does_not_delay_the_exit(serve, tmp_path, pool, grace_s):
    """Nor does a body of which a part never comes."""
    passes = tmp_path / "passes.txt"
    environment = {**IN_THE_THREAD, "FAULTY_PASSES": str(passes)}
    service = serve(workers=1, shutdown_grace_s=grace_s, environment=environment)
    service.wait_ready()
    stuck = pool.submit(service.ask, STUCK)
    service.until(lambda: str(STUCK) in passes.read_text(encoding="ascii"))
    url = httpx2.URL(service.url)
    with socket.create_connection((url.host, url.port)) as half_sent:
        half_sent.sendall(b"POST /v1/layers/small/attend HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        time.sleep(0.3)
        signalled = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        # The grace, 2 s until processes are killed, and 1 s for the interpreter to exit.
        assert time.monotonic() - signalled < grace_s + 2 + 1
    assert stuck.result().status_code == 503
    assert service.find(event="workers_killed") == []
