"""deploy/haproxy/haproxy.cfg with the real haproxy in front of three real services: a fault of one of them reaches no caller."""

import contextlib

import pytest

from tests.scale.balancer import Balancer
from tests.scale.callers import Callers, goodput
from tests.scale.faults import Network, stub
from tests.scale.replicas import Replica

BEFORE_S, DURING_S = 2, 7
# Of the rate of three replicas, while one of them is away.
MIN_GOODPUT = 0.6
# A frozen or unreachable replica is marked as down within some five seconds, and a call waits for that once.
MAX_LATENCY_S = 12
PROBLEM = b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbad"


@pytest.fixture
def balancer(three):
    with Balancer([one.url for one in three]) as balancer:
        yield balancer


def check(callers: Callers) -> None:
    """No caller saw a failure or other bits than a replica alone gives."""
    result = callers.result()
    assert not result.failures
    assert result.num_wrong == 0
    assert result.latency_s(1.0) < MAX_LATENCY_S


def test_one_of_three_is_killed_and_started_again(three, balancer):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before = callers.watched(BEFORE_S)
        three[1].kill()
        during = callers.watched(DURING_S)
        assert balancer.status("replica2") == "DOWN"
        three[1].restore()
        balancer.wait("replica2", "UP")
    check(callers)
    assert goodput(before, during) >= MIN_GOODPUT


def test_one_of_three_freezes_and_goes_on(three, balancer):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before = callers.watched(BEFORE_S)
        three[1].freeze()
        during = callers.watched(DURING_S)
        assert balancer.status("replica2") == "DOWN"
        three[1].thaw()
        balancer.wait("replica2", "UP")
    check(callers)
    assert goodput(before, during) >= MIN_GOODPUT


def replace(replica: Replica, name: str, balancer: Balancer) -> None:
    """Drain it as an orchestrator does, and put another process in its place."""
    replica.drain()
    balancer.wait(name, "NOLB")
    assert replica.drained() == 0
    replica.start()
    replica.ready()
    balancer.wait(name, "UP")


def test_a_rolling_restart_of_all_three_loses_no_accepted_request(three, balancer):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before, start_s = callers.watched(BEFORE_S), callers.now_s()
        for name, replica in zip(balancer.names, three, strict=True):
            replace(replica, name, balancer)
        during = callers.result().per_second(start_s, callers.now_s())
    check(callers)
    assert goodput(before, during) >= MIN_GOODPUT
    rows = balancer.stats()
    assert {name: rows[name]["eresp"] for name in balancer.names} == dict.fromkeys(balancer.names, "0")


@pytest.mark.long
@pytest.mark.parametrize(
    ("health", "call"),
    [
        pytest.param(200, PROBLEM, id="says-ready-and-answers-500"),
        pytest.param(200, b"\x00 no HTTP\r\n\r\n", id="says-ready-and-answers-garbage"),
        pytest.param(200, b"", id="says-ready-and-hangs-up"),
        pytest.param(503, PROBLEM, id="says-not-ready"),
        pytest.param(404, PROBLEM, id="is-another-service"),
    ],
)
def test_one_of_three_is_replaced_by_one_of_wrong_health(three, balancer, health, call):
    with Callers(balancer.url, reference=three[0].url) as callers:
        before = callers.watched(BEFORE_S)
        three[1].kill()
        with stub(three[1].port, health, call) as posts:
            during = callers.watched(DURING_S)
            assert balancer.status("replica2") == "DOWN"
            num_posts = len(posts)
            callers.watched(1)
            assert len(posts) == num_posts
    check(callers)
    assert goodput(before, during) >= MIN_GOODPUT


@contextlib.contextmanager
def networks(three, *delays_s):
    """Put a network in front of each replica."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Network(one.port, delay_s=delay_s))
            for one, delay_s in zip(three, delays_s, strict=True)
        ]


@pytest.mark.long
def test_a_partition_cuts_one_of_three_off(three):
    with networks(three, 0, 0, 0) as lines, Balancer([line.url for line in lines]) as balancer:
        with Callers(balancer.url, reference=three[0].url) as callers:
            before = callers.watched(BEFORE_S)
            lines[1].cut()
            during = callers.watched(DURING_S)
            assert balancer.status("replica2") == "DOWN"
            lines[1].heal()
            balancer.wait("replica2", "UP")
        check(callers)
        assert goodput(before, during) >= MIN_GOODPUT


@pytest.mark.long
def test_a_replica_that_is_ten_times_slower_gets_fewer_calls(three):
    """With round robin a caller's cycle would take twice as long, and goodput be a half."""
    with networks(three, 0.05, 0.05, 0.05) as lines, Balancer([line.url for line in lines]) as balancer:
        with Callers(balancer.url, reference=three[0].url) as callers:
            before = callers.watched(BEFORE_S)
            lines[1].delay_s = 0.5
            balancer.command("clear counters all")
            during = callers.watched(DURING_S)
        rows = balancer.stats()
        share = int(rows["replica2"]["stot"]) / int(rows["BACKEND"]["stot"])
    check(callers)
    assert goodput(before, during) >= MIN_GOODPUT
    assert share < 1 / 6, "half of an even share"
