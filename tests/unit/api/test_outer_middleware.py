"""Outer middleware: one answer, one count, one end for every request, whatever happens inside."""

import asyncio
import contextlib
import gc
import json
import weakref
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from service.api.outer_middleware import OuterMiddleware, raise_again
from service.errors import BadShape, EngineFailed, HeadersTooLarge, NotReady, QueueFull, Unauthorized
from service.http.asgi import REFUSED, ClientGone


class Ledger:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def received(self, record):
        self.events.append(("received", record.method))

    def answered(self, record, total_s):
        self.events.append(("answered", record.status))

    def abandoned(self, record, total_s):
        self.events.append(("abandoned", record.stage))

    def faulted(self, record, error):
        self.events.append(("faulted", type(error).__name__))


async def ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


ROUTES = [Route("/x", ok, methods=["POST"]), Route("/x", ok, methods=["GET"])]


async def nothing_comes():
    raise AssertionError


def failing(error: BaseException):
    async def inner(scope, receive, send):
        raise error

    return inner


def serve(inner, method: str = "GET", headers: list[tuple[bytes, bytes]] | None = None, more=None):
    ledger, sent = Ledger(), []

    async def send(message):
        sent.append(message)

    middleware = OuterMiddleware(inner, ROUTES, ledger, lambda: 0.0)
    scope = {"type": "http", "method": method, "path": "/x", "headers": headers or [], "root_path": "", **(more or {})}

    asyncio.run(middleware(scope, nothing_comes, send))
    return sent, ledger.events


def problem(sent):
    assert sent[0]["type"] == "http.response.start"
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_an_answer_is_counted_once_and_carries_the_fixed_headers():
    sent, events = serve(ok)
    assert events == [("received", "GET"), ("answered", 200)]
    names = dict(sent[0]["headers"])
    assert names[b"cache-control"] == b"no-store"
    assert names[b"x-content-type-options"] == b"nosniff"
    assert len(names[b"x-request-id"]) == 24


def test_a_service_error_becomes_its_problem():
    sent, events = serve(failing(BadShape("three axes", param="/query")))
    status, body = problem(sent)
    assert (status, body["code"], body["detail"], body["param"]) == (422, "bad_shape", "three axes", "/query")
    assert events == [("received", "GET"), ("answered", 422)]


def test_a_refusal_is_counted_like_any_answer():
    sent, events = serve(failing(QueueFull("full", retry_after_s=3)))
    assert problem(sent)[0] == 429
    assert events[-1] == ("answered", 429)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "-"])
def test_a_refusal_of_the_transport_is_answered_counted_and_logged_like_any_failure(method):
    sent, events = serve(failing(AssertionError()), method, more={REFUSED: HeadersTooLarge("at most 16 KiB")})
    status, body = problem(sent)
    assert (status, body["code"], body["detail"]) == (431, "headers_too_large", "at most 16 KiB")
    assert (b"connection", b"close") in sent[0]["headers"]
    assert events == [("received", method), ("answered", 431)]


HEALTH = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/metrics", *HEALTH])
def test_a_health_check_and_a_scrape_are_counted_only_if_they_fail(path, method):
    def events(inner):
        middleware = OuterMiddleware(inner, [Route(path, ok)], ledger := Ledger(), lambda: 0.0)
        scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}

        async def send(_):
            pass

        asyncio.run(middleware(scope, nothing_comes, send))
        return ledger.events

    assert events(ok) == []
    assert events(failing(ClientGone())) == []
    assert events(failing(Unauthorized("no key"))) == [("received", method), ("answered", 401)]
    is_health = path in HEALTH
    assert events(failing(NotReady("not yet"))) == ([] if is_health else [("received", method), ("answered", 503)])


def test_a_method_that_metrics_do_not_take_is_counted():
    _, events = serve(ok, "DELETE", more={"path": "/metrics"})
    assert events == [("received", "DELETE"), ("answered", 404)]


def test_the_bytes_of_a_head_are_not_counted_because_they_are_not_sent():
    records = []

    class Sizes(Ledger):
        def answered(self, record, total_s):
            records.append(record.bytes_out)

    async def send(_):
        pass

    for method in ("GET", "HEAD"):
        scope: dict[str, Any] = {"type": "http", "method": method, "path": "/x", "headers": [], "root_path": ""}
        asyncio.run(OuterMiddleware(ok, ROUTES, Sizes(), lambda: 0.0)(scope, nothing_comes, send))
    assert records == [2, 0]


def test_an_unexpected_error_is_a_500_without_its_text_and_its_traceback_is_logged():
    sent, events = serve(failing(RuntimeError("secret /path")))
    status, body = problem(sent)
    assert (status, body["code"]) == (500, "engine_failed")
    assert "secret" not in json.dumps(body)
    assert ("faulted", "RuntimeError") in events


def test_a_disconnected_request_is_not_answered():
    sent, events = serve(failing(ClientGone()))
    assert sent == []
    assert events == [("received", "GET"), ("abandoned", "receiving")]


def test_a_cancellation_is_counted_and_propagates():
    with pytest.raises(asyncio.CancelledError):
        serve(failing(asyncio.CancelledError()))


def test_head_is_get_for_the_application():
    """The transport drops the body: tests/unit/http/test_connection.py."""
    seen = []

    async def inner(scope, receive, send):
        seen.append(scope["method"])
        await ok(scope, receive, send)

    _, events = serve(inner, "HEAD")
    assert seen == ["GET"]
    assert events[0] == ("received", "HEAD")


def test_head_does_not_change_the_scope_of_the_server():
    """uvicorn looks at its scope to know that a HEAD's answer has a length and no body."""
    scope = {"type": "http", "method": "HEAD", "path": "/x", "headers": [], "root_path": ""}

    async def send(message):
        pass

    asyncio.run(OuterMiddleware(ok, ROUTES, Ledger(), lambda: 0.0)(scope, nothing_comes, send))
    assert scope["method"] == "HEAD"


def test_a_broken_answer_is_counted_as_its_failure():
    """Not as a disconnect, which no objective counts."""

    async def breaking(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    ledger = Ledger()

    async def send(message):
        pass

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "root_path": ""}
    with pytest.raises(Exception, match="internal fault"):
        asyncio.run(OuterMiddleware(breaking, ROUTES, ledger, lambda: 0.0)(scope, nothing_comes, send))
    assert [event for event, _ in ledger.events] == ["received", "faulted", "answered"]
    assert ledger.events[-1] == ("answered", 500)


class Tensor:
    """Large memory that a weak reference can follow."""


def test_a_broken_answer_leaves_the_memory_without_a_collection():
    kept: list[weakref.ref[Tensor]] = []

    async def broken(scope, receive, send):
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise MemoryError

    async def send(message):
        pass

    async def main():
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "root_path": ""}
        with contextlib.suppress(EngineFailed):
            await OuterMiddleware(broken, ROUTES, Ledger(), lambda: 0.0)(scope, nothing_comes, send)
        assert kept[0]() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_options_of_everything_is_answered():
    sent, events = serve(failing(AssertionError()), "OPTIONS", more={"path": "*"})
    assert sent[0]["status"] == 204
    assert events[-1] == ("answered", 204)


def test_options_answers_204_with_what_is_allowed():
    sent, _ = serve(failing(AssertionError()), "OPTIONS")
    assert sent[0]["status"] == 204
    assert (b"allow", b"GET, HEAD, OPTIONS, POST") in sent[0]["headers"]


@pytest.mark.parametrize("request_id", [b"abc-1", b"a" * 128, b"00-4bf92f3577b34da6a3ce929d0e0e4736-00"])
def test_a_sane_request_id_is_kept(request_id):
    sent, _ = serve(ok, headers=[(b"x-request-id", request_id)])
    assert (b"x-request-id", request_id) in sent[0]["headers"]


@pytest.mark.parametrize("request_id", [b"", b"a" * 129, b"a\r\nb", b"caf\xc3\xa9", b'"x"', b"a b"])
def test_any_other_request_id_is_replaced(request_id):
    """H30."""
    sent, _ = serve(ok, headers=[(b"x-request-id", request_id)])
    given = dict(sent[0]["headers"])[b"x-request-id"]
    assert given != request_id
    assert len(given) == 24


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/static/a.txt", 200),
        ("HEAD", "/static/a.txt", 200),
        ("OPTIONS", "/static/a.txt", 204),
        ("POST", "/static/a.txt", 405),
        ("GET", "/static/b.txt", 404),
        ("GET", "/statics", 404),
    ],
)
def test_a_mount_of_files_is_served_like_a_route(tmp_path, method, path, status):
    (tmp_path / "a.txt").write_text("hi", encoding="ascii")
    handlers: Any = {Exception: raise_again, HTTPException: raise_again}
    application = Starlette(routes=[Mount("/static", StaticFiles(directory=tmp_path))], exception_handlers=handlers)
    ledger = Ledger()
    middleware = OuterMiddleware(application, application.routes, ledger, lambda: 0.0)

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=middleware)
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.request(method, path)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    assert ledger.events == [("received", method), ("answered", status)]
    if status == 405:
        assert answer.headers["allow"] == "GET, HEAD, OPTIONS"
    if status >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
