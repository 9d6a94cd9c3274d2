"""Tracing: one span per request and per batch, with the measured times, in the caller's trace."""

import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from service.api.outer_middleware import record_of, start_record
from service.batching.job import BatchInfo
from service.http.asgi import ClientGone
from service.observability import tracing
from service.observability.telemetry import PROBE, Telemetry
from service.observability.tracing import RequestSpans, record_batch
from tests.doubles import lone_metrics
from tests.spans import Spans

END_NS = 1_700_000_000 * 10**9
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LANE = ("small", "sha256:0", False, "light")


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """It is 12 s by the monotonic clock, which the records have, and END_NS by the wall clock, which spans have."""
    monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic=lambda: 12.0, time_ns=lambda: END_NS))


async def never(*_):
    raise AssertionError


def serve(spans, note=lambda trace: None, error=None, headers=(), **fields):
    """Serve a request that starts at 10 s and ends at 12 s by the monotonic clock."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/x",
        "headers": list(headers),
        "server": ("h", 80),
        **fields,
    }
    start_record(scope, 10.0)

    async def inside(scope, receive, send):
        note(record_of(scope))
        if error is not None:
            raise error

    around = RequestSpans(inside, spans.tracer)

    async def main():
        await around(scope, never, never)

    asyncio.run(main())


def answered(trace):
    trace.route, trace.status, trace.layer, trace.tokens = "/v1/layers/{layer}/attend", 200, "small", 7
    trace.receive_s, trace.decode_s, trace.queue_s, trace.compute_s, trace.encode_s = 0.5, 0.25, 0.5, 0.25, 0.25


def seconds(span):
    return (span.start_time - END_NS) / 10**9, (span.end_time - END_NS) / 10**9


def test_a_request_is_a_span_of_its_whole_time_with_its_phases_in_order(spans):
    serve(spans, answered)
    (request,) = spans.requests
    assert request.name == "POST /v1/layers/{layer}/attend"
    assert seconds(request) == (-2.0, 0.0)
    assert request.status.status_code is StatusCode.UNSET
    assert [(span.name, *seconds(span)) for span in spans.phases(request)] == [
        ("receive", -2.0, -1.5),
        ("decode", -1.5, -1.25),
        ("queue", -1.25, -0.75),
        ("compute", -0.75, -0.5),
        ("send", -0.25, 0.0),
    ]


def test_a_request_span_has_the_attributes_of_the_conventions(spans):
    serve(spans, answered)
    found = dict(spans.requests[0].attributes)
    assert found.pop("attention.request_id")
    assert found == {
        "http.request.method": "POST",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "http.route": "/v1/layers/{layer}/attend",
        "url.path": "/v1/layers/small/attend",
        "server.address": "h",
        "server.port": 80,
        "http.response.status_code": 200,
        "http.request.body.size": 0,
        "http.response.body.size": 0,
        "attention.layer": "small",
        "attention.tokens": 7,
    }


def test_a_request_continues_the_trace_of_its_caller(spans):
    headers = [(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode()), (b"tracestate", b"vendor=1")]
    serve(spans, answered, headers=headers)
    (request,) = spans.requests
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize("value", [b"", b"00-zz-1-01", b"\xff" * 55, f"00-{'0' * 32}-{PARENT_ID}-01".encode()])
def test_a_malformed_traceparent_begins_a_new_trace(spans, value):
    serve(spans, answered, headers=[(b"traceparent", value)])
    assert spans.requests[0].parent is None


def test_a_repeated_tracestate_counts_as_one_list_and_a_repeated_traceparent_as_none(spans):
    """W3C Trace Context, section 3.3.1; RFC 9110, section 5.3."""
    parents = [(b"traceparent", f"00-{TRACE_ID}-{parent}-01".encode()) for parent in (PARENT_ID, PARENT_ID[::-1])]
    states = [(b"tracestate", b"one=1"), (b"tracestate", b"two=2")]
    serve(spans, answered, headers=[parents[0], *states])
    serve(spans, answered, headers=[*parents, *states])
    continued, new = spans.requests
    assert dict(continued.context.trace_state) == {"one": "1", "two": "2"}
    assert new.parent is None


def test_malformed_headers_of_a_trace_add_no_lines_to_the_log(spans, caplog):
    """The library would log each of them with the caller's text, at every request."""
    parent = (b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode())
    for state in (b"Secret", b"a=1,a=2", b"a=" + b"secret" * 1000):
        serve(spans, answered, headers=[parent, (b"tracestate", state), (b"baggage", b"secret,=,x" + b"y" * 9000)])
    serve(spans, answered, headers=[(b"traceparent", b"secret" * 1000)])
    assert not caplog.records


def test_a_span_repeats_no_text_of_the_caller(spans):
    serve(spans, method="EVIL", path="/secret", headers=[(b"secret", b"secret")], query_string=b"secret")
    (request,) = spans.requests
    assert request.name == "HTTP"
    assert request.attributes["http.request.method"] == "_OTHER"
    assert not [value for value in request.attributes.values() if "secret" in str(value) or "EVIL" in str(value)]


def test_an_unfinished_phase_is_named_by_the_state_of_the_request(spans):
    def late(trace):
        trace.status, trace.code, trace.stage = 504, "deadline_exceeded", "queued"
        trace.receive_s, trace.decode_s = 0.5, 0.25

    serve(spans, late)
    (request,) = spans.requests
    assert [(span.name, *seconds(span)) for span in spans.phases(request)][-1] == ("queued", -1.25, 0.0)
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["error.type"] == request.attributes["attention.code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("error", "code"), [(ClientGone(), "client_gone"), (asyncio.CancelledError(), "incomplete")], ids=["left", "cut"]
)
def test_an_undelivered_answer_is_an_error_for_later_observers_too(spans, error, code):
    with pytest.raises(type(error)):
        serve(spans, error=error)
    (request,) = spans.requests
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["error.type"] == code
    assert "http.response.status_code" not in request.attributes


def test_health_checks_and_scrapes_are_no_spans(spans):
    for path in ("/metrics", "/healthz", "/readyz", "/v2/health/ready"):
        serve(spans, path=path)
    assert not spans.all


def test_an_unsampled_request_is_served_without_a_span():
    spans, served = Spans(ALWAYS_OFF), list[object]()
    serve(spans, served.append)
    assert len(served) == 1
    assert not spans.all


def test_a_batch_is_a_trace_of_its_own_and_its_requests_link_to_it(spans):
    batch = BatchInfo(3, 4, 40)
    record_batch(spans.tracer, "small", batch, 0.5)
    (span,) = spans.batches
    assert span.parent is None
    assert seconds(span) == (-0.5, 0.0)
    assert span.attributes["attention.layer"] == "small"
    assert span.attributes["attention.batch.requests"] == 3
    assert span.attributes["attention.batch.tokens"] == 40

    def in_batch(trace):
        trace.batch = batch

    serve(spans, in_batch)
    assert [link.context for link in spans.requests[0].links] == [span.context]


def test_a_probe_is_no_span_and_any_other_batch_is_one(spans):
    telemetry = Telemetry(lone_metrics(), spans.tracer)
    telemetry.batch_done((*LANE[:-1], PROBE), BatchInfo(3, 4, 40), 0.5)
    assert not spans.all
    telemetry.batch_done(LANE, BatchInfo(3, 4, 40), 0.5)
    assert len(spans.batches) == 1
