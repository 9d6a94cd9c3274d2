"""Trace export: sends spans by OTLP over HTTP, as the standard `OTEL_…` variables configure.

Imported only if tracing is on.
Invariants: A request never waits for it: a thread of the SDK sends the spans, and drops those that do not fit into its queue. A
collector that does not answer costs spans and log lines, and delays the end of the process by at most FLUSH_S.
"""

from __future__ import annotations

import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from service import __version__
from service.observability.tracing import SERVICE_NAME

FLUSH_S = 1.0


class TraceExport:
    """One process's exporter; made before the first request, closed after the last."""

    def __init__(self) -> None:
        logging.getLogger("opentelemetry.util.re").addFilter(_without_text)
        self._exporter = OTLPSpanExporter()
        # What the environment says of this service goes first, unless it is empty.
        found = {name: value for name, value in Resource.create().attributes.items() if value}
        name = SERVICE_NAME if str(found["service.name"]).startswith("unknown_service") else found["service.name"]
        resource = Resource({"service.version": __version__, **found, "service.name": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer(SERVICE_NAME, __version__)

    def close(self) -> None:
        """Send what is left, within FLUSH_S; the SDK's own shutdown would wait up to 30 s for an absent collector."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _without_text(record: logging.LogRecord) -> bool:
    """Remove the text of a malformed OTEL_EXPORTER_OTLP_HEADERS, which may have a secret, from the line about it."""
    record.args = ("(not shown)",)
    return True
