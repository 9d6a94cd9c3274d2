"""OuterMiddleware: the outermost ASGI application, which answers every request, and counts and logs it from its RequestRecord.

Invariants: every HTTP request is counted and logged once, with one call of `received` and then one of `answered` or `abandoned`.
Health checks and scrapes, which come every few seconds, are counted and logged only if they fail. Only this module sends errors.
`auth/access.py` decides on access before anything is routed. HEAD works on every GET (the transport drops the body) and OPTIONS
on every served path. No BaseHTTPMiddleware is used, because it hides disconnects.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import getrandbits
from typing import NoReturn, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match, Mount, Route

from service.api.auth.access import METRICS, OPEN, Access
from service.api.nearest_path import nearest_path
from service.api.problems import is_inference, render
from service.batching.job import BatchInfo
from service.errors import EngineFailed, MethodNotAllowed, RouteNotFound, ServiceError
from service.http.asgi import KEY_NAME, REFUSED, Application, ClientGone, Message, Receive, Scope, Send
from service.http.request_parser import fields_of

# A client's request id that is safe in a header and a log line; any other is replaced.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_RECORD = "attention.record"
# The statuses that a health check and a scrape may have without being counted; 0 is none yet.
_UNCOUNTED = {METRICS: (0, 200), **dict.fromkeys(OPEN, (0, 200, 503))}


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """The facts of one request, times in seconds. `route` is a path template; the client's `path` is never logged or a label."""

    request_id: str
    method: str
    path: str
    started: float
    peer: str | None = None
    key: str | None = None
    route: str = "unmatched"
    status: int = 0
    code: str | None = None
    detail: str | None = None
    layer: str | None = None
    stage: str = "receiving"
    bytes_in: int = 0
    bytes_out: int = 0
    tokens: int | None = None
    masked_rows: int = 0
    receive_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    encode_s: float | None = None
    batch: BatchInfo | None = None
    is_document: bool = False  # the answer is one of `openapi/pages.py` or `explore_pages.py`

    @property
    def is_monitoring(self) -> bool:
        """Whether its path is that of a health check or of a scrape."""
        return self.path in _UNCOUNTED

    @property
    def is_counted(self) -> bool:
        """Whether this request is counted and logged; health checks and scrapes are not while nothing is wrong with them."""
        return self.method not in ("GET", "HEAD") or self.status not in _UNCOUNTED.get(self.path, ())


@dataclasses.dataclass(slots=True)
class LayerTotals:
    """Records of one layer, summed, with times in seconds: they become metrics and Open Inference's statistics.

    `sequences` and `batches` count forward passes; `last_answer_s` is since the epoch.
    """

    successes: int = 0
    success_s: float = 0.0
    failures: int = 0
    failure_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    sequences: int = 0
    batches: int = 0
    last_answer_s: float = 0.0


def start_record(scope: Scope, now: float) -> RequestRecord:
    sent = fields_of(scope)[b"x-request-id"]
    is_sane = sent and REQUEST_ID.fullmatch(sent[0])
    request_id = sent[0].decode("ascii") if is_sane else f"{getrandbits(96):024x}"
    client = scope.get("client")
    record = RequestRecord(request_id, scope["method"], scope["path"], now, client[0] if client else None)
    scope[_RECORD] = record
    return record


def milliseconds(seconds: float) -> float:
    """Return milliseconds, rounded to the microsecond."""
    # Faster than `round` to three places, which goes through text.
    return round(seconds * 1e6) / 1000


def record_of(scope: Scope) -> RequestRecord:
    found: RequestRecord = scope[_RECORD]
    return found


# Cached paths of POST requests. Matching a path again costs as much as writing the answer's head.
NUM_CACHED = 256
_NOT_FOUND = "nothing is served at that path; GET /openapi.json lists what is"
# On every answer: no-store, because it is about the client's own tensors, and nosniff, because its declared type is right.
_FIXED_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
# A client may cache a document if it revalidates it each time.
_DOCUMENT_HEADERS = [(b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")]


async def raise_again(_: Request, error: Exception) -> NoReturn:
    """Handle every exception for Starlette: it must not answer errors, because the outer middleware does."""
    if isinstance(error, HTTPException) and error.status_code == 404:  # noqa: PLR2004 (a mount has no such file)
        raise RouteNotFound(_NOT_FOUND) from None
    raise error


class RequestLog(Protocol):
    """Counts and logs requests; `observability/telemetry.py` implements it with metrics and log lines."""

    def received(self, record: RequestRecord) -> None: ...
    def answered(self, record: RequestRecord, total_s: float) -> None: ...
    def abandoned(self, record: RequestRecord, total_s: float) -> None: ...
    def faulted(self, record: RequestRecord, error: BaseException) -> None: ...


class OuterMiddleware:
    """Wraps `inner` (the FastAPI application), whose `routes` define which methods a path takes.

    A request that matches one of `hot` goes there directly: FastAPI's own layers would take a sixth of the loop's time for it.
    `around` wraps the steps between the count of a request and its route (CORS, spans).
    """

    def __init__(
        self,
        inner: Application,
        routes: Sequence[BaseRoute],
        log: RequestLog,
        now: Callable[[], float],
        hot: Sequence[Route] = (),
        access: Access | None = None,
        around: Callable[[Application], Application] = lambda inside: inside,
    ) -> None:
        self._inner = inner
        self._access = access or Access()
        self._application = around(self._serve)
        self._hot_route = functools.lru_cache(NUM_CACHED)(functools.partial(_hot_route, hot))
        self._routes = [*_flat(routes)]
        self._log = log
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        if root := scope.get("root_path"):
            scope = {**scope, "path": _below(root, scope["path"]), "root_path": ""}
        record = start_record(scope, self._now())
        send = _completing(send, record)
        is_received = record.is_counted
        if is_received:
            self._log.received(record)
        end = self._log.answered
        try:
            await self._application(scope, receive, send)
        except ClientGone:
            end = self._log.abandoned
        except BaseException as error:
            # After an Exception the answer is cut. The request counts as answered, because the client did not disconnect.
            if not isinstance(error, Exception):
                end = self._log.abandoned
            raise
        finally:
            record.key = scope.get(KEY_NAME)
            if record.is_counted:
                if not is_received:
                    self._log.received(record)
                end(record, self._now() - record.started)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, method = record_of(scope), scope["method"]
        try:
            if (refusal := scope.get(REFUSED)) is not None:  # its path is a guess, so it has no route
                raise refusal  # noqa: TRY301 (answered, counted and logged like any other)
            # For the routes HEAD is GET, in a copy, because the server still needs the method HEAD.
            routed = {**scope, "method": "GET"} if method == "HEAD" else scope
            hot = self._hot_route(scope["path"]) if method == "POST" else None
            template = self._template(routed) if hot is None else hot[0].path
            # Set before access is decided: a refused request has the route that it would have if it were answered.
            record.route = template or record.route
            self._access.admit(scope)
            if hot is not None:
                route, child = hot
                scope.update(child)
                await route.app(scope, receive, send)
            elif method == "OPTIONS":
                headers = [] if scope["path"] == "*" else [(b"allow", self._allowed(scope).encode("ascii"))]
                await _send_whole(send, 204, headers, b"")
            elif template is None:
                allow = self._allowed(scope)
                words = f"this path allows {allow}{self._nearest(scope, least_ratio=1)}"
                raise MethodNotAllowed(words, allow=allow)  # noqa: TRY301 (as above)
            else:
                await self._inner(routed, receive, send)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 (no foreign exception may leave the application)
            await self._problem(error, send, record)

    def _template(self, scope: Scope) -> str | None:
        """Return the path template of the request's route; None if no route takes its path and method."""
        method = scope["method"]
        for route in self._routes:
            if (isinstance(route, Route) or method == "GET") and route.matches(scope)[0] is Match.FULL:
                return route.path.rstrip("/") or "/"
        return None

    async def _problem(self, raised: Exception, send: Send, record: RequestRecord) -> None:
        error = raised
        if not isinstance(error, ServiceError):
            error = EngineFailed("an internal fault; the log has its traceback under the request id")
            error.__cause__ = raised
        problem = render(error, record.request_id, as_inference=is_inference(record.path))
        record.code, record.detail = error.code, error.message
        if problem.status == 500:  # noqa: PLR2004
            self._log.faulted(record, error.__cause__ or error)
        if record.status:
            # The status is already sent, so it is only counted. The connection breaks, so the client sees a cut answer.
            record.status = problem.status
            try:
                raise error
            finally:
                del error, raised  # else a cycle keeps the answer: error -> traceback -> frame -> error
        await _send_whole(send, problem.status, problem.headers, problem.body)

    def _allowed(self, scope: Scope) -> str:
        """Return the Allow header of this path; raise RouteNotFound if it has no route."""
        found = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        methods = set[str]().union(
            *[(route.methods or ()) if isinstance(route, Route) else ("GET",) for route in found]
        )
        if not methods:
            raise RouteNotFound(f"{_NOT_FOUND}{self._nearest(scope)}")
        if "GET" in methods:
            methods.add("HEAD")
        return ", ".join(sorted(methods | {"OPTIONS"}))

    def _nearest(self, scope: Scope, least_ratio: float = 0.6) -> str:
        """Return the end of an error message: the nearest path that takes the method; nothing if none is near."""
        method, routes = scope["method"], (route for route in self._routes if isinstance(route, Route))
        paths = (route.path.rstrip("/") for route in routes if method in (route.methods or ()))
        fitting = [path for path in paths if not path.startswith(("/docs/", "/explore/"))]
        near = nearest_path(scope["path"], fitting, least_ratio)
        return f"; did you mean {method} {near}?" if near else ""


def _below(root: str, path: str) -> str:
    """Return the path below the prefix under which a host serves the application: access and routes know only that."""
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _hot_route(hot: Sequence[Route], path: str) -> tuple[Route, Scope] | None:
    """Return which of `hot` takes a POST to this path, and what it adds to the scope."""
    for route in hot:
        match, child = route.matches({"type": "http", "method": "POST", "path": path})
        if match is Match.FULL:
            return route, child
    return None


def _flat(routes: Iterable[BaseRoute]) -> Iterator[Route | Mount]:
    """Yield the routes with those of included routers, each of which FastAPI keeps as a route; a mount has files, for GET."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _flat(included.routes)
        elif isinstance(route, Route | Mount):
            yield route


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _completing(send: Send, record: RequestRecord) -> Send:
    """Return `send` for one answer: it adds the headers of every answer and notes status and size in the record."""

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            fixed = _DOCUMENT_HEADERS if record.is_document else _FIXED_HEADERS
            message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode("ascii")), *fixed]
        elif message["type"] == "http.response.body" and record.method != "HEAD":
            record.bytes_out += len(message.get("body", b""))
        await send(message)

    return send_on
