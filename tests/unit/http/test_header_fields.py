"""Header fields: lookup by name, and the values parsed from them."""

import pytest

from service.errors import BadRequest
from service.http.request_parser import HeaderFields


def test_all_values_of_a_name_are_collected_without_surrounding_blanks():
    fields = HeaderFields([(b"a", b" 1\t"), (b"b", b"2"), (b"a", b"3 4")])
    assert fields == {b"a": (b"1", b"3 4"), b"b": (b"2",)}


def test_a_missing_name_has_no_values_and_looking_it_up_changes_nothing():
    fields = HeaderFields([(b"a", b"1")])
    assert fields[b"b"] == ()
    assert list(fields) == [b"a"]


def test_the_result_of_a_reader_is_cached_for_each_of_its_options():
    calls = []

    def read(fields: HeaderFields, suffix: bytes) -> bytes:
        calls.append(suffix)
        return fields[b"a"][0] + suffix

    fields = HeaderFields([(b"a", b"1")])
    assert [fields.make(read, suffix) for suffix in (b"x", b"y", b"x")] == [b"1x", b"1y", b"1x"]
    assert calls == [b"x", b"y"]
    assert HeaderFields([(b"a", b"2")]).make(read, b"x") == b"2x"


def test_none_is_cached_like_any_other_result():
    calls: list[HeaderFields] = []
    fields = HeaderFields()
    assert fields.make(calls.append) is fields.make(calls.append) is None
    assert len(calls) == 1


def test_the_error_of_a_reader_is_raised_every_time():
    def refuse(_: HeaderFields) -> None:
        raise BadRequest("no")

    fields, refusals = HeaderFields(), []
    for _ in range(2):
        with pytest.raises(BadRequest) as refused:
            fields.make(refuse)
        refusals.append(refused.value)
    assert refusals[0] is not refusals[1]
