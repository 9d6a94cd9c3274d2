"""Long strings: what is base64 is decoded on the way, everything else is left to whoever knows the field."""

from __future__ import annotations

import asyncio
import base64
import random

import pytest

from service.wire import long_string
from service.wire.json_document import parse
from service.wire.long_string import LongString


def read(text: str) -> LongString:
    found = asyncio.run(parse(f'{{"data":"{text}"}}'.encode(), max_depth=8))["data"]
    assert isinstance(found, LongString)
    return found


@pytest.mark.parametrize("part", [2**22, 1024])
@pytest.mark.parametrize("count", [3000, 3001, 3002, 3072])
def test_base64_is_decoded_at_once(count, part, monkeypatch):
    """In one call or in parts, with every padding."""
    monkeypatch.setattr(long_string, "_WHOLE_CHARACTERS", part)
    monkeypatch.setattr(long_string, "_PART_CHARACTERS", part)
    data = random.Random(count).randbytes(count)
    text = base64.b64encode(data).decode()
    found = read(text)
    assert found.decoded is not None
    assert bytes(found.decoded) == data
    assert bytes(found.text) == text.encode()


@pytest.mark.parametrize("odd", ["é", "\\/", " ", "-", "A", "=", "AA==AAAA", '\\"', "\\u0041"])
@pytest.mark.parametrize("part", [2**22, 1024])
def test_other_strings_are_not(odd, part, monkeypatch):
    """Wherever the odd piece stands; the content is that of the string as JSON has it."""
    monkeypatch.setattr(long_string, "_WHOLE_CHARACTERS", part)
    monkeypatch.setattr(long_string, "_PART_CHARACTERS", part)
    for at in (0, 1024, 4000, 8000):
        text = "QUJD" * (at // 4) + odd + "QUJD" * ((8000 - at) // 4)
        found = read(text)
        if found.decoded is not None:  # an ending `=` or the like can be right
            assert base64.b64decode(bytes(found.text), validate=True) == found.decoded
        assert bytes(found.text).decode() == text.replace("\\/", "/").replace('\\"', '"').replace("\\u0041", "A")
