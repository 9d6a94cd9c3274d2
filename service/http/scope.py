"""Scopes: what ASGI tells the application of a connection and of a request."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.asgi import FIELDS
from service.http.head import RequestLine
from service.http.header_fields import HeaderFields

Fields = list[tuple[bytes, bytes]]


def common_scope(connection: HttpToolsProtocol) -> dict[str, Any]:
    """What all requests of a connection share."""
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
    """`fields` are copied, for an application may change what its scope says, and `named` is read by ourselves only. An
    `authority` takes the place of Host.
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
