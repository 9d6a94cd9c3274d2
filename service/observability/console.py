"""Console: a log line as a person reads it in a terminal, by structlog's renderer.

Invariants: No value moves the cursor or forges a line: what is not printable is escaped, and a traceback is indented.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

from structlog.dev import ConsoleRenderer

from service.errors import printable

# What each worker says of its start: the three lines of `serve` say it once.
_HIDDEN = ("serving", "worker_started", "listening", "layer_loaded", "layers_served")
# A terminal shows of a request what fits into a line or two; JSON has the rest.
_OF_REQUEST = ("request_id", "peer", "batch_requests", "decode_ms", "queue_ms", "compute_ms", "bytes_in", "bytes_out")


def console_renderer(*, colours: bool) -> Callable[[Mapping[str, Any]], bytes]:
    """Return what renders the fields of an event as its lines, or as none."""
    renderer = ConsoleRenderer(colors=colours, sort_keys=False, pad_event_to=16, repr_native_str=True)

    def render(line: Mapping[str, Any]) -> bytes:
        if line["event"] in _HIDDEN:
            return b""
        left_out = ("version", *(_OF_REQUEST if line["event"] == "request" else ()))
        fields = {name: value for name, value in line.items() if name not in left_out}
        fields["timestamp"] = dt.datetime.fromisoformat(line["timestamp"]).astimezone().strftime("%H:%M:%S")
        if "exception" in fields:
            fields["exception"] = "\n".join(f"    {printable(row)}" for row in line["exception"].split("\n"))
        return renderer(None, "", fields).encode() + b"\n"

    return render
