"""Outlines: counting commas between few brackets gives the same bytes as dropping everything else."""

from __future__ import annotations

import random

import numpy as np
import orjson
import pytest

from service.wire import outline
from service.wire.outline import counted_outline, few_brackets

NOT_OUTLINE = bytes(byte for byte in range(256) if byte not in b"[],")


def counted(text: bytes) -> bytes | None:
    positions = few_brackets(text)
    return None if positions is None else counted_outline(text, positions)


@pytest.mark.parametrize("seed", range(200))
def test_on_any_text(seed, monkeypatch):
    """Wherever brackets and commas stand, balanced or not."""
    rng = random.Random(seed)
    text = bytes(rng.choices(b"0,[]1 -e.", weights=[9, 6, rng.random(), rng.random(), 9, 1, 1, 1, 1], k=600))
    monkeypatch.setattr(outline, "_MIN_BYTES_A_BRACKET", 2)
    assert counted(text) in (None, text.translate(None, NOT_OUTLINE))


@pytest.mark.parametrize("shape", [(40_000,), (1, 90_000), (70_000, 1), (3, 70_000), (40, 512), (2, 9, 300)])
def test_on_rows_of_any_width(shape):
    """More commas in a row than 16 bits can count, and rows too narrow to be worth it."""
    text = orjson.dumps(np.zeros(shape, dtype=np.int8), option=orjson.OPT_SERIALIZE_NUMPY)
    assert counted(text) == (None if shape == (70_000, 1) else text.translate(None, NOT_OUTLINE))
    assert counted(text[5:-5]) in (None, text[5:-5].translate(None, NOT_OUTLINE))


def test_many_brackets_behind_few_are_noticed():
    assert few_brackets(b"[" + b"0," * 5000 + b"[0]," * 5000) is None
