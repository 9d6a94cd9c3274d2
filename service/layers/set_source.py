"""Set source: reads the files of a published layer set, from a directory or any address that fsspec knows.

Invariants: fsspec and the library of a store are imported only for an address of theirs. A fault is a LayerError of one sentence
that has neither the address nor text of a library, because both may hold credentials. Reads block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from service.errors import LayerError
from service.layers.wording import bounded

CHUNK_BYTES = 2**20
# A file may take this long, and as much longer as it takes at the lowest rate; a connection may be silent for as long.
PATIENCE_S = 10.0
MIN_BYTES_PER_S = 2**16


class SetSource:
    """`address` is a directory, or has a scheme. `late_at` is when the read in progress has taken too long."""

    def __init__(self, address: str, now: Callable[[], float] = time.monotonic) -> None:
        """Raise LayerError with the remedy if a library is missing."""
        self._address = address
        self._scheme = re.split("://|::", address)[0] if re.match("[A-Za-z][A-Za-z0-9+.-]*(://|::)", address) else ""
        self._now = now
        self.late_at = float("inf")
        self._options = _options(self._scheme)

    @property
    def shown(self) -> str:
        """The address without credentials and query; where an @ may be of either, the scheme only."""
        base, _, query = self._address.partition("?")
        secret = "" if not self._scheme else "//.*" if "@" in query else "//.*@"
        return bounded(re.sub(secret, "//", base) if secret else self._address)

    def chunks(self, name: str, max_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of the file; raise LayerError if it is away, slow, or larger."""
        self.late_at = self._now() + PATIENCE_S + max_bytes / MIN_BYTES_PER_S
        num_bytes = 0
        try:
            with _translated(), self._opened(name) as file:
                while chunk := file.read(CHUNK_BYTES):
                    if self._now() > self.late_at:
                        raise LayerError("the source is too slow, or has stopped sending")
                    if (num_bytes := num_bytes + len(chunk)) > max_bytes:
                        raise LayerError(f"the file has more than {max_bytes} bytes")
                    yield chunk
        finally:
            self.late_at = float("inf")

    def _opened(self, name: str) -> BinaryIO:
        if not self._scheme:
            from service.layers.safetensors_file import open_regular  # noqa: PLC0415 (the start checks an address without torch)

            return open_regular(Path(self._address) / name)
        import fsspec.core  # noqa: PLC0415 (most services have no address of it)

        base, mark, query = self._address.partition("?")
        system, path = fsspec.core.url_to_fs(f"{base.rstrip('/')}/{name}{mark}{query}", **self._options)
        system.invalidate_cache()  # else it may know an earlier manifest
        # A server may ignore ranges, so a file comes over HTTP as one stream. Its size is not asked for with another request.
        how = {"block_size": 0, "size": 1} if self._options else {"block_size": CHUNK_BYTES}
        file: BinaryIO = system.open(path, "rb", **how)
        return file


def _options(scheme: str) -> dict[str, Any]:
    """Return the options of fsspec's file system; raise LayerError with the remedy if it, or a library of it, is missing."""
    if not scheme:
        return {}
    try:
        import fsspec  # noqa: PLC0415

        fsspec.get_filesystem_class(scheme)
        if scheme not in {"http", "https"}:
            return {}
        import aiohttp  # noqa: PLC0415 (fsspec's own library for HTTP)
    except ValueError:
        raise LayerError("the address begins with a scheme that fsspec does not know") from None
    except ImportError as error:
        needed = "fsspec" if error.name == "fsspec" else f"fsspec's library for {scheme}:// (s3fs, gcsfs, aiohttp …)"
        raise LayerError(
            f"{needed} is not installed: pip install 'attention-service[source]' and that library"
        ) from None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_S, sock_read=PATIENCE_S)
    return {"client_kwargs": {"timeout": timeout}}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn any exception of a library into a LayerError that names its class."""
    try:
        yield
    except (LayerError, GeneratorExit):
        raise
    except FileNotFoundError:
        raise LayerError("the source has no such file") from None
    except Exception as error:  # noqa: BLE001 (stores raise a hundred unrelated types)
        raise LayerError(f"the source cannot be read ({type(error).__name__})") from None
