"""A collector: takes OTLP over HTTP as a real one does, and keeps the spans."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class TraceCollector:
    """`spans` are pairs of a resource's attributes and a span; gone at the end of the block."""

    def __init__(self) -> None:
        self.spans: list[tuple[dict, Span]] = []
        self.paths: set[str] = set()
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                collector._take(self.path, self.rfile.read(int(self.headers["content-length"])))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        with self._news:
            self.paths.add(path)
            for group in told.resource_spans:
                resource = attributes_of(group.resource)
                self.spans += [(resource, span) for scope in group.scope_spans for span in scope.spans]
            self._news.notify_all()

    def wait(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(condition, 60), [span.name for _, span in self.spans]

    def named(self, name: str) -> list[Span]:
        return [span for _, span in self.spans if span.name == name]


def attributes_of(holder) -> dict:
    """Of a span or a resource: name to string or number."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}
