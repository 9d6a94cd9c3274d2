"""Safetensors files: reads the header first, then only the requested tensors, by position.

Invariants: Nothing is mapped, so that a file that shrinks meanwhile gives a short read and not a SIGBUS. All failures are
LayerErrors. Only little-endian hosts are supported, like every machine that torch ships wheels for.
"""

from __future__ import annotations

import io
import os
import stat

import torch

from service.errors import LayerError, LayerNotLoaded
from service.layers.safetensors_header import LENGTH_BYTES, Header, HeaderReader, TensorEntry
from service.layers.wording import quoted, shape_text

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 8


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> io.FileIO:
    """Open a regular file unbuffered; never wait on a pipe, and refuse directories and devices."""
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
    reader = HeaderReader("the file", LayerError, max_bytes, quoted)
    size = os.fstat(file.fileno()).st_size
    length = reader.length(_read(file, 0, min(size, LENGTH_BYTES)), size)
    return reader.read(_read(file, LENGTH_BYTES, length), size)


def read_tensor(file: io.FileIO, name: str, entry: TensorEntry) -> torch.Tensor:
    """Read one tensor into its own memory; floating-point dtypes only."""
    if entry.dtype not in DTYPES:
        raise LayerError(f"{quoted(name)} holds {entry.dtype}, expected one of {', '.join(DTYPES)}")
    if 0 in entry.shape or not 1 <= len(entry.shape) <= MAX_DIMENSIONS:
        found = f"{quoted(name)} has the shape {shape_text(entry.shape)}"
        raise LayerError(f"{found}, expected 1 to {MAX_DIMENSIONS} axes, none of size 0")
    try:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    except (RuntimeError, MemoryError) as error:
        raise LayerNotLoaded(f"no memory for the {entry.end - entry.begin} bytes of {quoted(name)}") from error
    _read_into(file, entry.begin, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _read(file: io.FileIO, offset: int, count: int) -> bytearray:
    buffer = bytearray(count)
    _read_into(file, offset, memoryview(buffer))
    return buffer


def _read_into(file: io.FileIO, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` in a loop, because one system call reads at most 2 GiB."""
    try:
        file.seek(offset)
        while buffer:
            got = file.readinto(buffer)
            if not got:
                raise LayerError("the file ended while it was read")
            buffer = buffer[got:]
    except OSError as error:
        raise LayerError("the file cannot be read") from error
