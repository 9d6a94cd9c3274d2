"""Body faults: the kind of a fault of syntax is named, and no text of a caller is shown."""

import json
import string
import time
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadJson, ServiceError
from service.wire.body_faults import base64_fault, unless_compressed
from service.wire.json_document import parse

CUT, VALUE = "is it cut off?", "expected a value: a number such as 0.5, a list, an object"


def refused(body: bytes) -> BadJson:
    with pytest.raises(BadJson) as caught:
        parse(body, max_depth=32)
    return caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"query": [[1, 2], [3', CUT),
        ('{"query": [[1, 2]],', CUT),
        ('{"query": "AAAA', "has no end (is the body cut off?)"),
        ('{"query": [[1,, 2]]}', VALUE),
        ("{\"query\": 'AAAA'}", VALUE),
        ('{"query": [[nan]]}', VALUE),
        ('{"query": True}', VALUE),
        ('{"query": [[.5]]}', VALUE),
        ("query=1", VALUE),
        ('{"query": [[1.]]}', "expected a comma or the end of the list or object"),
        ('{"query": [[1 2]]}', "expected a comma or the end of the list or object"),
        ('{"query" [[1]]}', "expected a colon"),
        ("{query: [[1]]}", "expected a name in double quotes"),
        ("{'query': [[1]]}", "expected a name in double quotes"),
        ('{"query": [[1]]}\n{"query": [[2]]}', "expected nothing after the object"),
        ('{"query": [[1]]} // rows', "expected nothing after the object"),
        ('{"query": "A\nA"}', "without line breaks, control characters"),
        ('{"query": "\\A"}', "escapes that JSON does not have"),
    ],
)
def test_a_fault_of_syntax_is_named_by_its_kind(text, words):
    error = refused(text.encode())
    assert error.message.startswith("the body is not valid JSON (byte ")
    assert words in error.message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{[0.125, 0.25, 0.125]}", "{[0.125, 0."),
        ('{"query":[[0.5, 0.25, 0.125,, 0.25, 0.125]]}', "25, 0.125,, 0.25, 0."),
        ('{"query":[[1, 2 3]]}', ""),  # a quotation mark is too near
        ('{"a":      [[1, 2 3]], "b": 1}', ""),  # so is the one that follows
        ('{"pin": "4111 1111 1111 1111" 1111 1111 1111}', ""),
        ('{"pin": 4111 1111 1111 1111 1111}', ""),
        ('{"pin":            4111 1111 1111}', "     4111 1111 1111}"),
        ('{"pin": "0123 4567 89\\01 2345 6789 0123"}', ""),  # a fault in a string
        ('{"pin": "0123 4567 89\x01 2345 6789 0123"}', ""),
        ('{"query":[[0.5, 0.25, 0.125,, 0.25, é.125]]}', "25, 0.125,, 0.25, é."),
    ],
)
def test_at_most_twenty_characters_without_text_are_shown_around_a_fault(text, shown):
    error = refused(text.encode())
    assert error.shown == (f"; around it: {shown}" if shown.isascii() and shown else "")
    assert not shown or shown not in error.message


@given(st.text(alphabet=string.printable + "é漢\x7f\u2028", max_size=60))
def test_an_error_of_any_text_shows_neither_letters_nor_quotes_of_it(text):
    try:
        parse(text.encode(), max_depth=32)
    except ServiceError as error:
        shown = error.shown.removeprefix("; around it: ")
        assert len(shown) <= 20
        assert shown.isascii()
        assert shown.isprintable() or not shown
        assert not set(shown) & set(string.ascii_letters + "\"'`")


@given(st.dictionaries(st.text(), st.integers()))
def test_no_json_is_taken_for_a_compressed_body(value):
    error = BadJson("another")
    assert unless_compressed(json.dumps(value).encode(), error) is error


@pytest.mark.timed
@pytest.mark.parametrize("piece", [b"A" * 2**20, b"=" * 2**20, b"A" * (2**20 - 1) + b"-", b" " * 2**20])
def test_a_piece_of_base64_is_explained_faster_than_a_body_of_its_size_is_parsed(piece):
    started = time.process_time()
    base64_fault(memoryview(piece))
    assert time.process_time() - started < 0.02


@pytest.mark.parametrize(
    ("odd", "words"), [("\n", "line breaks"), (" ", "white space"), ("-", "URL-safe"), ("_", "URL-safe")]
)
@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_odd_character_of_base64_is_named_wherever_it_is(odd, words, place):
    text = list(b64encode(b"\x00" * 300).decode())
    text[place] = odd
    assert words in base64_fault(memoryview("".join(text).encode()))
