"""Body faults: the kind of a fault of syntax is named, and no text of a caller is shown."""

import json
import string
import time
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadJson, ServiceError
from service.wire.body_faults import CUT as CUT_OFF
from service.wire.body_faults import base64_fault, foreign, is_cut
from service.wire.json_document import parse

CUT, CONSTANTS = "is it cut off?", "JSON has no NaN and no Infinity"
TRAILING = "a comma before the end of a list or object is one too many"
NUMBER = "a number is written as 0.5, -1.0 or 1e-3"


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
        ('{"query": [[1, 2],]}', TRAILING),
        ('{"query": [[1, 2]], \n}', TRAILING),
        ('{"query": [[1,, 2]]}', "a comma has no value before it"),
        ("{'query': [[1]]}", "strings and names take double quotes"),
        ("{\"query\": 'AAAA'}", "strings and names take double quotes"),
        ('{"query": [[nan]]}', CONSTANTS),
        ('{"query": [[1, -inf]]}', CONSTANTS),
        ('{"query": [[-NAN]]}', CONSTANTS),
        ('{"query": [[True]]}', "JSON writes true, false and null"),
        ('{"query": None}', "JSON writes true, false and null"),
        ('{"query": undefined}', "JSON writes true, false and null"),
        ('{"query": [[1]]} // rows', "JSON has no comments"),
        ('{"query": [[1]] /* rows */}', "JSON has no comments"),
        ("# rows\n{}", "JSON has no comments"),
        ('{"query": array([[1.]])}', "Python's print of an array; send its tolist()"),
        ('{"query": np.array([[1]])}', "Python's print of an array; send its tolist()"),
        ('{"query": tensor([[1]])}', "Python's print of an array; send its tolist()"),
        ('{"query": [[1, ..., 2]]}', "dots stand for no numbers"),
        ('{"query": ((1, 2))}', "a list takes square brackets"),
        ('{"query": [[.5]]}', NUMBER),
        ('{"query": [[1.]]}', NUMBER),
        ('{"query": [[+1]]}', NUMBER),
        ('{"query": [[007]]}', NUMBER),
        ('{"query": [[0x7f]]}', NUMBER),
        ('{"query": [[1 2]]}', "expected a comma or the end of the list or object"),
        ('{"query" [[1]]}', "expected a colon"),
        ("{query: [[1]]}", "expected a name in double quotes"),
        ('{"query": [[1]]}\n{"query": [[2]]}', "expected nothing after the object"),
        ('{"query": "A\nA"}', "a string has a line break or a control character"),
        ('{"query": "\\A"}', "a string has an escape that JSON does not have"),
        ("query=1", "expected a value"),
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


@pytest.mark.parametrize("end", ["", "]", "]]", '],"key'])
def test_a_long_body_that_is_cut_off_is_told_from_one_of_rare_values(end):
    body = ('{"query":[[' + "0.5," * 60_000 + "0.5" + end).encode()
    assert refused(body).message == f"the body is not valid JSON: {CUT_OFF}"
    rare = ('{"query":[[NaN,' + "0.5," * 60_000 + "0.5]]}").encode()
    assert "which allow neither NaN nor an integer beyond 64 bits" in refused(rare).message


@given(st.binary(max_size=40))
def test_no_beginning_of_a_body_makes_the_explanation_fail(body):
    for found in (foreign(body), is_cut(body), base64_fault(memoryview(body), 0, 40)):
        assert isinstance(found, str | bool | None)


@given(st.dictionaries(st.text(), st.integers()))
def test_no_json_and_no_safetensors_header_is_taken_for_another_form(value):
    text = json.dumps(value).encode()
    assert foreign(text) is None
    assert foreign(text + b" " * 9) is None


@pytest.mark.timed
@pytest.mark.parametrize("piece", [b"A" * 2**21, b"=" * 2**21, b"A" * (2**21 - 1) + b"-", b" " * 2**21])
def test_a_piece_of_base64_is_explained_faster_than_a_body_of_its_size_is_parsed(piece):
    started = time.process_time()
    base64_fault(memoryview(piece), 0, 2**21)
    assert time.process_time() - started < 0.02


@pytest.mark.parametrize("odd", ["\n", " ", "-", "_", "*", "\x00"])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_odd_character_of_base64_is_told_wherever_it_is(odd, place):
    text = list(b64encode(b"\x00" * 300).decode())
    text[place] = odd
    found = base64_fault(memoryview("".join(text).encode()), 0, 400)
    assert ("white space" in found, "URL-safe" in found, "none of its alphabet" in found) == (
        odd in "\n ",
        odd in "-_",
        odd in "*\x00",
    )
