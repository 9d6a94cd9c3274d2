"""Tests of `observability/trace_export.py`: what the environment says of the service."""

from typing import Any

import pytest

from service import __version__
from service.observability.trace_export import TraceExport


@pytest.mark.parametrize(
    ("given", "name", "version"),
    [
        ("team=vision", "attention-service", __version__),
        ("service.name=mine,service.version=9", "mine", "9"),
        ("service.name=,service.version=", "attention-service", __version__),  # of a variable that is not set
    ],
)
def test_spans_have_the_name_and_version_that_the_environment_gives_if_it_gives_any(given, name, version, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", given)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "")
    export = TraceExport()
    try:
        span: Any = export.tracer.start_span("request")
    finally:
        export.close()
    found = span.resource.attributes
    assert (found["service.name"], found["service.version"]) == (name, version)
