"""Resource of the exported spans: what the environment says of the service, and its own name and version otherwise."""

import logging

import pytest
from opentelemetry.sdk.trace import Tracer

from service import __version__
from service.observability.trace_export import TraceExport


def resource_of(monkeypatch, attributes: str):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
    export = TraceExport()
    export.close()
    assert isinstance(export.tracer, Tracer)
    return export.tracer.resource.attributes


@pytest.mark.parametrize(
    ("attributes", "name", "version"),
    [
        ("team=a", "attention-service", __version__),
        ("service.name=vision,service.version=9", "vision", "9"),
        (
            "service.name=,service.version=",
            "attention-service",
            __version__,
        ),  # of an unset variable: service.name=$NAME
    ],
)
def test_a_span_has_the_name_and_version_of_the_environment_or_else_the_services_own(
    monkeypatch, attributes, name, version
):
    found = resource_of(monkeypatch, attributes)
    assert (found["service.name"], found["service.version"]) == (name, version)


def test_a_malformed_attribute_is_reported_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        resource_of(monkeypatch, "malformed")
    assert len(caplog.records) == 1
