"""Spans as a test sees them: a tracer whose spans stay in memory."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import SpanKind


class Spans:
    """The spans of `tracer`, in the order in which they ended."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.kind is SpanKind.SERVER]

    @property
    def batches(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == "batch"]

    def phases(self, request: ReadableSpan) -> list[ReadableSpan]:
        """The children of a request, by their start."""
        children = [span for span in self.all if span.parent and span.parent.span_id == request.context.span_id]
        return sorted(children, key=lambda span: span.start_time or 0)
