"""Logs: writes one line per event and per request to stdout, in JSON or for a person (`console.py`).

Independent of routes, settings and the meaning of events.
Invariants: Nothing a caller sends can break or forge a line (both forms escape it) or make it longer than MAX_LINE_BYTES. Up to
that size writes to a pipe are atomic, so lines of several processes never mix. A stdout that is gone or not read costs lines,
never a request or time (`line_writer.py`). A request's line costs 4 to 8 µs, and the write to a pipe 8 µs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, BinaryIO

import orjson

from service import __version__
from service.loop_time import Clock, LoopClock, LoopTick
from service.observability import line_writer
from service.observability.line_writer import LineWriter, timestamp

# structlog imports rich if it is installed, to colour a terminal. Only the command line needs it; it costs a process 4 MB. None
# is Python's mark of a module that cannot be imported.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
import structlog  # noqa: E402
from structlog.typing import FilteringBoundLogger  # noqa: E402

if not sys.modules["rich"]:
    del sys.modules["rich"]

MAX_LINE_BYTES = 4096  # PIPE_BUF on Linux
# Lines up to this size keep texts of any length.
SHORT_LINE_BYTES = 1024
MAX_TEXT_CHARS = 256
MAX_TRACE_BYTES = 2800
# In a window at most this many refusals of one kind have lines of their own; more are a flood.
REFUSAL_LINES = 100
REFUSAL_WINDOW_S = 1.0
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure_logs(
    level: str, stream: LineWriter | BinaryIO | None = None, *, worker: int | None = None, log_format: str = "json"
) -> None:
    """Configure logs once per process, before its first line; `stream` is stdout except in tests.

    Every line carries the number of the `worker`.
    """
    global _lines, _process  # noqa: PLW0603 (structlog's configuration is global as well)
    line_writer.use_format(log_format)
    _process = {"version": __version__} if worker is None else {"version": __version__, "worker": worker}
    lines = _lines = _Lines(_stdout if stream is None else stream, _LEVELS[level])
    structlog.configure(
        processors=[structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: lines,
    )
    root = logging.getLogger()
    root.handlers[:] = [_LibraryHandler()]
    root.setLevel(_LEVELS[level])
    # Hides uvicorn's start and stop; `worker/server.py` and the supervisor log them.
    logging.getLogger("uvicorn").setLevel(max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(capture=True)


def get_logger() -> FilteringBoundLogger:
    """Return a logger; use it as `logger.info("event_name", field=value)`."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def log_request(fields: Mapping[str, Any]) -> None:
    """Log the one line of a request, with its `route`, `status` and `code`; it is written at the end of the loop tick."""
    if _lines.level <= _LEVELS["info"]:
        _lines.defer(fields)


def num_dropped_lines() -> int:
    """Return how many lines of this process were dropped so far; retry those that still wait."""
    _stdout.flush()
    return _stdout.num_dropped


def finish_logs() -> None:
    """Write deferred lines before the process ends; a slow reader has `line_writer.FINISH_S`."""
    _lines.finish()
    _stdout.finish()


class _Lines:
    """The output of structlog; joins lines, up to MAX_LINE_BYTES, into one write."""

    def __init__(self, stream: LineWriter | BinaryIO, level: int) -> None:
        self.level = level
        self._stream = stream
        self._refusals = RefusalLimit(LoopClock(), self._suppressed)
        self._deferred: list[tuple[int, Mapping[str, Any]]] = []
        self._tick = LoopTick(self.write)

    def defer(self, fields: Mapping[str, Any]) -> None:
        """Defer a line to the end of the loop tick: lines made one after another cost half of what each costs alone."""
        code = fields["code"]
        if code is not None and not self._refusals.admits((fields["route"], fields["status"], code)):
            return
        entry = time.time_ns(), fields  # before the list is read: another thread may log meanwhile and replace it
        self._deferred.append(entry)
        self._tick.ask()

    def finish(self) -> None:
        self._refusals.close()
        self.write()

    def _suppressed(self, kind: RefusalKind, count: int) -> None:
        route, status, code = kind
        get_logger().info("refusals_suppressed", route=route, status=status, code=code, count=count)

    def write(self, *later: bytes) -> None:
        """Write the deferred lines, and then those."""
        deferred, self._deferred = self._deferred, []
        lines = [_line("info", "request", fields.items(), at_ns) for at_ns, fields in deferred]
        with contextlib.suppress(OSError, ValueError):
            for chunk in _chunks([*lines, *later]):
                self._stream.write(chunk)

    debug = info = warning = warn = error = critical = exception = log = msg = write


RefusalKind = tuple[str, int, str]
"""Route, status and code; there are few kinds, because a caller chooses none of the three freely."""


class RefusalLimit:
    """Limits the lines of identical refusals; `report` gets the number of those without a line, once per window and kind.

    A window begins with the first refusal. In it the first REFUSAL_LINES of each kind have a line. If there are more, the kind
    has no line in the windows that follow at once, until one of them has at most REFUSAL_LINES.
    """

    def __init__(self, clock: Clock, report: Callable[[RefusalKind, int], object]) -> None:
        self._clock = clock
        self._report = report
        self._counts: dict[RefusalKind, int] = {}
        self._floods: frozenset[RefusalKind] = frozenset()
        self._is_timed = False

    def admits(self, kind: RefusalKind) -> bool:
        """Count this refusal; return whether it has a line of its own."""
        if not self._is_timed:
            self._start_window()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        return count <= self._limit(kind)

    def close(self) -> None:
        """End the window: report the refusals that have no line of their own."""
        counts, self._counts = self._counts, {}
        for kind, count in counts.items():
            if count > self._limit(kind):
                self._report(kind, count - self._limit(kind))
        self._floods = frozenset(kind for kind, count in counts.items() if count > REFUSAL_LINES)

    def _limit(self, kind: RefusalKind) -> int:
        return 0 if kind in self._floods else REFUSAL_LINES

    def _start_window(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop: `close` reports
            self._clock.call_at(self._clock.now() + REFUSAL_WINDOW_S, self._time_out)
            self._is_timed = True

    def _time_out(self) -> None:
        self._is_timed = False
        self.close()
        if self._floods:
            self._start_window()


def _chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, joined up to the size that a pipe takes whole."""
    chunk = b""
    for line in lines:
        if chunk and len(chunk) + len(line) > MAX_LINE_BYTES:
            yield chunk
            chunk = b""
        chunk += line
    if chunk:
        yield chunk


_stdout = LineWriter(1)
_process: dict[str, object] = {"version": __version__}
_lines = _Lines(_stdout, _LEVELS["info"])


class _LibraryHandler(logging.Handler):
    """Writes what uvicorn, asyncio and `warnings` log as lines of the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 (a library's wrong format string must not end a request)
            text = str(record.msg)
        level = min(record.levelno // 10 * 10, logging.CRITICAL)  # structlog has only the standard levels
        get_logger().log(level, "library", logger=record.name, message=text, exc_info=record.exc_info)


def _render(_: Any, level: str, event: MutableMapping[str, Any]) -> bytes:
    """Return the line of an event; the last processor of structlog."""
    return _line(level, event.pop("event"), event.items(), time.time_ns())


def _line(level: str, event: str, fields: Iterable[tuple[str, Any]], at_ns: int) -> bytes:
    """Return one line, whatever the values are, or none for an event that a person does not see; `at_ns` is since the epoch."""
    render = line_writer.console or _dumps
    head: dict[str, Any] = {"timestamp": timestamp(at_ns), "level": level, "event": event, **_process}
    head |= {name: value for name, value in fields if value is not None}
    line = render(head)
    if len(line) > SHORT_LINE_BYTES:  # only now, because a look at each value would be a fifth of a line's cost
        line = render({name: _truncated(name, value) for name, value in head.items()})
    if len(line) > MAX_LINE_BYTES:
        line = render({name: _shortened(value) for name, value in list(head.items())[:20]} | {"truncated": True})
    return line


def _truncated(name: str, value: Any) -> Any:
    """Cut a long text: keep the end of a traceback, and the start of any other text, because these say most."""
    if not isinstance(value, str) or len(value) <= MAX_TEXT_CHARS:
        return value
    if name == "exception":
        return value.encode(errors="replace")[-MAX_TRACE_BYTES:].decode(errors="ignore")
    return value[:MAX_TEXT_CHARS] + "…"


def _shortened(value: Any) -> Any:
    if isinstance(value, int | float) and abs(value) < 2**53:
        return value
    # Escaped before it is cut, so that JSON can at most double it.
    return str(value)[:60].encode("unicode_escape").decode("ascii")[:60]


def _dumps(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line, default=_ascii, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):
        # orjson refuses a lone surrogate or an integer beyond 64 bits: write them as text.
        return orjson.dumps(
            {str(name): _ascii(value) for name, value in line.items()}, option=orjson.OPT_APPEND_NEWLINE
        )


def _ascii(value: Any) -> str:
    return str(value)[:MAX_TRACE_BYTES].encode("ascii", "backslashreplace").decode("ascii")
