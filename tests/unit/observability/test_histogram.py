"""Histogram: many observations at once equal those of the library, which makes them one by one."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Library

from service.observability.shared_values import Histogram

BUCKETS = (0.001, 0.25, 0.5, 4.0)
# Their floating-point sums are exact in any order.
eighths = st.integers(min_value=-8, max_value=80).map(lambda number: number / 8)


def shown(kind, observe):
    registry = CollectorRegistry()
    observe(kind("seconds", "of something", ("layer",), registry=registry, buckets=BUCKETS).labels("a"))
    return generate_latest(registry)


@given(st.lists(st.one_of(eighths, st.sampled_from(BUCKETS)), max_size=30))
def test_many_observations_at_once_equal_those_of_the_library_one_by_one(amounts):
    def one_by_one(series):
        for amount in amounts:
            series.observe(amount)

    assert (
        shown(Histogram, lambda series: series.observe_all(amounts)).split(b"_sum")[0]
        == (shown(Library, one_by_one).split(b"_sum")[0])
    )


@given(st.lists(eighths, max_size=30))
def test_their_sum_is_the_sum(amounts):
    registry = CollectorRegistry()
    Histogram("seconds", "of something", registry=registry, buckets=BUCKETS).observe_all(amounts)
    assert registry.get_sample_value("seconds_sum") == sum(amounts)


def test_a_value_above_every_bucket_is_in_the_last():
    registry = CollectorRegistry()
    Histogram("seconds", "of something", registry=registry, buckets=BUCKETS).observe_all([4.1, float("inf")])
    assert registry.get_sample_value("seconds_bucket", {"le": "4.0"}) == 0
    assert registry.get_sample_value("seconds_bucket", {"le": "+Inf"}) == 2
