"""Connection age: the pools of real clients see no failed request when their connections end, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx2
import pytest
import requests
import urllib3
import uvicorn
import uvloop
from uvicorn.server import ServerState

from attention_client import Client
from service.http.connection import Connection, Shared
from tests.unit.http.wire import LIMITS

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl"
)

AGE_S = 0.05
NUM_CALLS = 40  # of each of two callers, 5 ms apart
BODY = b'{"query": [[1.0]]}'


async def application(scope, receive, send):
    assert (await receive())["body"]
    await asyncio.sleep(0.005)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


class Served:
    """Connections of this age on a loop in a thread; `num_connections` counts them all."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self.num_connections = 0
        self._tls = tls
        self._loop = uvloop.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        config = uvicorn.Config(application, log_config=None, lifespan="off")
        config.load()
        state, self._over = ServerState(), asyncio.Event()
        shared = Shared(dataclasses.replace(LIMITS, max_age_s=AGE_S))

        def connection() -> Connection:
            self.num_connections += 1
            return Connection(config, state, {}, shared=shared)

        server: Any = await self._loop.create_server(connection, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for left in list(state.connections):
            left.transport.abort()
        while state.connections or state.tasks:  # noqa: ASYNC110 (uvicorn's sets tell of no change)
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {directory}/key -out {directory}/cert"
    )
    subprocess.run(make, shell=True, check=True, capture_output=True)
    return directory


# Each gives a call that fails at once if the client's pool uses a connection that the server has ended.


@contextlib.contextmanager
def ours(url: str, verify: Any) -> Iterator[Callable[[], object]]:
    """Both clients: Client runs an AsyncClient."""
    with Client(url, attempts=1, transport=httpx2.AsyncHTTPTransport(verify=verify)) as client:
        yield lambda: client.attend_json("small", {"query": [[1.0]]})


@contextlib.contextmanager
def of_httpx(url: str, verify: Any) -> Iterator[Callable[[], object]]:
    with httpx2.Client(verify=verify) as client:
        yield lambda: client.post(url, content=BODY).raise_for_status()


@contextlib.contextmanager
def of_requests(url: str, verify: Any) -> Iterator[Callable[[], object]]:
    with requests.Session() as session:
        session.trust_env = False
        yield lambda: session.post(url, data=BODY, verify=verify).raise_for_status()


@contextlib.contextmanager
def of_urllib3(url: str, verify: Any) -> Iterator[Callable[[], object]]:
    with urllib3.PoolManager(ca_certs=verify) as pool:

        def call() -> None:
            assert pool.request("POST", url, body=BODY, retries=False).status == 200

        yield call


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("client", [ours, of_httpx, of_requests, of_urllib3], ids=lambda client: client.__name__)
def test_no_request_of_a_pool_fails_when_its_connections_end(client, is_tls, certificate):
    tls, verify, scheme = None, None, "http"
    if is_tls:
        tls, verify, scheme = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), f"{certificate}/cert", "https"
        tls.load_cert_chain(f"{certificate}/cert", f"{certificate}/key")
    with Served(tls) as served, ThreadPoolExecutor(2) as callers:
        trusted = ssl.create_default_context(cafile=verify) if client in (ours, of_httpx) else verify
        with client(f"{scheme}://127.0.0.1:{served.port}", trusted) as call:
            list(callers.map(lambda _: [call() for _ in range(NUM_CALLS)], range(2)))
    assert 4 <= served.num_connections <= NUM_CALLS
