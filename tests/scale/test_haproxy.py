"""deploy/haproxy/haproxy.cfg with the real haproxy in front of three real services: a fault of one of them reaches no caller."""

from tests.scale.balancer import Balancer
from tests.scale.callers import Callers, goodput
from tests.scale.replicas import replicas


def test_one_of_three_is_killed(layers_dir):
    with replicas(3, layers_dir) as three, Balancer([one.url for one in three]) as balancer:
        with Callers(balancer.url, reference=three[0].url) as callers:
            before = callers.watched(3)
            three[1].kill()
            during = callers.watched(5)
        balancer.wait("replica2", "DOWN")
    result = callers.result()
    assert not result.failures
    assert result.num_wrong == 0
    assert goodput(before, during) >= 0.6
