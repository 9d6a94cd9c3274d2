"""Both clients, connected to a double of the service."""

import asyncio
import contextlib

import pytest
import stamina.instrumentation

from attention_client import AsyncClient, Client


@pytest.fixture(autouse=True, scope="package")
def _retries_are_told_to_nobody():
    """Disable the hooks of stamina: they print each retry and register a series that other tests do not expect."""
    stamina.instrumentation.set_on_retry_hooks([])
    yield
    stamina.instrumentation.set_on_retry_hooks(None)


class AsyncFace:
    """AsyncClient with the methods of Client, so that one test covers both."""

    def __init__(self, **kwargs) -> None:
        self.client = AsyncClient(**kwargs)
        self.runner = asyncio.Runner()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.runner.run(self.client.close())
        self.runner.close()

    def __getattr__(self, name: str):
        method = getattr(self.client, name)
        return lambda *args, **kwargs: self.runner.run(method(*args, **kwargs))

    def attend_many(self, *args, **kwargs):
        answers = self.client.attend_many(*args, **kwargs)
        try:
            while True:
                try:
                    yield self.runner.run(anext(answers))
                except StopAsyncIteration:
                    return
        finally:
            self.runner.run(answers.aclose())


@pytest.fixture(params=[Client, AsyncFace], ids=["sync", "async"])
def face(request):
    """`face(service, **options)` returns a client of either kind, connected to the double."""
    with contextlib.ExitStack() as stack, stamina.set_testing(True, attempts=9, cap=True):
        yield lambda service, **options: stack.enter_context(request.param(transport=service.transport, **options))
