"""TLS: checks the certificate and key files before the start, and decides when a connection may be cut.

Must not know: uvicorn, which makes each worker's context from the same files.
Invariant: A fault of the files is one line that names the setting, never the file's content or OpenSSL's text.
"""

from __future__ import annotations

import fcntl
import ssl
import sys
import termios
from asyncio import WriteTransport
from pathlib import Path
from typing import NamedTuple

from service.settings import SettingsError


class Tls(NamedTuple):
    """Files in PEM; without `key` the private key is in `certificate` too."""

    certificate: Path
    key: Path | None

    def check(self) -> None:
        """Raise SettingsError if the files cannot be used."""
        for name, path in (("CERT", self.certificate), ("KEY", self.key)):
            try:
                if path is not None:
                    path.open("rb").close()
            except OSError as error:
                raise SettingsError(f"ATTENTION_TLS_{name}_FILE: it cannot be read: {error.strerror}") from None
        try:
            # With a passphrase, even a wrong one, OpenSSL does not ask for one at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self, password=lambda: "?")
        except OSError:
            raise SettingsError(
                "ATTENTION_TLS_CERT_FILE: no certificate (PEM) and private key without a passphrase that fit together"
            ) from None


def is_acknowledged(transport: WriteTransport) -> bool:
    """Return whether the peer has acknowledged every byte that was written to it, or is gone."""
    if transport.get_write_buffer_size() > 0:
        return False
    wire = transport.get_extra_info("socket")  # None once it is closed
    try:
        unacknowledged = b"" if wire is None else fcntl.ioctl(wire.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except (OSError, ValueError):  # it no longer has a descriptor
        return True
    return int.from_bytes(unacknowledged, sys.byteorder) == 0
