"""Attend route: POST /v1/layers/{layer}/attend, a hot route served as a plain ASGI endpoint.

Invariants: checks run in the contract's order (media type, size, syntax, fields, tensors, masks, cost), all before the queue.
Both forms of a body, JSON and safetensors, become the same `CheckedRequest` and share every later step.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.api.accept import JSON, SAFETENSORS, answer_coding, answer_type, body_type
from service.api.reply import Piece, send_reply
from service.api.request_body import joined
from service.api.request_context import LayerRequests, RequestContext
from service.attention.call import Answer
from service.http.asgi import Receive, Scope, Send
from service.http.head import HeaderFields
from service.wire.answer import AnswerFacts, write_json
from service.wire.attend_request import CheckedRequest, check_request
from service.wire.request_template import RequestTemplates
from service.wire.safetensors_codec import write_safetensors

ROUTE = "/v1/layers/{layer}/attend"
BODY_CODINGS = (b"gzip", b"zstd")
ANSWER_CODINGS = (b"zstd", b"gzip")


class Attend:
    """The ASGI endpoint, with its request-template cache."""

    def __init__(self, layer_requests: LayerRequests) -> None:
        self._layer_requests = layer_requests
        limits = layer_requests.limits
        self._templates = RequestTemplates(limits.request, limits.max_json_depth, limits.max_text_numbers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._layer_requests.open(scope, receive) as context:
            await _attend(context, self._templates, scope, send)


async def _attend(context: RequestContext, templates: RequestTemplates, scope: Scope, send: Send) -> None:
    limits = context.limits
    layer = context.layer(**scope["path_params"])
    came, wanted, coding = context.fields.make(_forms, limits.take_offers)
    is_binary = came == SAFETENSORS
    parts = await context.read(BODY_CODINGS, layer, is_binary=is_binary)

    async def decode() -> CheckedRequest:
        if is_binary:
            return await context.checked(lambda: templates.read(joined(parts), layer.name, layer.digest, layer.spec))
        # No name here refers to the text: the document alone keeps the parts of it that it needs.
        document = await context.parsed(joined(parts))
        return await context.checked(lambda: check_request(document, layer.name, layer.spec, limits.request))

    with context.watched():
        request = await context.decoded(decode)
        outcome = await context.ask(layer, request)
    facts = context.facts(layer, request, outcome)
    pieces = _pieces(outcome.result, facts, request, wanted)
    await send_reply(send, [(b"content-type", wanted), context.server_timing()], pieces, coding)
    context.sent()


def _forms(fields: HeaderFields, take_offers: bool) -> tuple[bytes, bytes, bytes | None]:
    """Return the media type of the body, the media type of the answer, and the answer's content coding."""
    came = body_type(fields, (JSON, SAFETENSORS))
    wanted = answer_type(fields, (came, JSON if came == SAFETENSORS else SAFETENSORS))
    return came, wanted, answer_coding(fields, ANSWER_CODINGS, take_offers=take_offers)


def _pieces(answer: Answer, facts: AnswerFacts, request: CheckedRequest, wanted: bytes) -> Iterable[Piece]:
    if wanted == SAFETENSORS:
        return write_safetensors(answer, facts, is_batch=request.is_batch)
    return write_json(answer, facts, request.form, is_batch=request.is_batch)
