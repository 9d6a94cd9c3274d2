"""Bodies: the fast parser means what Python's strict parser means, refuses what it refuses, and never holds the loop."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import (
    BadJson,
    CostLimit,
    DuplicateKey,
    InvalidInput,
    JsonTooDeep,
    Malformed,
    NonFinite,
    ServiceError,
)
from service.wire import json_document
from service.wire.json_document import parse
from service.wire.number_list import NumberList
from tests.unit.wire.strict_reference import Documents, has_infinity, regular, strict

MAX_DEPTH = 32
LONGEST_STEP_S = 0.020  # of processor time, so that neighbours on the machine do not count


def parsed(body: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    return parse(body, max_depth=max_depth)


def refused(body: bytes, max_depth: int = MAX_DEPTH) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        parsed(body, max_depth)
    assert len(caught.value.message) < 300
    return caught.value


def numbers(body: bytes, key: str = "query") -> NumberList:
    value = parsed(body)[key]
    assert isinstance(value, NumberList)
    return value


def rows(count: int, width: int = 8, fill: str = "0.25") -> str:
    return "[" + ",".join(["[" + ",".join([fill] * width) + "]"] * count) + "]"


def body_of(text: str) -> bytes:
    return ('{"query":' + text + "}").encode()


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner) | st.dictionaries(st.text(), inner)


class TestSameAsPython:
    """The fast way and Python's strict parser agree on every document."""

    @pytest.mark.parametrize("seed", range(6))
    def test_random_documents_are_parsed_as_by_the_reference(self, seed):
        """Random documents, valid and mutated: the same verdict and, where valid, the same values."""
        documents = Documents(seed)
        for _ in range(150):
            document = documents.document()
            same_as_python(document.encode(), max_depth=6)
            for _ in range(4):
                same_as_python(documents.broken(document).encode(), max_depth=6)

    @settings(max_examples=120)
    @given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), nest))
    def test_documents_of_the_standard_library_are_parsed_alike(self, value):
        """Anything Python can write, in both styles, reads back as Python reads it."""
        for indent in (None, 2):
            same_as_python(json.dumps({"value": value}, indent=indent).encode(), max_depth=MAX_DEPTH)
            same_as_python(
                json.dumps({"value": value}, indent=indent, ensure_ascii=False).encode(), max_depth=MAX_DEPTH
            )

    @settings(max_examples=100)
    @given(st.binary(max_size=200))
    def test_any_bytes_are_parsed_as_by_the_reference(self, body):
        same_as_python(body, max_depth=MAX_DEPTH)

    @pytest.mark.parametrize("seed", range(3))
    def test_large_bodies_with_one_broken_byte_are_parsed_as_by_the_reference(self, seed):
        """One byte changed anywhere in a body of several slices: the verdict is Python's."""
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((40, 30, 40)).astype(np.float32)
        body = b'{"query":' + orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY) + b',"encoding":"list"}'
        for _ in range(12):
            at = int(rng.integers(len(body)))
            put = rng.choice([b",", b"]", b"[", b'"', b"-", b"e", b" ", b"5", b"x", b""])
            same_as_python(body[:at] + bytes(put) + body[at + 1 :], max_depth=MAX_DEPTH)


def same_as_python(body: bytes, max_depth: int) -> None:
    try:
        expected = strict(body, max_depth=max_depth)
    except Malformed as error:
        expected = error
    try:
        got: Any = parsed(body, max_depth)
    except ServiceError as error:
        got = error
    if isinstance(expected, Malformed):
        assert isinstance(got, Malformed), body
    elif has_infinity(expected):
        assert isinstance(got, InvalidInput | BadJson) or has_fault(got), body
    elif not isinstance(expected, dict):
        assert isinstance(got, InvalidInput), body
    else:
        assert_same(got, expected)


def has_fault(value: Any) -> bool:
    if isinstance(value, NumberList):
        return value.fault is not None
    if isinstance(value, dict | list):
        return any(map(has_fault, value.values() if isinstance(value, dict) else value))
    return False


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(got, NumberList):
        known = regular(expected)
        assert (known is None) == (got.fault is not None)
        if known is not None:
            assert got.values.tobytes() == known[0].tobytes()
            assert got.shape == known[1]
    elif isinstance(got, dict | list):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for key in got if isinstance(got, dict) else range(len(got)):
            assert_same(got[key], expected[key])
    else:
        assert type(got) is type(expected)
        assert got == expected


class TestSyntax:
    @pytest.mark.parametrize(
        "text",
        [
            "[1,2,]", "[1 2]", "[01]", "[1.]", "[.5]", "[+1]", "[1,,2]", "[,1]", "[1],", "[1]]", "[[1]", "['1']", "[1e]",
            "[0x1]", "[1 // no\n]", "[1 /* no */]", "[tru]", "[truefalse]", "[-true]", '["-inf]', '["-inf""-inf"]', "[1\x0b]",
            "[-]", "[--1]", "[1-1]", '["a" "b"]', '["\x01"]', '["\\x"]', "[NaN]", "[Infinity]", "[-Infinity]", "(1)",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("size", [1, 400, 70_000])
    def test_malformed_json_is_bad_json_in_arrays_of_any_size(self, text, size):
        """J1, J5: the same verdict alone and behind any number of good elements."""
        padded = text.replace("[", "[" + "0.5," * (size - 1), 1) if size > 1 else text
        assert isinstance(refused(body_of(padded)), BadJson)

    def test_a_truncated_body_is_bad_json_at_any_length(self):
        body = (
            b'{"query":'
            + rows(300).encode()
            + b',"key":{"dtype":"float32","shape":[1],"data":"'
            + b"AAAA" * 600
            + b'"}}'
        )
        for end in [*range(0, len(body), 97), *range(len(body) - 30, len(body))]:
            assert isinstance(refused(body[:end]), BadJson)

    def test_a_message_names_the_byte_and_repeats_no_input(self):
        """The offset of what is wrong, also behind a large array and inside one."""
        body = b'{"query":' + rows(300).encode() + b',"secret":secret}'
        why = "expected a value: a number such as 0.5, a list, an object, a string, true, false or null"
        assert refused(body).message == f"the body is not valid JSON (byte {body.index(b':secret}') + 1}): {why}"
        body = b'{"query":' + rows(300).replace("0.25,0.25]]", "0.25,0.2.5]]").encode() + b"}"
        why = "expected a comma or the end of the list or object"
        assert refused(body).message == f"the body is not valid JSON (byte {body.index(b'.5]]')}): {why}"

    def test_syntax_comes_before_meaning_anywhere_in_the_body(self):
        """A number beyond float64 or a string in a tensor is only reported if the whole body parses."""
        for odd in ("1e999", '"x"', "null"):
            body = '{"query":[' + f"{odd}," * 500 + '1],"key":[1,]}'
            assert isinstance(refused(body.encode()), BadJson)
            body = f'{{"query":[{odd}],"key":' + rows(200) + ',"value":[' + "1," * 400 + "]}"
            assert isinstance(refused(body.encode()), BadJson)

    @pytest.mark.parametrize(
        "body", [b"", b" ", b"nul", b"{", b"}", b"{}{}", b"{}x", b'{"a"}', b'{"a":}', b"{,}", b'{"a":1,}']
    )
    def test_an_empty_or_broken_body(self, body):
        """J14."""
        assert isinstance(refused(body), BadJson)

    @pytest.mark.parametrize("body", [b"null", b"[]", b'"x"', b"1", b"true", b"[{}]", b"[" + b"1," * 5000 + b"1]"])
    def test_the_top_must_be_an_object(self, body):
        """J14."""
        assert type(refused(body)) is InvalidInput

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
    @pytest.mark.parametrize("text", ['{"query":[[1]]}', body_of(rows(2000)).decode()])
    def test_only_utf_8_without_a_mark(self, encoding, text):
        """J9."""
        assert isinstance(refused(text.encode(encoding)), BadJson)

    @pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80"])
    @pytest.mark.parametrize("place", [b'{"k":"%b"}', b'{"%b":1}', b'{"k":"' + b"A" * 3000 + b'%b"}', b"%b", b"{}%b"])
    def test_invalid_utf_8_anywhere(self, wrong, place):
        assert isinstance(refused(place % wrong), BadJson)

    def test_characters_survive_the_slices_of_the_check(self):
        text = "é漢😀" * 50_000
        value = parsed(json.dumps({"k": text}, ensure_ascii=False).encode())["k"]
        assert value == text

    def test_control_characters_in_strings_of_any_length(self):
        for length in (1, 5000):
            for control in ("\x00", "\n", "\x1f"):
                assert isinstance(refused(body_of('"' + "A" * length + control + '"')), BadJson)


class TestDepth:
    @pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 120, 1_000, 100_000, 250_000, 2**24])
    @pytest.mark.parametrize("start", ["", '{"query":', '{"unknown":{"a":', '{"query":[1,', '{"query":["a",'])
    def test_any_depth_above_the_limit_is_json_too_deep(self, depth, start):
        """J2, J3: in every field, known or not, whether it closes or not."""
        closing = "".join({"[": "]", "{": "}"}[bracket] for bracket in reversed(start) if bracket in "[{")
        for end in ("", "]" * depth + closing):
            error = refused((start + "[" * depth + end).encode())
            # More lists than a body may have are refused before they are parsed, by the depth of the first of them.
            assert isinstance(error, JsonTooDeep if end or depth >= 100_000 else Malformed)

    def test_many_lists_side_by_side_or_in_a_string_are_not_too_deep(self):
        for text in ("[" + "[[1]]," * 30_000 + "1]", '["\\"' + "[" * 100 + '",' + "[1]," * 30_000 + "1]"):
            assert isinstance(refused(body_of(text)), CostLimit)

    def test_objects_count_as_lists_do(self):
        for count in (MAX_DEPTH + 1, 4000):
            assert isinstance(refused(b'{"a":' * count + b"1" + b"}" * count), JsonTooDeep)

    def test_the_limit_itself_is_allowed(self):
        for inner in ("1", ",".join(["1"] * 600)):
            for depth in (1, 2, 5, MAX_DEPTH - 1):
                body = body_of("[" * depth + inner + "]" * depth)
                assert parsed(body, max_depth=depth + 1)
                assert isinstance(refused(body, max_depth=depth), JsonTooDeep)

    def test_a_limit_beyond_what_python_parses_is_no_fault(self):
        for depth in (1500, 4000):
            assert isinstance(refused(b'{"a":' * depth + b"1" + b"}" * depth, max_depth=20_000), JsonTooDeep)

    def test_brackets_in_strings_do_not_count(self):
        for count in (40, 900, 5000):
            assert parsed(body_of('"' + "[" * count + '"'))
            assert parsed(body_of('["\\"' + "[{" * count + '"]'))


class TestKeys:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"shape":1,"shape":1}',
            b'{"a":{"layer":1,"b":2,"layer":3}}',
            b'{"a":[{"k":1,"k":1}]}',
            b'{"query":1,"qu\\u0065ry":2}',
            b'{"query":%b,"query":%b}' % (rows(100).encode(), rows(100).encode()),
            b'{"data":"%b","data":"%b"}' % (b"A" * 2000, b"A" * 2000),
            b'{"a":{"":1,"":2},"b":3}',
        ],
    )
    def test_a_key_may_stand_once_in_an_object(self, body):
        """J4."""
        assert isinstance(refused(body), DuplicateKey)

    def test_the_same_key_in_two_objects_is_fine(self):
        assert parsed(b'{"a":{"k":1},"b":{"k":1},"k":{"a":{"k":[{"k":1},{"k":2}]}}}')

    def test_no_caller_can_name_an_extracted_array(self):
        """Strings that look like what stands for a piece are strings."""
        body = b'{"query":%b,"a":"0123456789abcdef0","b":"00"}' % rows(200).encode()
        assert {**parsed(body), "query": 0} == {"query": 0, "a": "0123456789abcdef0", "b": "00"}

    def test_keys_that_look_like_structure(self):
        value = parsed(b'{"a\\":[1,":%b,"}:{":%b,"x":[":",%b]}' % ((rows(100).encode(),) * 3))
        assert value['a":[1,'].shape == (100, 8)
        assert value["}:{"].shape == (100, 8)
        assert value["x"].fault is not None


class TestNumbers:
    @pytest.mark.parametrize("digits", [4_301, 1_000_000])
    @pytest.mark.parametrize("place", ["%s", "[%s]", "[1,%s]", "[%s,1]", "[[1],[%s]]", '{"a":%s}', "-%s"])
    def test_integers_beyond_every_parser_are_bad_json(self, digits, place):
        """J7."""
        body = body_of(place % ("7" * digits))
        error = refused(body)
        assert isinstance(error, BadJson)

    def test_many_numbers_just_below_the_limit_are_taken(self):
        body = body_of("[{}," + ",".join(["7" * 4300] * 30) + "]")
        parsed(body)

    @pytest.mark.parametrize("number", ["1e999", "-1e999", "1E400", "9" * 400 + ".0"])
    def test_numbers_beyond_float64_are_not_finite(self, number):
        """J6: outside tensors here, in tensors when they are decoded."""
        error = refused(('{"scale":' + number + "}").encode())
        assert isinstance(error, NonFinite)
        assert error.param == "/scale"
        assert refused(('{"a":{"b":[0,' + number + "]}}").encode()).param == "/a/b/1"
        assert refused(('{"Odd name":{"b":[0,' + number + "]}}").encode()).param is None
        fault = numbers(body_of("[" + "0," * 500 + number + "]")).fault
        assert fault is not None
        assert fault.index == (500,)

    def test_values_equal_those_of_python(self):
        """Every form of a number, also those the fast parser refuses, gives the bits of Python's float."""
        texts = [t for t in Documents.NUMBERS if t != "1e999"]
        body = body_of("[" + ",".join(texts * 60) + "]")
        assert numbers(body).values.tobytes() == np.array([float(json.loads(t)) for t in texts] * 60).tobytes()

    def test_random_bit_patterns_round_trip(self):
        """Shortest and 17-digit decimals of any finite float64, denormals included."""
        bits = np.random.default_rng(5).integers(0, 2**64, 20_000, dtype=np.uint64)
        values = bits.view(np.float64)
        values = values[np.isfinite(values)]
        for text in (",".join(map(repr, values.tolist())), ",".join(f"{v:.16e}" for v in values.tolist())):
            assert numbers(body_of(f"[{text}]")).values.tobytes() == values.tobytes()


class TestLists:
    @pytest.mark.parametrize(
        "shape", [(3000,), (1, 900), (900, 1), (30, 40), (5, 6, 7, 8), (2,) * 8, (1, 1, 600, 1), (300, 2)]
    )
    @pytest.mark.parametrize("indent", [None, 1])
    def test_shapes_and_values_of_regular_lists(self, shape, indent):
        values = np.arange(np.prod(shape)).reshape(shape) / 8
        found = numbers(json.dumps({"query": values.tolist()}, indent=indent).encode())
        assert found.shape == shape
        assert found.fault is None
        assert (found.values == values.reshape(-1)).all()

    def test_short_flat_lists_stay_python_lists_and_others_do_not(self):
        assert parsed(b'{"shape":[1,2]}') == {"shape": [1, 2]}
        assert numbers(body_of("[[1,2],[3,4.5]]")).shape == (2, 2)
        assert numbers(body_of("[" + "1," * 64 + "1]")).shape == (65,)

    @pytest.mark.parametrize(
        "number",
        [2**53 + 1, -(2**53) - 1, 2**63 + 1, -(2**63), 2**70 + 1, 10**400],
        ids=["2^53+1", "-2^53-1", "2^63+1", "-2^63", "2^70+1", "10^400"],
    )
    @pytest.mark.parametrize("size", [1, 64, 65, 3000, 2**16])
    def test_flat_lists_of_integers_that_float64_would_round_stay_python_lists(self, number, size):
        """They may be offsets, of which any number has a meaning, and as many as there are sequences."""
        if size > 3000 and abs(number) > 2**64:
            return  # only the second parser takes it, and the body is too long for that
        written = {"query": [number, *range(size - 1)]}
        body = json.dumps(written).encode()
        assert parsed(body) == written

    @pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64])
    def test_so_do_negative_integers_beside_those_that_only_an_unsigned_type_holds(self, number):
        written = {"query": [-1, number, *range(63)]}
        assert parsed(json.dumps(written).encode()) == written

    @pytest.mark.parametrize("text", ["9007199254740993", "9223372036854775809", "1" + "0" * 30])
    def test_other_large_integers_are_rounded_like_those_of_python(self, text):
        expected = float(int(text))
        long = f"[{text}{',1' * 2**16}]"  # for integers beyond 64 bits the body would be too long
        for body in (*([long] if expected < 2**64 else []), f"[0.5,{text}{',1' * 99}]", f"[[{text},1],[2,3]]"):
            assert expected in numbers(body_of(body)).values

    def test_a_list_between_numbers_is_found(self):
        """simdjson flattens it: [[1, [2]], [3, 4]] has four numbers and two lists of two."""
        for text in ("[[1,[2]],[3,4]]", "[[1,2],[3,[[4]]]]", "[[[1,2],[3,[4]]],[[5,6],[7,8]]]"):
            fault = numbers(body_of(text)).fault
            assert fault is not None
            assert fault.is_shape
        assert numbers(b'{"id":"[","query":[[1,2],[3,4]]}').fault is None

    def test_booleans_and_minus_infinity_are_remembered(self):
        found = numbers(body_of("[" + "0.5," * 200 + "true,false,1]"))
        assert found.first_boolean == 200
        assert found.values[200:].tolist() == [1, 0, 1]
        found = numbers(body_of("[[" + "0," * 300 + '1],["-inf",' + "0," * 299 + '"-inf"]]'))
        assert found.first_minus_inf == 301
        assert np.flatnonzero(np.isneginf(found.values)).tolist() == [301, 601]

    def test_a_caller_may_send_the_placeholder_of_minus_infinity(self):
        texts = ['"-inf"', "-7e9", "-6e8", "-9e7", "-7000000000"]
        for count in range(1, len(texts) + 1):
            found = numbers(body_of("[" + ",".join(texts[:count] * 200) + "]"))
            expected = [-np.inf, -7e9, -6e8, -9e7, -7e9][:count] * 200
            assert found.values.tolist() == expected

    @pytest.mark.parametrize(
        ("wrong", "what"),
        [
            ("null", "null"),
            ('"1.5"', "a string"),
            ('"NaN"', "a string"),
            ('"a:b]}"', "a string"),
        ],
    )
    @pytest.mark.parametrize("at", [0, 1, 600, 45_000, 59_999])
    def test_the_first_non_number_is_reported_by_its_index(self, wrong, what, at):
        """J11: the first only, wherever it stands."""
        items = ["0"] * 60_000
        items[at] = items[-1] = wrong
        fault = numbers(body_of("[" + ",".join(items) + "]")).fault
        assert fault is not None
        assert (fault.index[0], fault.what) == (at, what)

    @pytest.mark.parametrize("wrong", ["null", '"1.5"', "true", "{}", '"-inf"', "1e999", "[1]"])
    def test_80_000_wrong_elements_are_one_error(self, wrong):
        """J12."""
        body = body_of("[" + ",".join([wrong] * 80_000) + "]")
        with contextlib.suppress(InvalidInput, CostLimit, BadJson):
            parsed(body)

    @pytest.mark.parametrize("at", [0, 1, 50, 299])
    @pytest.mark.parametrize("row", ["[0.25]", "0.25", "[[0.25]]", "[]", "[" + "0.25," * 8 + "0.25]", "[[0.25],0.25]"])
    def test_ragged_lists_are_reported_by_the_first_odd_entry(self, at, row):
        """J16."""
        entries = [rows(1)[1:-1]] * 300
        entries[at] = row
        fault = numbers(body_of("[" + ",".join(entries) + "]")).fault
        assert fault is not None
        assert fault.is_shape
        assert fault.index == ((at,) if at else (1,))


class TestStrings:
    def test_long_strings_keep_their_content(self):
        text = "AAAB" * 1000 + "/+"
        assert parsed(body_of(f'"{text}"'))["query"] == text

    def test_only_the_long_text_of_data_stays_where_it_is(self):
        text = "AAAB" * 2**15
        body = json.dumps(
            {"query": {"data": text, "other": text}, "b": "short", "data": [text[:9]], "c": {"data": "short"}}
        )
        found = parsed(body.encode())
        assert bytes(found["query"].pop("data").text) == text.encode()
        assert found == {"query": {"other": text}, "b": "short", "data": [text[:9]], "c": {"data": "short"}}

    @pytest.mark.parametrize("odd", ["\\n", "é", '\\"', "\\u0000"])
    def test_long_data_with_other_characters_is_an_ordinary_string(self, odd):
        text = f'{{"data":"{"AAAB" * 2**15}{odd}"}}'
        assert parsed(text.encode()) == json.loads(text)

    @pytest.mark.parametrize("odd", [b"\n", b"\0", b"\xff"])
    def test_long_data_with_bytes_that_no_string_has_is_bad_json(self, odd):
        assert isinstance(refused(b'{"data":"' + b"AAAB" * 2**15 + odd + b'"}'), BadJson)

    def test_long_data_in_malformed_text_is_bad_json(self):
        for text in ('{"data":"%s', '{"data":"%s",}', '{"data":"%s""b":1}', '{"%s"}', '{"data":"%s"}"', '"%s'):
            assert isinstance(refused((text % ("AAAB" * 2**15)).encode()), BadJson)

    def test_escaped_slashes_are_slashes(self):
        """PHP writes them."""
        text = "QUJD/aaa" * 50_000
        assert parsed(body_of('"' + text.replace("/", "\\/") + '"'))["query"] == text

    @pytest.mark.parametrize("escape", ["\\n", "\\u0041", "\\\\", '\\"', "\\/"])
    @pytest.mark.parametrize("shift", range(7))
    def test_no_escape_is_split_between_slices(self, escape, shift):
        content = "x" * shift + escape * 50_000
        assert parsed(body_of(f'"{content}"'))["query"] == json.loads(f'"{content}"')

    @pytest.mark.parametrize("wrong", ["\\x", "\\u12g4", "\\u123", "\\"])
    def test_wrong_escapes(self, wrong):
        assert isinstance(refused(body_of('"' + "A" * 3000 + wrong + '"')), BadJson)


class TestLimits:
    @pytest.mark.parametrize("filler", ['"a":1,', '"k":{},', '"k":[1],', '"' + "k" * 9 + '":1,'])
    def test_too_many_values_outside_arrays_are_refused(self, filler):
        body = ('{"z":[' + "{" + filler * (300_000 // len(filler)) + '"y":1}]}').encode()
        assert type(refused(body)) is CostLimit

    def test_text_that_is_no_json_is_bad_json_at_any_size(self):
        for body in (
            b"x" * 2**20,
            b'{"a":' + b"x" * 2**20,
            b"\x00" * 2**20,
            b"{" + b"'a':1," * 2**17,
            b"{" + b'"a":NaN,' * 1000,
        ):
            assert isinstance(refused(body), BadJson | CostLimit)

    def test_many_small_lists_fit(self):
        lists = {f"k{i}": [i, [i, "x"], {"v": None}] for i in range(600)}
        assert parsed(json.dumps(lists).encode()) == lists


MOST = json_document.MAX_TEXT_NUMBERS
FLOATS = [*map(repr, np.random.default_rng(7).standard_normal(MOST).tolist())]


def listed(entries: list[str], width: int = 0) -> str:
    """A flat list, or rows of `width`."""
    if not width:
        return "[" + ",".join(entries) + "]"
    return listed([listed(entries[at : at + width]) for at in range(0, len(entries), width)])


# Bodies that held the event loop for 20 to 255 ms, and what now refuses them before they are parsed.
SLOW = {
    "lists of two": (listed(FLOATS, 2), "lists"),
    "lists of one": (listed(FLOATS, 1), "lists"),
    "[null]": (listed(["[null]"] * MOST), "lists"),
    "empty lists": (listed(["[]"] * 20_000), "lists"),
    "many numbers": (listed(["0"] * (2 * MOST)), "values"),
    "nulls": (listed(["null"] * MOST), "elements of lists that do not have only numbers"),
    "booleans in rows": (listed(["true"] * MOST, 512), "elements of lists that do not have only numbers"),
    "minus infinities": (listed(['"-inf"'] * MOST), "quotation marks"),
    "long digits": (listed(["0." + "7" * 4300] * 3600), "bytes outside strings"),
    "white space": (" " * 15 * 2**20 + "1", "bytes outside strings"),
    "white space and a quotation mark in a string": ('["\\"",' + " " * 15 * 2**20 + "1]", "bytes outside strings"),
    "digits beyond a float64": (listed([f"0.{'7' * 100}"] * 20_000), "digits beyond the 18th of a number"),
    "19 digits": (listed([f"{abs(float(x)):.18e}" for x in FLOATS[: MOST // 2]]), "digits beyond the 18th of a number"),
    "escapes": ('"' + "\\n" * 2**20 + '"', "escaped or non-ASCII characters"),
    "other alphabets": ('"' + "é" * 2**20 + '"', "escaped or non-ASCII characters"),
    "objects": (listed(['{"a":1}'] * 5000), "objects"),
    "members": (json.dumps({f"k{i}": i for i in range(9000)}), "members of objects"),
    "objects and nulls": (listed(["{}", *["null"] * 10_000]), "entries in lists of objects"),
}
# And those that are parsed within the rule.
FAST = {
    "rows of 512 in full precision": listed(FLOATS, 512),
    "one flat list": listed(FLOATS),
    "rows of 32": listed(FLOATS, 32),
    "booleans": listed(["true"] * 60_000, 200),
    "a causal bias of 256 x 256": listed(
        [x if i % 256 <= i // 256 else '"-inf"' for i, x in enumerate(FLOATS[: 2**16])], 256
    ),
    "a bias of as many minus infinities as there may be": listed(
        ["0.5" if i % 3 == 2 else '"-inf"' for i in range(2**16 - 256)], 256
    ),
    "base64 of 16 MiB": '"' + "QUJD" * (4 * 2**20 - 10) + '"',
    "base64 with the escaped slashes of PHP": '"' + ("QUJDREVG" * 7 + "\\/") * 200_000 + '"',
    "brackets in a string": '[{"id":"[[["},' + listed(FLOATS) + "]",
}


class TestTextLimits:
    """No text, legal or not, holds the event loop for more than 20 ms: it is refused before it is parsed, or it is fast."""

    @pytest.mark.parametrize("name", SLOW)
    def test_slow_text_is_refused_by_a_limit_that_the_message_names(self, name):
        text, what = SLOW[name]
        error = refused(body_of(text))
        assert isinstance(error, CostLimit)
        assert what in error.message
        assert "ATTENTION_MAX_TEXT_NUMBERS is 262,144" in error.message
        assert all(form in error.message for form in ("base64", "safetensors"))

    @pytest.mark.parametrize("name", [name for name in SLOW if not SLOW[name][1].startswith(("elements", "entries"))])
    def test_it_is_refused_before_it_is_parsed(self, name, monkeypatch):
        monkeypatch.setattr("simdjson.Parser", None)
        monkeypatch.setattr("json.JSONDecoder", None)
        assert isinstance(refused(body_of(SLOW[name][0])), CostLimit)

    @pytest.mark.parametrize("name", FAST)
    def test_other_text_is_taken(self, name):
        assert parsed(body_of(FAST[name]))

    @pytest.mark.timed
    @pytest.mark.parametrize("name", [*SLOW, *FAST, "an integer beyond 64 bits"])
    def test_no_text_takes_longer_than_the_rule(self, name):
        """Of processor time, the least of three; bodies of 1 MiB and more run in the thread, in several calls."""
        odd = "[18446744073709551616," + FAST["one flat list"][1:]
        body = body_of(odd if name not in {**SLOW, **FAST} else FAST.get(name) or SLOW[name][0])
        took = []
        for _ in range(3):
            start = time.process_time()
            with contextlib.suppress(ServiceError):
                parsed(body)
            took.append(time.process_time() - start)
        assert min(took) < LONGEST_STEP_S * (2 if len(body) >= 2**20 else 1)

    @pytest.mark.parametrize("num_strings", [10, 30, 100, 10_000])
    def test_what_stands_in_strings_does_not_count(self, num_strings):
        strings = [f"[{{:,{i % 7}" * (100_000 // num_strings) for i in range(num_strings)]
        assert parsed(json.dumps({"id": strings}).encode())
        too_many = refused(json.dumps({"id": strings, "query": [[[]]] * 9000}).encode())
        assert "the body has 18,002 lists, expected at most 16,384" in too_many.message

    def test_the_limit_of_numbers_is_inclusive(self):
        assert len(numbers(body_of("[" + "0," * (MOST - 1) + "0]")).values) == MOST
        assert "262,145 numbers written as text" in refused(body_of("[" + "0," * MOST + "0]")).message

    def test_all_arrays_of_a_body_count_together(self):
        half = "[" + "0," * (MOST // 2 - 1) + "0]"
        assert len(parsed(f'{{"query":{half},"key":{half}}}'.encode())) == 2
        assert isinstance(refused(f'{{"query":{half},"key":{half[:-1]},0]}}'.encode()), CostLimit)

    def test_a_larger_setting_raises_every_limit(self):
        for text, _ in SLOW.values():
            body = body_of(text)
            with contextlib.suppress(Malformed, InvalidInput):
                parse(body, max_depth=MAX_DEPTH, max_numbers=2**34)

    @pytest.mark.parametrize("rare", ["18446744073709551616", "1e999", '"\\ud800"', "NaN"])
    def test_what_only_the_second_parser_reads_is_read_in_short_bodies(self, rare):
        """It takes 20 times as long. A long body is refused with both possible reasons."""
        short = body_of(f"[{rare},{'0,' * 1000}0]")
        with contextlib.suppress(Malformed):
            assert parsed(short)
        error = refused(body_of(f"[{rare},{'0,' * (MOST - 100)}0]"))
        assert isinstance(error, BadJson)
        assert "an integer beyond 64 bits" in error.message

    def test_refused_text_is_not_kept(self):
        for name in ("many numbers", "empty lists", "[null]"):
            body = body_of(SLOW[name][0])
            tracemalloc.start()
            try:
                refused(body)
                assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
            finally:
                tracemalloc.stop()
