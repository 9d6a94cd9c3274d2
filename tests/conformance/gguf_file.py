"""Reads tensors of a GGUF file, version 3, as float32: F32, Q8_0 and Q4_1, by the layouts of ggml's `ggml-common.h`.

Rows of blocks: Q8_0 has a float16 scale and 32 int8; Q4_1 a scale, a minimum and 32 numbers of four bits, the low halves of its
bytes first.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
# By GGUF's numbers: formats of `struct`, strings (8) and arrays (9) apart.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, Q4_1, Q8_0 = 0, 3, 8
# Numbers and bytes of a block.
BLOCKS = {F32: (1, 4), Q4_1: (32, 20), Q8_0: (32, 34)}
ALIGNMENT = 32


class GgufFile:
    """The metadata of a file, and its tensors by name, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        with path.open("rb") as file:
            magic, version, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
            assert (magic, version) == (b"GGUF", 3)
            for _ in range(entries):
                name = _string(file)
                self.metadata[name] = _value(file, *_unpack(file, "I"))
            for _ in range(tensors):
                name = _string(file)
                (axes,) = _unpack(file, "I")
                shape = _unpack(file, f"{axes}Q")[::-1]
                self._places[name] = (shape, *_unpack(file, "IQ"))
            self._start = -(-file.tell() // ALIGNMENT) * ALIGNMENT

    def tensor(self, name: str, rows: int | None = None) -> Array:
        """Return a tensor, or its first rows."""
        (height, *rest), kind, offset = self._places[name]
        shape = (min(height, rows or height), *rest)
        numbers, size = BLOCKS[kind]
        count = int(np.prod(shape)) // numbers
        blocks = np.fromfile(self.path, np.uint8, count * size, offset=self._start + offset).reshape(count, size)
        return {F32: _f32, Q4_1: _q4_1, Q8_0: _q8_0}[kind](blocks).reshape(shape).astype(np.float32)


def _unpack(file: BinaryIO, format_: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{format_}", file.read(struct.calcsize(f"<{format_}")))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        inner, count = _unpack(file, "IQ")
        return [_value(file, inner) for _ in range(count)]
    return _unpack(file, SCALARS[kind])[0]


def _halves(blocks: Array, start: int) -> Array:
    """The float16 numbers at a place of each block, as a column."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _f32(blocks: Array) -> Array:
    return blocks.view(np.float32)


def _q8_0(blocks: Array) -> Array:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_1(blocks: Array) -> Array:
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    found: Array = _halves(blocks, 0) * numbers + _halves(blocks, 2)
    return found
