"""The supervisor, the server and real processes: start, replacement, drain, and every way to stop them."""

import contextlib
import http.client
import os
import signal
import socket
import threading
import time

import pytest

from tests.e2e.fake_service import START_S, FakeService
from tests.processes import eventually, is_alive

pytestmark = pytest.mark.e2e


def test_the_workers_share_one_port_and_add_up_their_metrics(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        answered_by = [service.get("/pid")[1] for _ in range(40)]
        assert set(answered_by) == {str(pid) for pid in service.worker_pids}
        assert 'attention_requests_total{route="/pid",status="200"} 40.0' in service.get("/metrics")[1]


def test_a_killed_worker_is_replaced_and_the_other_answers_meanwhile(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        for _ in range(20):
            service.get("/pid")
        victim, survivor = service.worker_pids
        open_connection = connected_to(service, survivor)
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(service.worker_pids) == 3, "a replacement is started", within_s=10)
        assert ask(open_connection, "/pid") == (200, str(survivor))
        eventually(service.is_ready, "the service is ready again", within_s=10)
        assert time.monotonic() - killed_at < 10
        assert ask(open_connection, "/pid") == (200, str(survivor))
        open_connection.close()
        assert service.events("worker_died")[0]["signal"] == "SIGKILL"
        totals = service.get("/metrics")[1]
        counted = [line for line in totals.splitlines() if line.startswith("attention_received_total ")]
        assert float(counted[0].split()[1]) >= 22, "what the dead worker counted is still in the sum"
        assert "attention_in_flight_requests 0.0" in totals


@pytest.mark.long
def test_a_worker_with_a_blocked_loop_logs_its_stack_and_is_replaced_like_a_stopped_one(tmp_path):
    with FakeService(tmp_path, "--silence=11", workers=3) as service:
        service.await_ready()
        hanging, stopped, survivor = service.worker_pids
        at_work, victim = connected_to(service, survivor), connected_to(service, hanging)
        victim.request("GET", "/pid?hang")
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: len(service.worker_pids) == 5, "both are replaced", within_s=30)
        assert ask(at_work, "/pid") == (200, str(survivor))
        assert {event["pid"] for event in service.events("worker_silent")} == {hanging, stopped}
        assert [event["signal"] for event in service.events("worker_died")] == ["SIGKILL"] * 2
        assert service.events("worker_silent")[-1]["silent_s"] == pytest.approx(11)
        assert "in stand_still" in service.errors.read_text()
        eventually(service.is_ready, "the service is ready again")
        for connection in (at_work, victim):
            connection.close()


@contextlib.contextmanager
def asked(service, path, num=1, headers=None):
    """So many requests are in flight within the block; what is answered by its end is in the list that it gets."""
    answers = []

    def ask():
        with contextlib.suppress(OSError, http.client.HTTPException):
            answers.append(service.get(path, headers))

    clients = [threading.Thread(target=ask) for _ in range(num)]
    for client in clients:
        client.start()
    eventually(lambda: f"attention_in_flight_requests {num}.0" in service.get("/metrics")[1], "all are in flight")
    yield answers
    for client in clients:
        client.join(START_S)


def connected_to(service, pid):
    """A kept-alive connection that the kernel gave to this worker."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
        if ask(connection, "/pid") == (200, str(pid)):
            return connection
        connection.close()
    raise AssertionError("a hundred connections went to the other worker")


def ask(connection, path):
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_l3_a_first_signal_stops_an_idle_service_in_order_and_leaves_nothing_behind(tmp_path, signum):
    with FakeService(tmp_path) as service:
        service.await_ready()
        started = time.monotonic()
        service.process.send_signal(signum)
        assert service.ends() == 0
        assert time.monotonic() - started < 2
        assert not any(map(is_alive, service.worker_pids))
        assert list(service.run_dir.iterdir()) == []
        assert service.errors.read_text() == ""


def test_accepted_requests_are_answered_after_the_signal(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        headers = list[dict[str, str]]()
        with asked(service, "/pid?until=close", 8, headers) as answers:
            service.process.send_signal(signal.SIGTERM)
        assert [status for status, _ in answers] == [200] * 8
        assert [header["connection"] for header in headers] == ["close"] * 8
        assert service.ends() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_accepted_requests_are_answered_after_a_signal_to_every_process(tmp_path, signum):
    """systemd signals the supervisor and its workers (KillMode=control-group), and the supervisor signals the workers too."""
    with FakeService(tmp_path) as service:
        service.await_ready()
        with asked(service, "/pid?sleep=1", 8) as answers:
            for pid in (*service.worker_pids, service.process.pid):
                os.kill(pid, signum)
        assert [status for status, _ in answers] == [200] * 8
        assert service.ends() == 0
        assert service.events("forced") == []


def test_l6_a_request_longer_than_the_grace_is_refused_and_the_exit_is_in_time(tmp_path):
    with FakeService(tmp_path, workers=1, grace=1) as service:
        service.await_ready()
        with asked(service, "/pid?sleep=60") as answers:
            started = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            assert service.ends() == 0
            assert time.monotonic() - started < 3
        assert answers[0][0] == 503
        assert service.errors.read_text() == ""


def test_an_unanswered_request_is_cut_off_in_time_without_a_traceback(tmp_path):
    with FakeService(tmp_path, workers=1, grace=1) as service:
        service.await_ready()
        with asked(service, "/stuck"):
            service.process.send_signal(signal.SIGTERM)
            assert service.ends() == 0
        assert service.events("library") == []


def test_l9_readiness_fails_first_then_the_drain_delay_passes_then_the_listener_closes(tmp_path):
    with FakeService(tmp_path, "--delay=1", workers=1) as service:
        service.await_ready()
        started = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        eventually(lambda: service.get("/readyz")[0] == 503, "readiness turns", within_s=0.5)
        assert service.get("/pid")[0] == 200
        assert service.ends() == 0
        assert time.monotonic() - started > 1
        with pytest.raises(ConnectionRefusedError):
            service.get("/pid")


def test_l5_an_idle_connection_gets_one_more_answer_with_connection_close(tmp_path):
    with FakeService(tmp_path, workers=1) as service:
        service.await_ready()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)) as connection:
            assert ask(connection, "/pid")[0] == 200
            service.process.send_signal(signal.SIGTERM)
            eventually(lambda: service.events("draining"), "the worker drains")
            connection.request("GET", "/pid")
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (200, "close")
        assert service.ends() == 0


def test_l7_a_second_signal_ends_everything_at_once(tmp_path):
    with FakeService(tmp_path, grace=60) as service:
        service.await_ready()
        with asked(service, "/pid?sleep=9"):
            service.process.send_signal(signal.SIGTERM)
            eventually(lambda: service.events("stopping"), "the first signal is heard")
            time.sleep(0.3)  # sooner it would be an echo of the first
            service.process.send_signal(signal.SIGTERM)
            assert service.ends(2) == 128 + signal.SIGTERM
        assert not any(map(is_alive, service.worker_pids))
        assert service.errors.read_text() == ""


def test_l7_a_hangup_changes_nothing(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        for pid in (service.process.pid, *service.worker_pids):
            os.kill(pid, signal.SIGHUP)
        eventually(lambda: service.events("signal_ignored"), "the supervisor heard it")
        assert service.get("/pid")[0] == 200
        assert len(service.worker_pids) == 2
        service.process.send_signal(signal.SIGTERM)
        assert service.ends() == 0


def test_the_workers_exit_when_their_supervisor_is_killed(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        service.process.kill()
        service.process.wait(START_S)
        eventually(lambda: not any(map(is_alive, service.worker_pids)), "the workers are gone", within_s=5)


def test_workers_that_still_start_exit_when_their_supervisor_is_killed(tmp_path):
    """Their event loops do not run yet."""
    with FakeService(tmp_path) as service:
        eventually(lambda: len(service.worker_pids) == 2, "both are started")
        service.process.kill()
        service.process.wait(START_S)
        eventually(lambda: not any(map(is_alive, service.worker_pids)), "the workers are gone", within_s=5)
        assert len(service.events("supervisor_gone")) == 2


def test_l11_a_busy_port_is_one_line_and_no_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with FakeService(tmp_path, f"--port={port}") as service:
            assert service.ends() == 1
            assert service.errors.read_text() == (
                f"attention-service: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
            )
            assert service.worker_pids == []


def test_the_port_is_free_again_at_once(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with FakeService(folders[0]) as first:
        first.await_ready()
        port = first.port
        first.process.send_signal(signal.SIGTERM)
        assert first.ends() == 0
    with FakeService(folders[1], f"--port={port}") as second:
        second.await_ready()


def test_a_second_start_removes_the_directory_of_a_killed_supervisor(tmp_path):
    with FakeService(tmp_path) as service:
        service.await_ready()
        service.process.kill()
    left_behind = list((tmp_path / "run").iterdir())
    assert len(left_behind) == 1
    with FakeService(tmp_path) as service:
        service.await_ready()
        assert not left_behind[0].exists()
        service.process.send_signal(signal.SIGTERM)
        assert service.ends() == 0
    assert list((tmp_path / "run").iterdir()) == []
