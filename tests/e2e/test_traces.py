"""Traces as a collector gets them: the real service, the real exporter, OTLP over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest

from tests.e2e.started import X
from tests.e2e.trace_collector import TraceCollector, attributes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROUTE = "POST /v1/layers/{layer}/attend"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def traced(serve):
    def start(endpoint: str, *, workers: int = 1, **otel: str):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **otel}
        service = serve(workers=workers, traces="true", environment=environment)
        service.wait_ready()
        return service

    return start


@pytest.mark.long
def test_a_request_its_phases_and_its_batch_reach_the_collector_in_the_callers_trace(traced):
    with TraceCollector() as collector:
        service = traced(collector.url, workers=2, OTEL_BSP_SCHEDULE_DELAY="100")
        traceparent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        for _ in range(40):
            assert httpx2.post(f"{service.url}/v1/layers/small/attend", json=X, headers=traceparent).status_code == 200
        collector.wait(lambda: len(collector.named(ROUTE)) == len(collector.named("batch")) == 40)
        collector.wait(lambda: len(collector.named("send")) == 40)
        batches = {span.span_id for span in collector.named("batch")}
        for request in collector.named(ROUTE):
            assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
            children = {span.name for _, span in collector.spans if span.parent_span_id == request.span_id}
            assert children == {"receive", "decode", "queue", "compute", "send"}
            assert [link.span_id in batches for link in request.links] == [True]
            assert abs(request.start_time_unix_nano / 1e9 - time.time()) < 60
        assert {attributes_of(span)["attention.batch.requests"] for span in collector.named("batch")} == {1}
        resources = [resource for resource, _ in collector.spans]
        assert {(told["service.name"], told["service.version"]) for told in resources} == {
            ("attention-service", "0.1.0")
        }
        assert len({told["service.instance.id"] for told in resources}) == 2, "each process is an instance"
        assert collector.paths == {"/v1/traces"}


@pytest.mark.long
def test_the_standard_variables_set_the_service_name_and_the_sampling(traced):
    with TraceCollector() as collector:
        service = traced(
            collector.url,
            OTEL_BSP_SCHEDULE_DELAY="100",
            OTEL_SERVICE_NAME="vision",
            OTEL_TRACES_SAMPLER="parentbased_always_off",
        )
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}
            httpx2.post(f"{service.url}/v1/layers/small/attend", json=X, headers=headers)
        collector.wait(lambda: collector.named(ROUTE))
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert {resource["service.name"] for resource, _ in collector.spans} == {"vision"}
        assert len(collector.named(ROUTE)) == 1, "the one whose caller samples it"


@pytest.mark.long
def test_unsent_spans_are_sent_at_the_end(traced):
    with TraceCollector() as collector:
        service = traced(collector.url, OTEL_BSP_SCHEDULE_DELAY="3600000")
        assert service.attend().status_code == 200
        assert not collector.spans
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert len(collector.named(ROUTE)) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_a_missing_collector_delays_neither_answers_nor_the_end(traced, kind):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        if kind == "refuses":
            deaf.close()
        service = traced(endpoint, OTEL_BSP_SCHEDULE_DELAY="100")
        assert {service.attend().status_code for _ in range(20)} == {200}
        started = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert time.monotonic() - started < 7, "the SDK's own end waits 8 to 30 s"


def test_without_the_extra_the_start_is_refused_in_one_line(tmp_path):
    hidden = tmp_path / "opentelemetry"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("")
    (tmp_path / "layers").mkdir()
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--layers-dir", str(tmp_path / "layers")]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", os.curdir)])
    environment = {**os.environ, "ATTENTION_TRACES": "true", "PYTHONPATH": paths}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert refused.returncode == 1
    assert refused.stderr == (
        "attention-service: ATTENTION_TRACES needs the extra `otel` (pip install 'attention-service[otel]')\n"
    )


@pytest.mark.parametrize("variable", ["OTEL_BSP_MAX_QUEUE_SIZE=100", "OTEL_PROPAGATORS=nobodys"])
def test_an_invalid_variable_of_the_exporter_ends_the_start_in_one_line(serve, variable):
    name, _, value = variable.partition("=")
    service = serve(workers=1, traces="true", environment={name: value})
    assert service.process.wait(30) == 1
    assert service.process.stderr is not None
    told = service.process.stderr.read()
    assert told.startswith("attention-service: ATTENTION_TRACES: an OTEL_… variable is invalid: ")
    assert told.count("\n") == 1


def test_a_variable_that_only_traces_read_stops_no_service_without_them(serve):
    serve(workers=1, environment={"OTEL_PROPAGATORS": "nobodys"}).wait_ready()


def test_a_malformed_header_for_the_collector_is_reported_without_its_secret(serve):
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization: Bearer secret, b=1"}
    service = serve(workers=1, traces="true", environment=headers)
    service.wait_ready()
    assert service.find(event="library", logger="opentelemetry.util.re")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(30) == 0
    assert service.process.stderr is not None
    assert "secret" not in "".join(service.texts) + service.process.stderr.read()
