"""Under uvicorn, unmodified: it makes our Connection for `Config(http=…)`, with any loop of its own."""

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from service.http.connection import Connection
from tests.unit.http.wire import Echo


async def answers(sent: bytes, *, application: Any) -> bytes:
    """Return what a client reads that sends these bytes to a new server, which then ends."""
    config = uvicorn.Config(
        application, http=Connection, lifespan="off", log_config=None, headers=[("x-from", "uvicorn")]
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(sent)
        heard = await reader.read()
        writer.close()
        server.should_exit = True
        await task
    assert not server.server_state.connections
    assert not server.server_state.tasks
    return heard


def run(sent: bytes, application: Any, loop: Any = "asyncio") -> bytes:
    factory: Any = uvicorn.Config(application, loop=loop, log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(answers(sent, application=application))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_uvicorn_serves_requests_by_its_own_server(loop):
    sent = (
        b"POST /1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
        b"POST /long HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\ncd"
    )
    heard = run(sent, Echo(), loop)
    first, second = heard.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"\r\n\r\nab")
    assert b"x-from: uvicorn\r\n" in first
    assert b"date: " in first
    assert second.endswith(b"\r\n\r\na\r\nxxxxxxxxxx\r\na\r\nyyyyyyyyyy\r\n0\r\n\r\n")
    assert b"connection: close\r\n" in second


@pytest.mark.parametrize("path", ["/broken", "/fault"])
def test_an_application_that_fails_ends_its_connection_and_no_other(path, caplog):
    async def application(scope, receive, send):
        if scope["path"] == "/broken":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("planted")

    heard = run(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), application)
    assert heard.startswith(b"HTTP/1.1 200 OK\r\n" if path == "/broken" else b"HTTP/1.1 500 Internal Server Error\r\n")
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("planted",)]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"content-length", b"3")], b"ab"),
        ([(b"content-length", b"1")], b"ab"),
        ([(b"x", b"a\r\nb: c")], b""),
        ([(b"x\n", b"a")], b""),
    ],
    ids=["too-short", "too-long", "split-value", "split-name"],
)
def test_a_response_that_would_be_read_as_another_is_cut_off(headers, body, caplog):
    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    heard = run(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", application)
    assert heard.startswith(b"HTTP/1.1 200 OK\r\n" if body else b"HTTP/1.1 500 ")
    assert not heard.endswith(b"ab")
    assert b"b: c" not in heard
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]
