"""AsyncClient: calls the attention service from asyncio.

Invariants: a call that fails raises a ServiceError, of the class that the service raised. The client starts no thread. At most
`window` items of `attend_many` are started and not yet yielded, so neither memory nor the service's queue grows with the number
of items. An item is taken from its iterator only when the window has room, and after the answers that are ready.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, get_args, overload

from attention_client.answer import (
    Answer,
    AttentionAnswer,
    Layer,
    States,
    TextAnswer,
    read_attention,
    read_json,
    read_layer,
    read_layers,
    read_models,
    read_states,
)
from attention_client.arrays import Array
from attention_client.errors import InvalidInput, ServiceError
from attention_client.http_transport import HttpTransport
from attention_client.keywords import with_remedies
from attention_client.masks import Mask
from attention_client.options import ClientOptions, check_count, checked_timeout
from attention_client.request import (
    ATTENTION_PATH,
    Call,
    LayerMasks,
    Layout,
    MaskedRows,
    Positions,
    Request,
    ScoresWanted,
    WeightsWanted,
    attend_call,
    binary_answer,
    extras,
    json_text,
    layer_path,
    model_path,
    tensor_call,
    text_call,
)

DEFAULT_WINDOW = 8

Items = Iterable[Array | Request[Array]]
AsyncItems = Items[Array] | AsyncIterable[Array | Request[Array]]
Outcome = Answer[Array] | ServiceError
OnError = Literal["raise", "yield"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class AsyncClient(ClientOptions):
    """Calls a service through one connection pool; it belongs to the event loop that uses it first.

    Use it as an asynchronous context manager.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.http = HttpTransport(self)

    @with_remedies
    async def attend(
        self,
        layer: str,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        masks: Sequence[Mask] = (),
        weights: WeightsWanted = None,
        scores: ScoresWanted = None,
        lse: bool = False,
        entropy: bool = False,
        masked_rows: MaskedRows = "zero",
        positions: Positions | None = None,
        key_positions: Positions | None = None,
        layer_masks: LayerMasks = "apply",
        past_key: Array | None = None,
        past_value: Array | None = None,
        present: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Answer[Array]:
        """Attend from query `[L, d]` to key `[S, d]` and value `[S, dv]`; for a batch, each has `B` in front.

        Arrays are float16, bfloat16, float32 or float64. `key` defaults to `query`, `value` to `key`, `timeout_s` (seconds)
        to the client's. `scores` is a stage (scaled, capped, masked) or the API's object. The heads give zeros for a row that
        may attend to nothing; `masked_rows="error"` raises MaskedRow. `positions` `[L]` and `key_positions` `[S]` are whole
        numbers; a layer that uses positions needs both where L ≠ S. `layer_masks="none"` leaves out the layer's own masks.
        `past_key` `[Hkv, P, d]` and `past_value` are the present of an earlier answer, and `present` asks for that of this
        one. Raises the service's error, InvalidInput and its subclasses, LayerNotFound, DeadlineExceeded, ConnectionFailed or
        BadAnswer; RuntimeError if the client is closed.
        """
        of_call = (masks, weights, masked_rows, scores, lse, entropy)
        of_layer = (positions, key_positions, layer_masks, past_key, past_value, present)
        request = Request(query, key, value, *of_call, *of_layer)
        return await self.http.ask(attend_call(layer, request), timeout_s, request_id)

    @with_remedies
    async def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        layout: Layout | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        present: bool = False,
        sinks: Array | None = None,
        masks: Sequence[Mask] = (),
        weights: WeightsWanted = None,
        scores: ScoresWanted = None,
        lse: bool = False,
        entropy: bool = False,
        masked_rows: MaskedRows = "zero",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> AttentionAnswer[Array]:
        """Compute softmax(softcap(query·keyᵀ·scale) + masks)·value on the caller's own arrays, without a layer.

        `layout` names the axes. Its default is `ld` for 2 axes and `bhld` for 4; 3 axes need one. `packed` needs `num_heads`.
        `scale` is 1/√d by default. `scores` is a stage (scaled, capped, masked) or the API's object. Raises as `attend` does.
        """
        arrays = dict(query=query, key=key, value=value, past_key=past_key, past_value=past_value, sinks=sinks)
        options: dict[str, object] = dict(layout=layout, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=scale)
        options |= dict(softcap=softcap, masks=masks, weights=weights, present=present or None)
        options |= extras(scores, lse, entropy)
        call = tensor_call(ATTENTION_PATH, read_attention, arrays, masked_rows, options)
        return await self.http.ask(call, timeout_s, request_id)

    @with_remedies
    async def attend_text(
        self,
        model: str,
        text: str | None = None,
        text_pair: str | None = None,
        *,
        tokens: Sequence[str] | None = None,
        layer: int,
        masks: Sequence[Mask] = (),
        weights: WeightsWanted = None,
        scores: ScoresWanted = None,
        lse: bool = False,
        entropy: bool = False,
        masked_rows: MaskedRows = "zero",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> TextAnswer:
        """Attend in a layer of a model (0 is the first) to a text, a pair of texts, or `tokens`: strings of its vocabulary.

        The hidden states in front of the layer are those of the model without masks. Raises as `attend`, or ModelNotFound.
        """
        of_text: dict[str, object] = {"text": text, "text_pair": text_pair, "tokens": tokens, "layer": layer}
        options = {"masks": masks, "weights": weights, **extras(scores, lse, entropy)}
        return await self.http.ask(text_call(model, of_text, masked_rows, options), timeout_s, request_id)

    @with_remedies
    async def states(
        self,
        model: str,
        text: str | None = None,
        text_pair: str | None = None,
        *,
        tokens: Sequence[str] | None = None,
        layers: Sequence[int],
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> States:
        """Return the hidden states of a text in front of `layers`; their number is behind the last. Raises as `attend_text`."""
        fields = {"text": text, "text_pair": text_pair, "tokens": tokens, "layers": layers}
        call = binary_answer(f"{model_path(model)}/states", read_states, fields)
        return await self.http.ask(call, timeout_s, request_id)

    @overload
    def attend_many(
        self, layer: str, items: AsyncItems[Array], *, window: int = ..., timeout_s: float | None = ...
    ) -> AsyncGenerator[Answer[Array]]: ...

    @overload
    def attend_many(
        self, layer: str, items: AsyncItems[Array], *, on_error: OnError, window: int = ..., timeout_s: float | None = ...
    ) -> AsyncGenerator[Outcome[Array]]: ...  # fmt: skip

    def attend_many(
        self,
        layer: str,
        items: AsyncItems[Array],
        *,
        window: int = DEFAULT_WINDOW,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
    ) -> AsyncGenerator[Outcome[Array]]:
        """Work like `Client.attend_many`; `items` may also be an async iterable.

        Wrap it in `contextlib.aclosing` so that leaving the loop early cancels the calls in flight at once.
        """
        check_many(items, window, timeout_s, on_error, AsyncIterable)
        numbers = itertools.count()

        def start(item: Array | Request[Array]) -> Coroutine[Any, Any, Outcome[Array]]:
            return started(self.http, layer, item, next(numbers), timeout_s, on_error)

        return in_order_async(items, start, window)

    async def attend_json(
        self, layer: str, body: Mapping[str, Any], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Send `body`, a request in JSON form, unchanged, and return the JSON object of the answer. Raises as `attend` does."""
        call = Call(f"{layer_path(layer)}/attend", read_json, json_text(body).encode())
        return await self.http.ask(call, timeout_s, request_id)

    async def attend_text_json(
        self, model: str, body: Mapping[str, Any], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Send `body`, an attend request on text in JSON form, unchanged, and return the JSON object of the answer."""
        call = Call(f"{model_path(model)}/attend", read_json, json_text(body).encode())
        return await self.http.ask(call, timeout_s, request_id)

    async def attention_json(
        self, body: Mapping[str, Any], *, timeout_s: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        """Send `body`, an attention request in JSON form, unchanged, and return the JSON object of the answer."""
        call = Call(ATTENTION_PATH, read_json, json_text(body).encode())
        return await self.http.ask(call, timeout_s, request_id)

    async def layers(self) -> list[Layer]:
        """Return the layers that the service serves."""
        return await self.http.ask(Call("/v1/layers", read_layers))

    async def layer(self, name: str) -> Layer:
        """Return the layer of this name. Raises LayerNotFound."""
        return await self.http.ask(Call(layer_path(name), read_layer))

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that the service has, as the API's objects; `fault` says why one cannot be used now."""
        return await self.http.ask(Call("/v1/models", read_models))

    async def is_ready(self) -> bool:
        """Return whether the service reports that it is ready, without retries; False also if there is no valid answer."""
        try:
            return (await self.http.ask(Call("/readyz", read_json, attempts=1))).get("status") == "ready"
        except ServiceError:
            return False

    async def close(self) -> None:
        """Close the client: calls in flight raise ConnectionFailed, later ones RuntimeError."""
        await self.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def check_many(items: object, window: int, timeout_s: float | None, on_error: OnError, *kinds: type) -> None:
    """Check the arguments when attend_many is called, not at the first answer. Raises InvalidInput."""
    check_count(window, "window")
    checked_timeout(timeout_s)
    if on_error not in get_args(OnError):
        raise InvalidInput('on_error must be "raise" or "yield"')
    if not isinstance(items, (Iterable, *kinds)):
        raise InvalidInput("items must be an iterable of queries or Requests (AsyncClient: also an async iterable)")


def started(
    http: HttpTransport, layer: str, item: Array | Request[Array], nth: int, timeout_s: float | None, on_error: OnError
) -> Coroutine[Any, Any, Outcome[Array]]:
    """Copy the item's bytes at once, because the caller may reuse the array; return the coroutine that asks."""
    call: Call[Answer[Array]] | ServiceError
    try:
        call = attend_call(layer, item if isinstance(item, Request) else Request(item))
    except ServiceError as error:
        call = error

    async def outcome() -> Outcome[Array]:
        try:
            if isinstance(call, ServiceError):
                raise call
            return await http.ask(call, timeout_s)
        except ServiceError as error:
            error.add_note(f"item {nth} of attend_many")
            if on_error == "raise":
                raise
            return error.bare()  # frames would keep the request for as long as the caller keeps the error

    return outcome()


async def in_order_async(
    items: Iterable[Item] | AsyncIterable[Item], start: Callable[[Item], Coroutine[Any, Any, Result]], window: int
) -> AsyncGenerator[Result]:
    """Work like `in_order`, with tasks; the generator ends only after the tasks that it cancels have ended."""
    pending: deque[asyncio.Task[Result]] = deque()
    try:
        async for item in _each(items):
            pending.append(asyncio.ensure_future(start(item)))
            while pending and (len(pending) >= window or pending[0].done()):
                yield await pending[0]
                pending.popleft()
        while pending:
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _each(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
