"""Logs: one JSON object a line on stdout, and one such line a request.

Lives here: structlog's configuration, the line of a request, and the way in for what libraries log or warn.
Must not know: routes, settings, what a line is about.
Laws: nothing a caller sends can break or forge a line (JSON escapes it) or make it longer than MAX_LINE_BYTES, up to
which writes to a pipe are atomic, so that lines of several processes never mix; a stdout that is gone costs the line,
never the request; times are ISO 8601 in UTC. A request's line costs 4 to 8 µs, and the write to a pipe 8.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, TextIO

import orjson

from service import __version__
from service.timestamp import timestamp
from service.turn import Turn

# structlog takes rich where it finds it, to colour a terminal; it is here for the command line, and costs a process 4 MB.
_hides_rich = "rich" not in sys.modules
if _hides_rich:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python itself says that a module is not to be had
import structlog  # noqa: E402
from structlog.typing import FilteringBoundLogger  # noqa: E402

if _hides_rich:
    del sys.modules["rich"]

MAX_LINE_BYTES = 4096  # PIPE_BUF on Linux
MAX_TEXT_CHARS = 256
MAX_TRACE_CHARS = 2800
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class RequestLine(NamedTuple):
    """What is told about one request at its end; None is left out. Times in milliseconds, sizes in bytes."""

    request_id: str
    route: str
    method: str
    status: int
    code: str | None = None
    layer: str | None = None
    batch_requests: int | None = None
    tokens: int | None = None
    decode_ms: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    total_ms: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0


def configure_logs(level: str, stream: TextIO | None = None) -> None:
    """Once a process, before its first line; `stream` is stdout unless a test says otherwise."""
    global _lines  # noqa: PLW0603 (structlog's configuration is global as well)
    lines = _lines = _Lines(sys.stdout if stream is None else stream, _LEVELS[level])
    structlog.configure(
        processors=[structlog.processors.format_exc_info, _render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: lines,
        # With a stream of a test's own the next configuration must reach loggers that already exist.
        cache_logger_on_first_use=stream is None,
    )
    root = logging.getLogger()
    root.handlers[:] = [_FromLogging()]
    root.setLevel(_LEVELS[level])
    # uvicorn tells its own start and stop; `server.py` and the supervisor tell ours.
    logging.getLogger("uvicorn").setLevel(max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(capture=True)


def get_logger() -> FilteringBoundLogger:
    """A logger; `logger.info("event_name", field=value)`."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def log_request(line: RequestLine) -> None:
    """The one line of a request; it is written at the end of the loop's turn, together with those of others."""
    if _lines.level <= _LEVELS["info"]:
        _lines.put_off(line)


class _Lines:
    """Where structlog writes: as few writes as lines fit into MAX_LINE_BYTES."""

    def __init__(self, stream: TextIO, level: int) -> None:
        self.level = level
        self._stream = stream
        self._put_off: list[tuple[int, RequestLine]] = []
        self._turn = Turn(self._write_put_off)

    def msg(self, line: str) -> None:
        self._write_put_off()
        self._write([line])

    def put_off(self, line: RequestLine) -> None:
        """To the end of the loop's turn: lines that are made one after another cost half of what each does by itself."""
        told = time.time_ns(), line  # before the list is asked for: another thread may log meanwhile and take it away
        self._put_off.append(told)
        self._turn.ask()

    def _write_put_off(self) -> None:
        lines, self._put_off = self._put_off, []
        names = RequestLine._fields
        self._write([_line("info", "request", zip(names, line, strict=True), at_ns) for at_ns, line in lines])

    def _write(self, lines: Iterable[str]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for together in _together(lines):
                self._stream.write(together)
                self._stream.flush()

    debug = info = warning = warn = error = critical = exception = log = msg


def _together(lines: Iterable[str]) -> Iterator[str]:
    """The lines, joined up to what a pipe takes at once; text beyond ASCII counts as four bytes a character."""
    joined: list[str] = []
    size = 0
    for line in lines:
        num_bytes = len(line) if line.isascii() else 4 * len(line)
        if joined and size + num_bytes > MAX_LINE_BYTES:
            yield "".join(joined)
            joined, size = [], 0
        joined.append(line)
        size += num_bytes
    if joined:
        yield "".join(joined)


_lines = _Lines(sys.stdout, _LEVELS["info"])


class _FromLogging(logging.Handler):
    """What uvicorn, asyncio and `warnings` say becomes a line like any other."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 (a library's wrong format string must not end a request)
            text = str(record.msg)
        get_logger().log(record.levelno, "library", logger=record.name, message=text, exc_info=record.exc_info)


def _render(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
    """The last processor."""
    return _line(level, event.pop("event"), event.items(), time.time_ns())


def _line(level: str, event: str, fields: Iterable[tuple[str, Any]], at_ns: int) -> str:
    """One JSON line, whatever the values are, of what happened at that time since the epoch."""
    head: dict[str, Any] = {
        "timestamp": timestamp(at_ns),
        "level": level,
        "event": event,
        "version": __version__,
    }
    for name, value in fields:
        if value is not None:
            # Most values are short: a call for each would be a fifth of the line's cost.
            head[name] = value if type(value) is not str or len(value) <= MAX_TEXT_CHARS else _cut(name, value)
    line = _dumps(head)
    if len(line) >= MAX_LINE_BYTES:
        line = _dumps({name: _shortened(value) for name, value in list(head.items())[:20]} | {"truncated": True})
    return line + "\n"


def _cut(name: str, value: str) -> str:
    """The start of a text says most; of a traceback it is the end."""
    return value[-MAX_TRACE_CHARS:] if name == "exception" else value[:MAX_TEXT_CHARS] + "…"


def _shortened(value: Any) -> Any:
    if isinstance(value, int | float) and abs(value) < 2**53:
        return value
    # Escaped before it is cut, so that JSON can at most double it.
    return str(value)[:60].encode("unicode_escape").decode("ascii")[:60]


def _dumps(line: dict[str, Any]) -> str:
    try:
        return orjson.dumps(line, default=_ascii).decode()
    except (TypeError, ValueError):
        # A lone surrogate, an integer beyond 64 bits: what orjson refuses is told as text.
        return orjson.dumps({str(name): _ascii(value) for name, value in line.items()}).decode()


def _ascii(value: Any) -> str:
    return str(value)[:MAX_TRACE_CHARS].encode("ascii", "backslashreplace").decode("ascii")
