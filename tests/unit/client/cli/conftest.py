"""A whole service for the commands that ask one, at the address http://service, in this process and without a socket."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import attention_client
from attention_client.cli import asking
from service.observability.logs import configure_logs
from tests.integration import models
from tests.integration.running import LAYERS, prepare, running

URL = "http://service"


class Bridge(httpx2.AsyncBaseTransport):
    """Carries requests from the loop of a client to the loop of the service."""

    def __init__(self, application: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = httpx2.ASGITransport(app=application), loop

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        work = asyncio.run_coroutine_threadsafe(self._inner.handle_async_request(request), self._loop)
        return await asyncio.wrap_future(work)


@pytest.fixture(scope="package")
def bridge(tmp_path_factory) -> Iterator[Bridge]:
    """The way to one service of small layers and a model, which runs on a thread of its own until these tests end."""
    directory = tmp_path_factory.mktemp("service")
    prepare(directory, [*LAYERS, *models.LAYERS])
    models.store(directory)
    configure_logs("info", io.BytesIO())
    made: list[Bridge] = []
    is_ready, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(directory) as service:
            made.append(Bridge(service.application, asyncio.get_running_loop()))
            is_ready.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(60)
    yield made[0]
    made[0]._loop.call_soon_threadsafe(is_over.set)
    thread.join(60)


@pytest.fixture(scope="package")
def service(bridge) -> Iterator[None]:
    """Let the commands ask that service, at the address of the environment; any other address is the network's."""

    def client(url: str, **options: Any) -> attention_client.Client:
        return attention_client.Client(url, **options, transport=bridge if url.rstrip("/") == URL else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "Client", client)
        patch.setenv("ATTENTION_URL", URL)
        yield
