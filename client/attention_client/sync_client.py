"""Client: calls the attention service from synchronous code, through an event loop on its own thread.

Invariants: calls run on an event loop, so deadlines are exact and calls in flight can be cancelled. Threads may share one
client; a forked process gets its own loop. A call that fails raises a ServiceError, of the class that the service raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
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
    in_order,
    progress_bar,
    settled,
)
from attention_client.errors import ServiceError
from attention_client.http_transport import HttpTransport
from attention_client.loop_thread import LoopThread, Work
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


class Client:
    """Calls a service; use it as a context manager. Threads may share one, and a forked process may go on using it.

    `timeout_s` (default 30) limits a call with all its attempts, in seconds; None means no limit, and a call may set its own.
    A call makes at most `attempts` attempts. An answer of more than `max_answer_bytes` (512 MiB) raises BadAnswer. `api_key`
    is sent as a bearer token. `transport`, asynchronous here too, replaces the network (tests, a proxy, your own
    certificates). The constructor raises InvalidInput for an option that is not valid.
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
        self._options = ClientOptions(url, timeout_s, max_connections, attempts, api_key, max_answer_bytes)
        check_transport(transport)
        self._transport = transport
        self._starting = threading.Lock()
        self._running: tuple[LoopThread, HttpTransport] | None = None
        self._is_closed = False

    def attend(
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
        thread, http = self._started()
        return read_answer(thread.run(http.ask(call, timeout_s=timeout_s, request_id=request_id)), request)

    @overload
    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]],
        *,
        window: int = ...,
        timeout_s: float | None = ...,
        progress: bool = ...,
        on_error: Literal["raise"] = ...,
    ) -> Generator[Answer[Array]]: ...

    @overload
    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]],
        *,
        window: int = ...,
        timeout_s: float | None = ...,
        progress: bool = ...,
        on_error: Literal["yield"],
    ) -> Generator[Answer[Array] | ServiceError]: ...

    def attend_many(
        self,
        layer: str,
        items: Iterable[Array | Request[Array]],
        *,
        window: int = DEFAULT_WINDOW,
        timeout_s: float | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> Generator[Answer[Array] | ServiceError]:
        """Yield answers in the order of the items, which are queries or Requests, with at most `window` (8) in flight.

        Items are taken one by one as the window has room, so the iterator may be endless. `timeout_s` (seconds) limits each
        item. An item that fails raises in its position, with a note of its number, and cancels the calls in flight; with
        `on_error="yield"` its error is yielded instead of its answer, and the others go on. Leaving the loop early cancels
        the calls in flight. `progress` shows a bar on stderr. Raises InvalidInput for arguments that are not valid.
        """
        check_items(items)
        check_many(window, timeout_s, on_error)
        thread, http = self._started()

        def begin(item: Array | Request[Array]) -> Work[Answer[Array] | ServiceError]:
            # This use of `self` keeps the client alive while its answers are awaited, even if the caller drops it.
            self._check_open()
            return thread.submit(answered(http, built(layer, item), timeout_s))

        def answers() -> Generator[Answer[Array] | ServiceError]:
            found = in_order(items, begin, window)
            with progress_bar(layer, items, is_wanted=progress) as advance:
                try:
                    for number, outcome in enumerate(found):
                        yield settled(outcome, number, on_error)
                        advance()
                finally:
                    found.close()

        return answers()

    def attend_json(
        self, layer: str, body: Mapping[str, Any], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Send `body`, a request in JSON form, unchanged, and return the JSON object of the answer. Raises as `attend` does."""
        call = attend_json_call(layer, body)
        thread, http = self._started()
        return read_json(thread.run(http.ask(call, timeout_s=timeout_s, request_id=request_id)))

    def layers(self) -> list[Layer]:
        """Return the layers that the service serves."""
        thread, http = self._started()
        return read_layers(thread.run(http.ask(layers_call())))

    def layer(self, name: str) -> Layer:
        """Return the layer of this name. Raises LayerNotFound."""
        thread, http = self._started()
        return read_layer(thread.run(http.ask(layer_call(name))))

    def is_ready(self) -> bool:
        """Return whether the service reports that it is ready, without retries; False also if there is no valid answer."""
        thread, http = self._started()
        return thread.run(http.is_ready())

    def close(self) -> None:
        """Close the client: calls in flight raise ConnectionFailed, later ones RuntimeError."""
        with self._starting:
            self._is_closed = True
            if self._running is not None:
                self._running[0].stop()
                self._running = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")

    def _started(self) -> tuple[LoopThread, HttpTransport]:
        """Return the loop and the pool of this process, created at the first call and again after a fork."""
        with self._starting:
            self._check_open()
            if self._running is None or not self._running[0].is_ours:
                http = HttpTransport(self._options, self._transport)
                thread = LoopThread(http.close)
                weakref.finalize(self, thread.stop, wait=False)
                self._running = thread, http
            return self._running
