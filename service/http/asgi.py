"""ASGI types, the scope keys that the transport and the application share, and the scope of each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.request_parser import HeaderFields, RequestLine

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Set if the transport refuses the request: the ServiceError to answer with.
REFUSED = "attention.refused"
# Set by this transport: the request's Cycle, which reports the body's arrival and a disconnect (`api/request_body.py`).
CALLER = "attention.caller"
# The header fields, as `fields_of` returns them.
FIELDS = "attention.fields"
# Set above max_connections: only health and metrics are served.
CROWDED = "attention.crowded"
# Set if the request has a key: the key's digest, which identifies the caller.
KEY_DIGEST = "attention.key_digest"


class ClientGone(Exception):
    """The connection closed before the request was answered."""


def fields_of(scope: Scope) -> HeaderFields:
    """Return the header fields by lower-case names."""
    found: HeaderFields | None = scope.get(FIELDS)
    if found is None:
        found = scope[FIELDS] = HeaderFields(scope["headers"])
    return found


Fields = list[tuple[bytes, bytes]]


def common_scope(connection: HttpToolsProtocol) -> dict[str, Any]:
    """Return the part that all requests of a connection share."""
    return {
        "type": "http",
        "asgi": {"version": connection.asgi_version, "spec_version": "2.3"},
        "scheme": connection.scheme,
        "root_path": connection.root_path,
        "server": connection.server,
        "client": connection.client,
    }


def request_scope(
    common: dict[str, Any],
    line: RequestLine,
    fields: Fields,
    named: HeaderFields,
    state: dict[str, Any],
    authority: bytes = b"",
) -> dict[str, Any]:
    """Return a request's scope. `fields` are copied, because an application may change its scope; only this service reads
    `named`. An `authority` replaces Host.
    """
    if authority:
        fields = [*(field for field in fields if field[0] != b"host"), (b"host", authority)]
        named = HeaderFields(fields)
    return {
        **common,
        "http_version": line.version,
        "method": line.method,
        "path": line.path,
        "raw_path": line.raw_path,
        "query_string": line.query,
        "headers": fields.copy(),
        FIELDS: named,
        "state": state.copy(),
    }
