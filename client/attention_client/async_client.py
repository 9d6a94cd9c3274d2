"""AsyncClient: calls the attention service from asyncio.

Invariants: a call that fails raises a ServiceError, of the class that the service raised. The client starts no thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import httpx2

from attention_client.answer import Answer, Layer, read_answer, read_json, read_layer, read_layers
from attention_client.arrays import Array
from attention_client.attend_many import (
    DEFAULT_WINDOW,
    OnError,
    answered,
    built,
    check_items,
    check_many,
    in_order_async,
    progress_bar,
    settled,
)
from attention_client.errors import ServiceError
from attention_client.http_transport import HttpTransport
from attention_client.masks import Mask
from attention_client.options import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    MAX_ANSWER_BYTES,
    ClientOptions,
    check_transport,
)
from attention_client.request import (
    MaskedRows,
    Request,
    WeightsWanted,
    attend_call,
    attend_json_call,
    layer_call,
    layers_call,
)


class AsyncClient:
    """Calls a service from asyncio through one connection pool; it belongs to the event loop that uses it first.

    `timeout_s` (default 30) limits a call with all its attempts, in seconds; None means no limit, and a call may set its own.
    A call makes at most `attempts` attempts. An answer of more than `max_answer_bytes` (512 MiB) raises BadAnswer. `api_key`
    is sent as a bearer token. `transport` replaces the network (tests, a proxy, your own certificates).
    The constructor raises InvalidInput for an option that is not valid.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_connections: int = 16,
        attempts: int = 5,
        api_key: str | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        options = ClientOptions(url, timeout_s, max_connections, attempts, api_key, max_answer_bytes)
        check_transport(transport)
        self._http = HttpTransport(options, transport)

    async def attend(
        self,
        layer: str,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        masks: Sequence[Mask] = (),
        weights: WeightsWanted = None,
        masked_rows: MaskedRows = "zero",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Answer[Array]:
        """Attend from query `[L, d]` to key `[S, d]` and value `[S, dv]`; for a batch, each has `B` in front.

        Arrays are float16, bfloat16, float32 or float64. `key` defaults to `query`, `value` to `key`, `timeout_s` (seconds)
        to the client's. A row that may attend to nothing gives zeros from the heads; `masked_rows="error"` raises MaskedRow.
        Raises the service's error, InvalidInput and its subclasses, LayerNotFound, DeadlineExceeded, ConnectionFailed
        or BadAnswer; RuntimeError if the client is closed.
        """
        request = Request(query, key, value, masks, weights, masked_rows)
        call = attend_call(layer, request)
        return read_answer(await self._http.ask(call, timeout_s=timeout_s, request_id=request_id), request)

    @overload
    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]] | AsyncIterable[Array | Request[Array]],
        *,
        window: int = ...,
        timeout_s: float | None = ...,
        progress: bool = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncGenerator[Answer[Array]]: ...

    @overload
    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]] | AsyncIterable[Array | Request[Array]],
        *,
        window: int = ...,
        timeout_s: float | None = ...,
        progress: bool = ...,
        on_error: Literal["yield"],
    ) -> AsyncGenerator[Answer[Array] | ServiceError]: ...

    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]] | AsyncIterable[Array | Request[Array]],
        *,
        window: int = DEFAULT_WINDOW,
        timeout_s: float | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> AsyncGenerator[Answer[Array] | ServiceError]:
        """Works like `Client.attend_many`; `items` may also be an async iterable.

        Wrap it in `contextlib.aclosing` so that leaving the loop early cancels the calls in flight at once.
        """
        if not isinstance(items, AsyncIterable):
            check_items(items)
        check_many(window, timeout_s, on_error)

        async def answers() -> AsyncGenerator[Answer[Array] | ServiceError]:
            found = in_order_async(items, lambda item: answered(self._http, built(layer, item), timeout_s), window)
            number = 0
            with progress_bar(layer, items, is_wanted=progress) as advance:
                try:
                    async for outcome in found:
                        yield settled(outcome, number, on_error)
                        advance()
                        number += 1
                finally:
                    await found.aclose()

        return answers()

    async def attend_json(
        self, layer: str, body: Mapping[str, Any], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Send `body`, a request in JSON form, unchanged, and return the JSON object of the answer. Raises as `attend` does."""
        call = attend_json_call(layer, body)
        return read_json(await self._http.ask(call, timeout_s=timeout_s, request_id=request_id))

    async def layers(self) -> list[Layer]:
        """Return the layers that the service serves."""
        return read_layers(await self._http.ask(layers_call()))

    async def layer(self, name: str) -> Layer:
        """Return the layer of this name. Raises LayerNotFound."""
        return read_layer(await self._http.ask(layer_call(name)))

    async def is_ready(self) -> bool:
        """Return whether the service reports that it is ready, without retries; False also if there is no valid answer."""
        return await self._http.is_ready()

    async def close(self) -> None:
        """Close the client: calls in flight raise ConnectionFailed, later ones RuntimeError."""
        await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
