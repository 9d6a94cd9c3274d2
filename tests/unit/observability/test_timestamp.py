"""Timestamps: the text is the time, as other parsers read it."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from service.observability.line_writer import timestamp


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2100, 1, 1)))  # noqa: DTZ001 (made aware below)
def test_a_timestamp_is_utc_to_the_microsecond(moment):
    at = moment.replace(tzinfo=UTC)
    at_ns = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    told = timestamp(at_ns)
    assert told.endswith("Z")
    assert datetime.fromisoformat(told) == at
