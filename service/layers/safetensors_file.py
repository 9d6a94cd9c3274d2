"""Safetensors files: parses headers strictly, in files and in request bodies, and reads the tensors of files by position.

The format: eight bytes with the header's length (little-endian), the header (a JSON object, blanks at its end), the
tensors' bytes (little-endian, C order).
Invariants: A header is accepted only if every size is right and the tensors fill the rest exactly, as in the safetensors
library: no hole, no overlap, no byte after them. JSON is UTF-8. Duplicate keys, NaN, Infinity, integers beyond 64 bits and
endless depth are refused, because two parsers would disagree on them, but a config may have any number. No unchecked number sizes
an allocation. Sizes are Python integers. Messages repeat nothing of the text; they show names only through `label`. No file is
mapped, so that one that shrinks meanwhile gives a short read and not a SIGBUS. Only little-endian hosts are supported, like
every machine that torch ships wheels for.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from service.errors import LayerError, LayerNotLoaded, ServiceError
from service.layers.wording import quoted

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1


class _RefusedJsonError(ValueError):
    """Raised inside the parser's hooks; the message says why the text is refused."""


def parse_object(
    raw: bytes | bytearray, what: str, failure: type[ServiceError], *, any_number: bool = False
) -> dict[str, object]:
    """Return the object in `raw`, with `any_number` also NaN and Infinity; raise `failure` with a sentence about `what`."""
    try:
        value = (_ANY_NUMBER if any_number else _DECODER).decode(raw.decode("utf-8"))
    except _RefusedJsonError as error:
        raise failure(f"{what} {error}") from error
    except RecursionError as error:  # the C scanner counts its own depth, so this is a clean stop
        raise failure(f"{what} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8 or bad syntax
        raise failure(f"{what} is not valid JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise failure(f"{what} must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RefusedJsonError("has a duplicate key")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _RefusedJsonError("has a number that is not finite")
    return number


def _small_integer(digits: str) -> int:
    if len(digits) > len(str(_MIN_INTEGER)) or not _MIN_INTEGER <= int(digits) <= _MAX_INTEGER:
        raise _RefusedJsonError("has an integer that is too large")
    return int(digits)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite, parse_int=_small_integer
)
_ANY_NUMBER = json.JSONDecoder(object_pairs_hook=_unique)

# The dtypes that a layer may have.
FILE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
MAX_FILE_HEADER_BYTES = 100_000_000  # of a file: the limit of the safetensors library
LENGTH_BYTES = 8
# Errors of which the path or the file is the cause; any other is a lack of descriptors or memory, or a failing disk.
_FAULTS_OF_FILES = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO}
MAX_FILE_RANK = 256  # no tensor has as many axes; the product of thousands of large sizes would take seconds
# Every dtype of the format, because the sizes of tensors that are not read must be right as well.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_KEYS = {"dtype", "shape", "data_offsets"}


class TensorEntry(NamedTuple):
    """Position of one tensor: bytes `begin` to `end` of the whole file or body."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


class HeaderReader(NamedTuple):
    """Reads headers of `what` ("the file", "the body"); raises `failure` for every fault."""

    what: str
    failure: type[ServiceError]
    max_bytes: int
    label: Callable[[str], str]

    def length(self, first: bytes | bytearray | memoryview, size: int) -> int:
        """Return the header's length from the first eight bytes (or fewer, if there are no more) of `size` in all."""
        if size < LENGTH_BYTES:
            raise self.failure(f"{self.what} has {size} bytes, too few for safetensors")
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        if length > self.max_bytes:
            raise self.failure(
                f"{self.what} announces a header of {length} bytes, the limit is {self.max_bytes}: not safetensors"
            )
        if LENGTH_BYTES + length > size:
            raise self.failure(f"{self.what} announces a header of {length} bytes but has {size} bytes in all")
        return length

    def read(self, raw: bytes | bytearray, size: int) -> Header:
        """Return the header whose JSON is `raw`; the file or body has `size` bytes in all."""
        if not raw.startswith(b"{"):
            raise self.failure(f"{self.what}'s header must be a JSON object: not safetensors")
        fields = parse_object(raw, f"{self.what}'s header", self.failure)
        metadata = fields.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # null is no metadata, as in the safetensors library
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise self.failure("the header's __metadata__ must map names to strings")
        position = start = LENGTH_BYTES + len(raw)
        tensors = {name: self._entry(name, value, start) for name, value in fields.items()}
        for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != position:
                raise self.failure(f"{self.what} has a hole or an overlap before {self.label(name)}")
            position = entry.end
        if position != size:
            raise self.failure(f"the tensors end at byte {position} of {self.what}, which has {size} bytes")
        return Header(tensors, metadata)

    def _entry(self, name: str, value: object, start: int) -> TensorEntry:
        if not isinstance(value, dict) or value.keys() != _KEYS:
            words = "must have dtype, shape and data_offsets in the header and nothing else"
            raise self.failure(f"{self.label(name)} {words}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self.failure(f"{self.label(name)} has a dtype unknown to safetensors")
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
            raise self.failure(f"{self.label(name)} has a shape or data_offsets that are not lists of counts")
        if len(shape) > MAX_FILE_RANK:
            raise self.failure(f"{self.label(name)} has {len(shape)} axes, expected at most {MAX_FILE_RANK}")
        begin, end = offsets
        if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
            words = f"spans {end - begin} bytes, which does not match its shape and dtype"
            raise self.failure(f"{self.label(name)} {words}")
        return TensorEntry(dtype, tuple(shape), start + begin, start + end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> io.BufferedReader:
    """Open a regular file; never wait on a pipe, and refuse directories and devices."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError as error:
        raise LayerError("the file does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise opening_failed(error) from error
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LayerError("the file is not a regular file")
        on_error.pop_all()
    return io.BufferedReader(io.FileIO(descriptor, "rb"))


def opening_failed(error: OSError | ValueError) -> LayerError:
    """Return the error of a file that cannot be opened: LayerNotLoaded unless the path or the file is the cause."""
    is_machine = isinstance(error, OSError) and error.errno not in _FAULTS_OF_FILES
    return (LayerNotLoaded if is_machine else LayerError)("the file cannot be opened")


def read_header(file: io.BufferedReader, *, max_bytes: int = MAX_FILE_HEADER_BYTES) -> Header:
    reader = HeaderReader("the file", LayerError, max_bytes, quoted)
    size = os.fstat(file.fileno()).st_size
    length = reader.length(_read(file, 0, min(size, LENGTH_BYTES)), size)
    return reader.read(_read(file, LENGTH_BYTES, length), size)


def read_tensor(
    file: io.BufferedReader, name: str, entry: TensorEntry, dtypes: Mapping[str, torch.dtype] = FILE_DTYPES
) -> torch.Tensor:
    """Read one tensor of these dtypes into its own memory. The caller has checked its shape."""
    if entry.dtype not in dtypes:
        raise LayerError(f"{quoted(name)} holds {entry.dtype}, expected one of {', '.join(dtypes)}")
    try:
        tensor = torch.empty(entry.shape, dtype=dtypes[entry.dtype])
    except (RuntimeError, MemoryError) as error:
        raise LayerNotLoaded(f"no memory for the {entry.end - entry.begin} bytes of {quoted(name)}") from error
    _read_into(file, entry.begin, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _read(file: io.BufferedReader, offset: int, count: int) -> bytearray:
    buffer = bytearray(count)
    _read_into(file, offset, buffer)
    return buffer


def _read_into(file: io.BufferedReader, offset: int, buffer: bytearray | memoryview) -> None:
    try:
        file.seek(offset)
        count = file.readinto(buffer)
    except OSError as error:
        raise LayerNotLoaded("the file cannot be read") from error
    if count < len(buffer):
        raise LayerError("the file ended while it was read")
