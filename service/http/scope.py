"""ASGI scopes: builds the scope of each request from its connection and its head."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.asgi import FIELDS
from service.http.head import RequestLine
from service.http.header_fields import HeaderFields

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
