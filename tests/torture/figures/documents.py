"""Figure 15: eight callers of every GET, with small requests beside them. No GET holds the event loop: the processor time of its
thread shows it on a busy machine too. And the same check with the old fault planted, a document that is made on the event loop
for each request: the check must fail.

Invariants: small requests come from a process of their own (`canary.py`); half of the callers of a document have it already.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from tests.integration.running import LAYERS, small_layer
from tests.torture import at_rest, process_tree
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.raw_connection import RawConnection
from tests.torture.report import Row, at_most, fails, none_of
from tests.torture.subject import Subject

CALLERS = 8
ASKS, PLANTED_ASKS = 50, 5
MAX_HOLD_MS = 5.0
MAX_RENDERS_PER_S = 10
START_S = 1.0
# Between two requests of a caller beside small ones: two cores are enough for the service, but not for eight busy callers too.
PAUSE_S = 0.02
SCHEMA, METRICS = "/openapi.json", "/metrics"
DOCUMENTS = (SCHEMA, "/docs", "/docs/swagger-ui-bundle.js")
PATHS = (
    *DOCUMENTS, METRICS, "/v1/layers", "/v1/layers/small", "/v2", "/v2/models/stats", "/v2/models/small/stats",
    "/v2/models/small/config", "/healthz", "/readyz", "/nothing",
)  # fmt: skip


def measure(form: Form) -> Iterator[Row]:
    layers = [*LAYERS, *(small_layer(f"layer-{number}") for number in range(form.count(61, 5)))]
    with Subject(form.room("documents"), layers=layers, workers=1) as subject:
        before, callers = subject.baseline(), _Callers(subject)
        slowest = max((callers.loop_ms(path), path) for path in PATHS)
        what = (
            f"time of the event loop's thread for a GET, the longest of {len(PATHS)} paths, with {len(layers)} layers"
        )
        yield Row(15, what, f"≤ {MAX_HOLD_MS:g} ms", f"{slowest[0]:.2f} ms ({slowest[1]})", slowest[0] <= MAX_HOLD_MS)
        yield at_most(15, f"pages of metrics a second for {CALLERS} callers", callers.pages_per_s(), MAX_RENDERS_PER_S)
        seconds = form.seconds(10.0, 2.0)
        alone, beside = callers.p99_ms((), seconds), callers.p99_ms(PATHS, seconds)
        what = f"small requests beside {CALLERS} callers of all these paths: p99 above that alone ({alone:.1f} ms)"
        yield at_most(15, what, beside - alone, MAX_HOLD_MS * CALLERS, " ms")
        yield none_of(15, "unexpected answers", callers.wrong)
        yield from at_rest.rows(15, subject, before)
    with Subject(form.room("planted"), plants={"modules": [__name__]}, workers=1) as subject:
        told_ms = _Callers(subject).loop_ms(SCHEMA, PLANTED_ASKS)
        what = "the same check where each request makes the document on the event loop"
        yield fails(15, what, f"{told_ms:.1f} ms", told_ms > MAX_HOLD_MS)


def plant() -> None:
    from service.api.shared_work import Memo

    async def get(_self, _key, make):
        return make()

    Memo.get = get  # type: ignore[method-assign]


class _Callers:
    """Eight callers of one service; `wrong` has the answers that they should not have got."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.wrong: list[str] = []

    def loop_ms(self, path: str, asks: int = ASKS) -> float:
        """Processor time of the event loop's thread for one of many requests, the first ones among them."""
        (pid,) = self._subject.pids
        before = process_tree.main_thread_s(pid)
        asyncio.run(self._together(lambda number: self._ask([path] * asks, number)))
        return 1000 * (process_tree.main_thread_s(pid) - before) / (asks * CALLERS)

    def pages_per_s(self) -> float:
        pages: set[bytes] = set()
        started = time.monotonic()
        asyncio.run(self._together(lambda number: self._ask([METRICS] * 10, number, pages)))
        return len(pages) / (time.monotonic() - started)

    def p99_ms(self, paths: tuple[str, ...], seconds: float) -> float:
        """The p99 of small requests beside callers of these paths."""
        songs: list[Song] = []
        with singing(self._subject.port, songs, per_second=25):
            end = time.monotonic() + START_S + seconds  # it takes a while until the first one is sent

            async def call(number: int) -> None:
                numbered = itertools.cycle(paths[number % len(paths) :] + paths[: number % len(paths)]) if paths else ()
                await self._ask(
                    itertools.takewhile(lambda _: time.monotonic() < end, numbered), number, pause_s=PAUSE_S
                )
                await asyncio.sleep(max(0.0, end - time.monotonic()))

            asyncio.run(self._together(call))
        self.wrong += songs[0].wrong
        return songs[0].quantile(0.99) * 1000

    async def _together(self, call) -> None:
        await asyncio.gather(*(call(number) for number in range(CALLERS)))

    async def _ask(self, paths, number: int, pages: set[bytes] | None = None, pause_s: float = 0.0) -> None:
        connection = RawConnection(self._subject.port)
        tags: dict[str, str] = {}
        for path in paths:
            tag = tags.get(path) if number % 2 else None
            known = f"If-None-Match: W/{tag}\r\n" if tag else ""
            reply = await connection.ask(f"GET {path} HTTP/1.1\r\nHost: torture\r\n{known}\r\n".encode())
            if "etag" in reply.headers:
                tags[path] = reply.headers["etag"]
            expected = 404 if path == "/nothing" else 304 if tag else 200
            if reply.status != expected or ("etag" in reply.headers) != (path in DOCUMENTS):
                self.wrong.append(f"{path}: {reply.status} {reply.headers}")
            if pages is not None:
                pages.add(reply.body)
            await asyncio.sleep(pause_s)
        connection.close()
