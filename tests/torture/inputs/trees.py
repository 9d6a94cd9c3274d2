"""Mutations of a JSON value, and of its text: odd values where others belong, keys lost, doubled and invented, depth."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from tests.torture.answer_rules import MARK

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 2.0, 1e38, 3.5e38,
    70000, 5e-324, 1.7e308, -1e-45, "", "0", "1.5", "NaN", "nan", "inf", "-inf", "-Infinity", MARK, f"../{MARK}", "\0", "\ud800",
    "\u202e", "é" * 50, "A" * 5000, "AAAA", "AA-_", "A===", [], [[]], [[[]]], [None], [[1], [1, 2]], [[1, [2]]], {}, {MARK: 1},
    {"kind": "causal"}, {"form": "heads"}, {"dtype": "float32", "shape": [1, 16], "data": []}, "float32", "bool", "BF16", "FP8",
    "complex64", [2**32, 2**32], [2**63, 2], [2, 2**60 + 2], [-1, 16], [0, 16], [1] * 65, [16.0, 1], ["8"], [True],
]  # fmt: skip
RAW_VALUES = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 4301, b"0x10", b"01", b"+1", b".5", b"1.", b"1e", b"--1",
    b"'x'", b"tru", b"nul", b"undefined", b"\xff", b"\xed\xa0\x80", b"\\u12", b'"\\ud800"', b"/*x*/", b"// x", b",", b",,", b":",
    b"[", b"]", b"{", b"}", b'"', b"\0", b"\x1f", b"\xef\xbb\xbf", b"1" * 400 + b"e-400", b"0." + b"0" * 5000 + b"1",
]  # fmt: skip

# A float holds no number of more bits than this before its point.
FLOAT_BITS = 1023


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in the tree; of long lists only some."""
    found: list[tuple[Any, Any]] = []
    inside = [tree]
    while inside:
        node = inside.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))[:6]
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                inside.append(node[key])
    return found


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """A copy with one to three changes."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not isinstance(tree, dict | list) or not (where := places(tree)):
            return copy.deepcopy(rng.choice(ODD))
        node, key = rng.choice(where)
        rng.choice(_CHANGES)(node, key, rng)
    return tree


def _replace(node: Any, key: Any, rng: random.Random) -> None:
    node[key] = copy.deepcopy(rng.choice(ODD))


def _drop(node: Any, key: Any, _: random.Random) -> None:
    del node[key]


def _nudge(node: Any, key: Any, rng: random.Random) -> None:
    """A number a little off, a list one element longer or shorter, a word misspelt."""
    value = node[key]
    if isinstance(value, bool) or value is None:
        node[key] = rng.choice([0, 1, "true"])
    elif isinstance(value, int | float):
        nudge = rng.choice([-1, 1, 0.5, 2**32, -(2**31)])
        # A whole number beyond all floats stays whole.
        node[key] = value + (int(nudge) if isinstance(value, int) and value.bit_length() > FLOAT_BITS else nudge)
    elif isinstance(value, list):
        node[key] = value[:-1] if rng.random() < 0.5 else [*value, copy.deepcopy(rng.choice(ODD))]
    elif isinstance(value, str):
        at = rng.randint(0, len(value))
        node[key] = value[:at] + rng.choice(["", " ", "x", "\n", "=", MARK]) + value[at + rng.randint(0, 2) :]
    else:
        node[key] = [value]


def _invent(node: Any, key: Any, rng: random.Random) -> None:
    if isinstance(node, dict):
        node[rng.choice([MARK, f"{key}s", str(key).upper(), "", "shape", "data", "dtype", "values", "kind"])] = (
            copy.deepcopy(rng.choice(ODD))
        )
    else:
        node.insert(rng.randint(0, len(node)), copy.deepcopy(rng.choice(ODD)))


def _wrap(node: Any, key: Any, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 2, 20, 40, 200])):
        node[key] = [node[key]]


def _swap(node: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node[key], node[other] = node[other], node[key]


_CHANGES: list[Callable[[Any, Any, random.Random], None]] = [
    *[_replace] * 2, _drop, *[_nudge] * 2, _invent, _wrap, _swap,
]  # fmt: skip


def mutate_text(text: bytes, rng: random.Random) -> bytes:
    """A change that no JSON writer would make."""
    at = rng.randint(0, len(text))
    return rng.choice(_TEXT_CHANGES)(text[:at], text[at:], rng)


def _double_the_first(before: bytes, after: bytes, _: random.Random) -> bytes:
    text = before + after
    begin, end = text.find(b"{") + 1, text.find(b",")
    return text[:begin] + text[begin:end] + b"," + text[begin:] if end > 0 else text + text


def _other_encoding(before: bytes, after: bytes, rng: random.Random) -> bytes:
    return (before + after).decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))


_TEXT_CHANGES: list[Callable[[bytes, bytes, random.Random], bytes]] = [
    lambda before, _, __: before,
    lambda before, after, rng: before + rng.choice(RAW_VALUES) + after,
    lambda before, after, rng: before + rng.randbytes(rng.randint(1, 8)) + after[rng.randint(0, 8) :],
    lambda before, after, rng: (before + after).replace(b'"', b"'", rng.randint(1, 3)),
    lambda before, _, rng: before + rng.choice([b"[", b'{"a":']) * rng.choice([31, 33, 120, 1000, 100_000]),
    lambda before, after, rng: before + after[rng.randint(1, 20) :],
    _double_the_first,
    _other_encoding,
]
