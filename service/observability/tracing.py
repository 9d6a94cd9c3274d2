"""Tracing: makes an OpenTelemetry span of each request and each batch, at its end.

Nothing here is used unless tracing is on. Independent of where spans go (`observability/trace_export.py`).
Invariants: Each request has one server span, whatever its outcome, in the caller's trace if it has one. Its phases are its
children, with the times that are measured anyway. It links to the span of its batch, which is a trace of its own, because a batch
belongs to no single caller. Health checks and scrapes have no span. No attribute repeats a caller's text, except a known method
and a well-formed request id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from service.api.outer_middleware import RequestRecord, record_of
from service.batching.job import BatchInfo
from service.http.asgi import Application, ClientGone, Receive, Scope, Send
from service.http.request_parser import fields_of

SERVICE_NAME = "attention-service"
_NS = 10**9
_SERVER_FAULT = 500
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
# The key of the span's context in a batch's notes.
_SPAN = "span"


class RequestSpans:
    """Wraps `inside` and makes a span at the end of every request to it."""

    def __init__(self, inside: Application, tracer: Tracer) -> None:
        for name in ("opentelemetry.baggage", "opentelemetry.trace"):  # which log each malformed header, with its text
            logging.getLogger(name).setLevel(logging.ERROR)
        self._inside = inside
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        if record.is_monitoring:
            await self._inside(scope, receive, send)
            return
        cut: str | None = "incomplete"
        try:
            await self._inside(scope, receive, send)
            cut = None
        except ClientGone:
            cut = "client_gone"
            raise
        finally:
            self._record(scope, record, cut)

    def _record(self, scope: Scope, trace: RequestRecord, cut: str | None) -> None:
        end = time.time_ns()
        start = end - int((time.monotonic() - trace.started) * _NS)
        method = trace.method if trace.method in _METHODS else "HTTP"
        headers = {name.decode(): b",".join(values).decode("latin-1") for name, values in fields_of(scope).items()}
        batch_context = None if trace.batch is None else trace.batch.notes.get(_SPAN)
        span = self._tracer.start_span(
            method if trace.route == "unmatched" else f"{method} {trace.route}",
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(scope, trace)),
            links=[Link(batch_context)] if isinstance(batch_context, SpanContext) else [],
            start_time=start,
        )
        if span.is_recording():
            if cut is not None or trace.status >= _SERVER_FAULT:
                span.set_attribute("error.type", cut or trace.code or str(trace.status))
                span.set_status(StatusCode.ERROR)
            self._record_phases(span, trace, start, end)
        span.end(end)

    def _record_phases(self, span: Span, trace: RequestRecord, start: int, end: int) -> None:
        """Make a span of each phase, in order; an unfinished phase has the name of the stage that the request had reached."""
        if trace.receive_s is None:
            return
        inside = set_span_in_context(span, Context())
        for name in ("receive", "decode", "queue", "compute"):
            seconds: float | None = getattr(trace, f"{name}_s")
            if seconds is None:
                break
            end_of_phase = start + int(seconds * _NS)
            self._tracer.start_span(name, context=inside, start_time=start).end(end_of_phase)
            start = end_of_phase
        name = trace.stage
        if trace.encode_s is not None:
            name, start = "send", end - int(trace.encode_s * _NS)
        self._tracer.start_span(name, context=inside, start_time=start).end(end)


def record_batch(tracer: Tracer, layer: str, batch: BatchInfo, compute_s: float) -> None:
    """Make a span of a batch that ends now, and note its context, to which the spans of the batch's requests link."""
    end = time.time_ns()
    span = tracer.start_span(
        "batch",
        context=Context(),
        attributes={
            "attention.layer": layer,
            "attention.batch.requests": batch.requests,
            "attention.batch.sequences": batch.sequences,
            "attention.batch.tokens": batch.tokens,
            "attention.batch.weights_bytes": batch.weights_bytes,
        },
        start_time=end - int(compute_s * _NS),
    )
    span.end(end)
    batch.notes[_SPAN] = span.get_span_context()


def _attributes(scope: Scope, trace: RequestRecord) -> Iterator[tuple[str, AttributeValue]]:
    """Yield the HTTP attributes by OpenTelemetry's semantic conventions (1.44), then this service's own."""
    yield "http.request.method", trace.method if trace.method in _METHODS else "_OTHER"
    yield "url.scheme", scope.get("scheme", "http")
    yield "network.protocol.version", scope.get("http_version", "1.1")
    if trace.route != "unmatched":
        yield "http.route", trace.route
        path = trace.route.replace("{layer}", trace.layer or "{layer}")
        if "{" not in path:
            yield "url.path", path
    if (server := scope.get("server")) is not None:
        yield "server.address", str(server[0])
        if server[1] is not None:
            yield "server.port", int(server[1])
    if trace.status:
        yield "http.response.status_code", trace.status
    yield "http.request.body.size", trace.bytes_in
    yield "http.response.body.size", trace.bytes_out
    yield "attention.request_id", trace.request_id
    for name, value in (("layer", trace.layer), ("tokens", trace.tokens), ("code", trace.code)):
        if value is not None:
            yield f"attention.{name}", value
