from __future__ import annotations

import contextlib
import json

import pytest

from service.errors import LayerError
from service.layers.safetensors_header import parse_object


def test_a_valid_object_is_parsed_as_in_json():
    assert parse_object(b' {"a": [1, 2.5, "\xc3\xa9", null, true]} ', "it", LayerError) == {
        "a": [1, 2.5, "é", None, True]
    }


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key"),
        (b'{"b": {"a": 1, "\\u0061": 2}}', "duplicate key"),
        (b'{"a": NaN}', "not finite"),
        (b'{"a": -Infinity}', "not finite"),
        (b'{"a": 1e999}', "not finite"),
        (b'{"a": "\\ud800", "b": 1e-999, "c": -1e999}', "not finite"),
        (b'{"a": 18446744073709551616}', "integer that is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "integer that is too large"),
        (b'{"a": ' * 100_000, "too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "too deeply"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a": "\x01"}', "not valid JSON"),
    ],
    ids=range(20),
)
def test_ambiguous_json_is_refused(raw, why):
    """One LayerError that names the text and repeats nothing of it."""
    with pytest.raises(LayerError, match=why) as caught:
        parse_object(raw, "the header", LayerError)
    assert caught.value.message.startswith("the header ")
    assert len(caught.value.message) < 100


@pytest.mark.parametrize("opening", ['{"a":', "[", '[{"a":'])
@pytest.mark.parametrize("depth", [1, 2, 127, 128, 253, 254, 255, 256, 300, 500, 700, 1000, 1024, 1025, 2000, 5000])
def test_any_depth_is_an_object_or_one_clean_refusal(opening, depth):
    closing = opening.translate(str.maketrans("[{", "]}", '"a:'))[::-1]
    text = b'{"a":' + (opening * depth + "1" + closing * depth).encode() + b"}"
    if depth <= 100:
        assert parse_object(text, "the header", LayerError) == json.loads(text)
    with contextlib.suppress(LayerError):
        assert parse_object(text, "the header", LayerError) == json.loads(text)
