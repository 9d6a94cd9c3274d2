"""The safetensors format, read by position: the header first, then only the tensors asked for.

Laws: nothing is mapped, so that a file which shrinks under us is a short read and not a SIGBUS; a header is taken only
if every size is right and the tensors fill the file exactly (no hole, no overlap, no byte after them), as the library
of that name asks, and if no key comes twice, which it does not ask; sizes are Python integers; all failures are
LayerErrors.
Little-endian hosts only, like every machine torch ships wheels for.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import stat
from collections.abc import Mapping

import torch

from service.errors import LayerError
from service.layers.strict_json import parse_object
from service.layers.wording import listed, quoted, shape_text

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Every dtype of the format: a checkpoint's other tensors must add up as well.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes `begin` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> io.FileIO:
    """The file, unbuffered; never waits on a pipe and never opens a directory or a device."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError as error:
        raise LayerError("the file does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise LayerError("the file cannot be opened") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LayerError("the file is not a regular file")
    return io.FileIO(descriptor, "rb")


def read_header(file: io.FileIO, *, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    size = os.fstat(file.fileno()).st_size
    if size < LENGTH_BYTES:
        raise LayerError(f"the file has {size} bytes, too few for safetensors")
    length = int.from_bytes(_read(file, 0, LENGTH_BYTES), "little")
    if length > max_bytes:
        raise LayerError(f"the file announces a header of {length} bytes, the limit is {max_bytes}: not safetensors")
    start = LENGTH_BYTES + length
    if start > size:
        raise LayerError(f"the file announces a header of {length} bytes but has {size} bytes in all")
    raw = bytes(_read(file, LENGTH_BYTES, length))
    if not raw.startswith(b"{"):
        raise LayerError("the file's header is not a JSON object: not safetensors")
    fields = parse_object(raw, "the file's header")
    metadata = _metadata(fields.pop("__metadata__", {}))
    tensors = {name: _entry(name, value, start) for name, value in fields.items()}
    _check_layout(tensors, start, size)
    return Header(tensors, metadata)


def read_tensor(file: io.FileIO, name: str, entry: TensorEntry) -> torch.Tensor:
    """One tensor in memory of its own; floating-point dtypes only."""
    if entry.dtype not in DTYPES:
        raise LayerError(f"{quoted(name)} holds {entry.dtype}, expected one of {', '.join(DTYPES)}")
    if 0 in entry.shape or not 1 <= len(entry.shape) <= MAX_DIMENSIONS:
        raise LayerError(f"{quoted(name)} has the shape {shape_text(entry.shape)}, which no layer's tensor has")
    try:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    except (RuntimeError, MemoryError) as error:
        raise LayerError(f"no memory for the {entry.end - entry.begin} bytes of {quoted(name)}") from error
    _read_into(file, entry.begin, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _read(file: io.FileIO, offset: int, count: int) -> bytearray:
    buffer = bytearray(count)
    _read_into(file, offset, memoryview(buffer))
    return buffer


def _read_into(file: io.FileIO, offset: int, buffer: memoryview) -> None:
    """Fills `buffer`; one system call gives at most 2 GiB, hence the loop."""
    try:
        file.seek(offset)
        while buffer:
            got = file.readinto(buffer)
            if not got:
                raise LayerError("the file ended while it was read")
            buffer = buffer[got:]
    except OSError as error:
        raise LayerError("the file cannot be read") from error


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise LayerError("the header's __metadata__ does not map names to strings")
    return value


def _entry(name: str, value: object, start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise LayerError(f"{quoted(name)} must have dtype, shape and data_offsets in the header and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise LayerError(f"{quoted(name)} has a dtype that safetensors does not know")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
        raise LayerError(f"{quoted(name)} has a shape or data_offsets that are not lists of counts")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise LayerError(f"{quoted(name)} is {shape_text(shape)} of {dtype} but spans {end - begin} bytes")
    return TensorEntry(dtype, tuple(shape), start + begin, start + end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(tensors: Mapping[str, TensorEntry], start: int, size: int) -> None:
    position, wrong = start, []
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            wrong.append(name)
        position = entry.end
    if wrong:
        raise LayerError(f"there is a hole or an overlap in the file before {listed(wrong)}")
    if position != size:
        raise LayerError(f"the tensors end at byte {position} of the file, which has {size} bytes")
