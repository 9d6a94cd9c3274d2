"""Layer admin: asks a running service to load or unload a layer, and says in one sentence why it did not.

Invariants: The key goes to the given address alone: no redirect is followed, and over HTTPS the certificate is verified. It is
never printed.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from service.commands.health import connection_to, service_url, text_of
from service.errors import InvalidInput, LayerError
from service.layers.wording import bounded

# A PUT may read the layer's file for ATTENTION_LAYER_CHANGE_S, and then change all processes for as long (30 s by default).
TIMEOUT_S = 120.0
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_MAX_ANSWER_BYTES = 65536
_LOADED, _DELETED = (200, 201), 204
_FOREIGN = "this is no answer of the attention service; check --url"
_REMEDIES = {
    401: "; ATTENTION_CLIENT_KEY or --api-key gives it",
    403: "; without --url, a restart makes the change",
    409: "; repeat the command",
    503: "; repeat the command",
}


def curl(method: str, name: str) -> str:
    """Return the command that asks the service with the settings of this environment."""
    from service.settings import SettingsError

    try:
        url = service_url(None)
    except SettingsError:
        url = "http://127.0.0.1:8000"
    return f'with an admin key: curl -X {method} {url}/v1/layers/{name} -H "Authorization: Bearer $KEY"'


class LayerAdmin(NamedTuple):
    """A service, an admin key, and the directory in which this command stores layers."""

    url: str
    key: str | None
    layers_dir: Path

    @property
    def where(self) -> str:
        """Return the address without a password."""
        scheme, sign, rest = self.url.partition("://")
        return f"{scheme}{sign}{rest.rpartition('@')[2]}"

    def load(self, name: str, digest: str) -> None:
        """Make the service serve the stored layer of this name and digest; raise LayerError otherwise."""
        status, body = self._ask("PUT", name)
        if text_of(body, "code") == "layer_not_found":
            raise LayerError(f"{status}: {self._elsewhere()}")
        if status not in _LOADED or not (found := text_of(body, "digest")):
            raise LayerError(_reason(status, body))
        if found != digest:
            raise LayerError(f"it serves another layer of that name, {found[:19]}…: {self._elsewhere()}")

    def unload(self, name: str) -> bool:
        """Make the service stop serving the layer; return whether it served it. Raises LayerError."""
        status, body = self._ask("DELETE", name)
        if status != _DELETED and text_of(body, "code") != "layer_not_found":
            raise LayerError(_reason(status, body))
        return status == _DELETED

    def _elsewhere(self) -> str:
        return f"its layer directory is another than {self.layers_dir.resolve()}; compare its ATTENTION_LAYERS_DIR"

    def _ask(self, method: str, name: str) -> tuple[int, bytes]:
        from http.client import HTTPException

        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        try:
            with contextlib.closing(connection_to(self.url, TIMEOUT_S, has_secret=True)) as connection:
                connection.request(method, f"{urlsplit(self.url).path.rstrip('/')}/v1/layers/{name}", headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read(_MAX_ANSWER_BYTES)
        except (OSError, HTTPException) as error:
            why = getattr(error, "verify_message", "") or getattr(error, "strerror", None) or type(error).__name__
            raise LayerError(f"no answer ({why})") from None


def admin_of(url: str | None, key: str | None, layers_dir: Path) -> LayerAdmin | None:
    """Return the service at the address, if one is given; raise InvalidInput if the address or the key cannot be used."""
    if url is None:
        return None
    connection_to(url, TIMEOUT_S, has_secret=True)  # nothing is sent
    if key is not None and _KEY.fullmatch(key) is None:
        raise InvalidInput("--api-key must be at most 512 printable ASCII characters without blanks")
    return LayerAdmin(url, key, layers_dir)


def _reason(status: int, body: bytes) -> str:
    detail = text_of(body, "detail")
    return f"{status}: {bounded(detail)}{_REMEDIES.get(status, '')}" if detail else f"{status}: {_FOREIGN}"
