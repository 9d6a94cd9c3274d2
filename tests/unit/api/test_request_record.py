"""RequestRecord: times as answers and logs have them."""

from hypothesis import given
from hypothesis import strategies as st

from service.api.outer_middleware import milliseconds


@given(st.floats(min_value=0, max_value=1e6))
def test_milliseconds_are_rounded_to_the_microsecond(seconds):
    told = milliseconds(seconds)
    assert told == float(f"{told:.3f}")
    assert abs(told - seconds * 1000) <= 0.0005 + 1e-15 * seconds * 1000
