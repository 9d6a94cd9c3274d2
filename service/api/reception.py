"""Layer requests: opens a request context for each, and holds what both hot routes share.

Invariants: there is one for each process. After `close` it opens no new request; a request that is open continues to its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.api.byte_budget import ByteBudget
from service.api.exchange import Exchange, ExchangeLimits
from service.api.json_parser import JsonParser
from service.api.request_record import record_of
from service.attention.call import Answer
from service.attention.loaded_layer import Work
from service.batching.batcher import Batcher
from service.batching.decoding_queue import DecodingQueue
from service.errors import Draining
from service.http.asgi import Receive, Scope
from service.layers.catalog import Catalog

R = TypeVar("R")


class Reception:
    """`catalog` returns the layers that are served now, or raises NotReady; `now` returns monotonic seconds."""

    def __init__(
        self,
        catalog: Callable[[], Catalog],
        batcher: Batcher[Work, Answer],
        bodies: DecodingQueue,
        limits: ExchangeLimits,
        now: Callable[[], float],
    ) -> None:
        self.batcher = batcher
        self.bodies = bodies
        self.limits = limits
        self._catalog = catalog
        self.parser = JsonParser(limits.max_json_depth, limits.max_text_numbers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checking")
        self.now = now
        self.intake = ByteBudget(limits.intake_bytes, "bodies are being received and decoded")
        self.answers = ByteBudget(limits.answer_bytes, "answers are being computed and sent")
        self._is_closed = False
        self._open: set[Exchange] = set()

    @property
    def catalog(self) -> Catalog:
        return self._catalog()

    def open(self, scope: Scope, receive: Receive) -> Exchange:
        """Return the context of a request whose headers have arrived; raise Draining after `close`."""
        if self._is_closed:
            raise Draining("the service is shutting down and takes no new requests")
        return Exchange(self, record_of(scope), scope, receive)

    def entered(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def left(self, exchange: Exchange) -> None:
        self._open.discard(exchange)

    def close(self) -> None:
        self._is_closed = True

    def settle(self) -> None:
        """End every request that the batcher does not have yet; its answer is Draining."""
        for exchange in list(self._open):
            exchange.settle()

    async def run_off_loop(self, work: Callable[[], R]) -> R:
        """Run `work` in the one thread for checks and decompression, after earlier work, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def end(self) -> None:
        """End the helper process and the thread; call this when no request waits for them any more."""
        self.parser.close()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
