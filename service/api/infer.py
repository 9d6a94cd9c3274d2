"""The hot route of the Open Inference Protocol: POST /v2/models/{layer}[/versions/{version}]/infer, as a plain ASGI endpoint.

Laws: a layer is a model and its only version is 1; whatever Content-Type says, the body is read as the protocol says (its
own clients send none, or octet-stream); the call, the queue and the bits are those of `/v1`.
"""

from __future__ import annotations

from collections.abc import Callable

from service.api.accept import answer_coding
from service.api.asgi import Receive, Scope, Send, headers
from service.api.attend import AttendLimits, asked_timeout_s
from service.api.body import read_body
from service.api.content_type import JSON, OCTET_STREAM
from service.api.exchange import Exchange
from service.api.reply import Headers, send_reply
from service.api.trace import trace_of
from service.attention.call import Answer, Call
from service.batching.batcher import Batcher
from service.errors import BadRequest, LayerNotFound
from service.layers.catalog import Catalog
from service.layers.stored_layer import StoredLayer
from service.wire.decoding_thread import DecodingThread
from service.wire.inference_answer import VERSION, write_inference
from service.wire.inference_request import InferenceRequest, parse_inference
from service.wire.request import CheckedRequest, check_request

ROUTES = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
CODINGS = (b"gzip", b"deflate")


class Infer:
    """The endpoint; `catalog` answers which layers are served now (or raises NotReady)."""

    def __init__(
        self,
        catalog: Callable[[], Catalog],
        batcher: Batcher[Call, Answer],
        decoding: DecodingThread,
        limits: AttendLimits,
        now: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._decoding = decoding
        self._batcher = batcher
        self._limits = limits
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, limits = trace_of(scope), self._limits
        layer = served_model(self._catalog(), **scope["path_params"])
        trace.layer = layer.name
        timeout_s = asked_timeout_s(scope, limits.timeout_s)
        json_length = _json_length(scope)
        parts = await read_body(scope, receive, limits.body, CODINGS)
        exchange = Exchange(trace, self._now)
        trace.bytes_in = sum(map(len, parts))

        async def decode() -> tuple[InferenceRequest, CheckedRequest]:
            body = bytearray().join(parts)
            parts.clear()
            found = await parse_inference(body, json_length, max_depth=limits.max_json_depth)
            checked = await check_request(
                found.attend, layer.name, layer.spec, limits.request, mask_params=found.mask_params
            )
            return found, checked

        is_large = trace.bytes_in >= limits.off_loop_bytes
        inference, request = await (self._decoding.run(decode) if is_large else decode())
        timeout_s = min(timeout_s, inference.timeout_s or timeout_s)
        outcome = await exchange.ask(request, self._batcher, limits.max_shared, receive, timeout_s)
        facts = exchange.facts(layer, request, outcome)
        length, pieces = write_inference(outcome.result, facts, inference)
        coding = answer_coding(scope, CODINGS, take_offers=limits.take_offers)
        await send_reply(send, [*_content(length), exchange.server_timing()], pieces, coding)
        exchange.sent()


def served_model(catalog: Catalog, layer: str, version: str = VERSION) -> StoredLayer:
    """The layer that is this model in this version; raises LayerNotFound."""
    if version != VERSION:
        raise LayerNotFound(f"every model has one version, {VERSION}")
    return catalog.get(layer)


def _json_length(scope: Scope) -> bytes | None:
    values = headers(scope, b"inference-header-content-length")
    if len(values) > 1:
        raise BadRequest("Inference-Header-Content-Length must be there once")
    return values[0] if values else None


def _content(length: int | None) -> Headers:
    if length is None:
        return [(b"content-type", JSON)]
    return [(b"content-type", OCTET_STREAM), (b"inference-header-content-length", str(length).encode())]
