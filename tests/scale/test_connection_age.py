"""Connection age behind a balancer that assigns each connection to one replica for its life, as a Kubernetes Service does."""

import httpx2
import pytest

from tests import processes
from tests.scale.balancer import Balancer
from tests.scale.callers import Callers, inputs_of
from tests.scale.replicas import Replica, replicas

AGE_S = 1.5
WATCHED_S = 2.0
NUM_CALLERS = 8  # with one connection each
TCP = """
global
    stats socket "${BALANCER_SOCKET}" mode 600 level admin
    stats timeout 10s
defaults
    mode tcp
    timeout connect 1s
    timeout client 60s
    timeout server 60s
frontend edge
    bind "${BALANCER_BIND}"
    default_backend attention
backend attention
    balance roundrobin
    option httpchk GET /readyz
    server replica1 "${REPLICA_1}" check inter 500ms
    server replica2 "${REPLICA_2}" check inter 500ms
"""


def num_attends(replica: Replica) -> float:
    """The requests to the layer that this replica has answered."""
    found = processes.samples(httpx2.get(f"{replica.url}/metrics").text)
    return sum(
        count for name, count in found.items() if name.startswith('attention_layer_requests_total{layer="small"')
    )


@pytest.mark.parametrize("age_s", [pytest.param(0, id="off", marks=pytest.mark.long), pytest.param(AGE_S, id="on")])
def test_a_new_replica_has_its_share_of_pooled_clients_within_two_ages(layers_dir, tmp_path, age_s):
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(TCP, encoding="utf-8")
    with (
        replicas(2, layers_dir, env={"ATTENTION_CONNECTION_MAX_AGE_S": str(age_s)}) as (old, new),
        Balancer([old.url, new.url], configuration=configuration) as balancer,
    ):
        balancer.command("set server attention/replica2 state maint")
        # One attempt: the end of a connection must cost no call.
        with Callers(balancer.url, NUM_CALLERS, reference=old.url, inputs=inputs_of()[:4], attempts=1) as callers:
            at_first = num_attends(new)
            processes.eventually(
                lambda: balancer.stats()["replica1"]["scur"] == str(NUM_CALLERS), "every caller is connected"
            )
            balancer.command("set server attention/replica2 state ready")
            callers.watched(2 * AGE_S)
            before = num_attends(old), num_attends(new)
            callers.watched(WATCHED_S)
            by_old, by_new = num_attends(old) - before[0], num_attends(new) - before[1]
    result = callers.result()
    assert not [failure for failure in result.failures if not failure.startswith("QueueFull")]  # a busy machine's
    assert result.num_wrong == 0
    if age_s:
        assert by_new / (by_old + by_new) >= 0.5 * 0.5, "half of its fair share, which is a half"
    else:
        assert by_old > 0
        assert before[1] + by_new == at_first
