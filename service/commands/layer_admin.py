"""Layer admin: asks a running service to serve a stored layer, and says in one sentence why it did not.

Invariants: The key goes to the given address alone: no redirect is followed, and over HTTPS the certificate is verified. It is
never printed.
"""

from __future__ import annotations

from pathlib import Path

from service.commands.health import answer_of, service_url, text_of
from service.errors import LayerError

# A PUT may read the layer's file for ATTENTION_LAYER_CHANGE_S, and then change all processes for as long (30 s by default).
TIMEOUT_S = 120.0


def curl(method: str, name: str) -> str:
    """Return the command that asks the service with the settings of this environment."""
    from service.settings import SettingsError

    try:
        url = service_url(None)
    except SettingsError:
        url = "http://127.0.0.1:8000"
    return f'with an admin key: curl -X {method} {url}/v1/layers/{name} -H "Authorization: Bearer $KEY"'


def serve_at(url: str, key: str, name: str, digest: str, layers_dir: Path) -> None:
    """Make the service at `url` serve the stored layer of this name and digest; raise LayerError otherwise."""
    if not (key.isascii() and key.isprintable()):
        raise LayerError("--api-key must be printable ASCII characters")
    try:
        status, body = answer_of(url, "PUT", f"/v1/layers/{name}", TIMEOUT_S, key)
    except ConnectionError as error:
        raise LayerError(str(error)) from None
    if text_of(body, "code") == "layer_not_found" or text_of(body, "digest") not in ("", digest):
        where = f"its layer directory is another than {layers_dir.resolve()}; compare its ATTENTION_LAYERS_DIR"
        raise LayerError(f"{status}: {where}")
    if text_of(body, "digest") != digest:
        raise LayerError(
            f"{status}: {text_of(body, 'detail') or 'this is no answer of the attention service; check --url'}"
        )
