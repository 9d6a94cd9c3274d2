"""Target: the service as one caller sees it, one request at a time: its layers, and answers to take references from.

Laws: asked before the load and never during it; TLS is verified; whatever goes wrong is a TargetFailed that says what was
asked and what came, and never the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import urllib.error
import urllib.request
from typing import Any

import orjson

from attention_load.layer import LayerFacts

# Of what a target said, in a fault.
MAX_TOLD = 300


class TargetFailed(Exception):
    """The target could not be asked, or did not answer with 200."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    url: str
    api_key: str = ""
    timeout_s: float = 30.0

    def headers(self, content_type: str | None = None) -> dict[str, str]:
        """Of every request, the load's too. Answers come as they are: compressing them is not what is measured."""
        found = {"Accept-Encoding": "identity"}
        if content_type:
            found["Content-Type"] = content_type
        if self.api_key:
            found["X-API-Key"] = self.api_key
        return found

    def layers(self, names: str = "") -> list[LayerFacts]:
        """Those of these names (by comma), or all."""
        found = {layer.name: layer for layer in self._layers()}
        wanted = [name.strip() for name in names.split(",") if name.strip()] or list(found)
        if missing := [name for name in wanted if name not in found]:
            raise TargetFailed(f"the target serves no layer {', '.join(missing)}")
        if not wanted:
            raise TargetFailed("the target serves no layers")
        return [found[name] for name in wanted]

    def attend(self, layer: str, body: bytes, content_type: str) -> bytes:
        return self._ask(f"/v1/layers/{layer}/attend", body, content_type)

    def _layers(self) -> list[LayerFacts]:
        path = "/v1/layers"
        told = self._ask(path)
        try:
            listed: list[dict[str, Any]] = orjson.loads(told)["layers"]
            return [LayerFacts.read(layer) for layer in listed]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetFailed(f"{path} was answered with what is no list of layers: {told[:MAX_TOLD]!r}") from error

    def _ask(self, path: str, body: bytes | None = None, content_type: str | None = None) -> bytes:
        url = self.url.rstrip("/") + path
        if not url.startswith(("http://", "https://")):
            raise TargetFailed("the target's address (--host) must begin with http:// or https://")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise TargetFailed("the API key has characters that no header can carry (a line end?)")
        request = urllib.request.Request(url, body, self.headers(content_type))  # noqa: S310 (checked above)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:  # noqa: S310
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise TargetFailed(f"{path} was answered with {error.code}: {_beginning(error)!r}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TargetFailed(f"{path} got no answer: {str(error)[:MAX_TOLD] or type(error).__name__}") from error


def _beginning(answer: urllib.error.HTTPError) -> bytes:
    with contextlib.suppress(OSError, http.client.HTTPException):  # it may be cut short
        return answer.read(MAX_TOLD)
    return b""
