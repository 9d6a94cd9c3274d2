"""HTTP transport: sends a call, retries it where that is safe, and returns a reply or raises a typed error.

Invariants: all calls share one connection pool, within one event loop, because a pool's sockets wake only the loop that opened
them. One deadline covers all attempts and waits, and each attempt sends the time left to the service. Errors of the HTTP library
and below are converted here. At most `max_answer_bytes` of an answer are kept. A cancelled call closes its connection, so the
service drops it from its queue. `close` ends every call with ConnectionFailed and returns when none is left.
A call is retried only if there was no answer of the service (a proxy's own 500, 502 or 504 is none), the service refused it for
now, or its engine is down; never after a wrong request, or a failure or a deadline that the service reports. Calls are pure, so a
retry after a broken connection is safe too. A wait is never shorter than Retry-After and has jitter, so that clients do not retry
in step. A wait that would outlast the deadline does not begin.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import secrets
import socket
import ssl
import warnings
from collections.abc import Callable
from typing import Any

import httpx2
import stamina

from attention_client.answer import OK, Reply, Result, check, read_reply
from attention_client.errors import BadAnswer, ConnectionFailed, DeadlineExceeded, EngineDown, Refused, ServiceError
from attention_client.options import ClientOptions, checked_request_id, checked_timeout, without_password
from attention_client.request import Call

MAJOR_VERSION = 0
_SERVER = re.compile(r"attention-service/(\d{1,9})\b")
CONNECT_TIMEOUT_S = 5.0
MAX_PROBLEM_BYTES = 2**16
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 5.0
SPREAD = 0.5
_TRANSIENT = (ConnectionFailed, Refused, EngineDown)
_NAMED = (ssl.SSLError, socket.gaierror)  # say more than the HTTP library's error: a certificate, an unknown host

Source = Callable[[], float]  # of numbers


class RetryPolicy:
    """Backoff hook of one call, which stamina calls after each failed attempt.

    `left_s` returns the seconds to the deadline, `draw` numbers from 0 to 1.
    """

    def __init__(self, left_s: Source, draw: Source) -> None:
        self._left_s, self._draw = left_s, draw
        self._next_wait_s = FIRST_WAIT_S

    def __call__(self, error: BaseException) -> bool | float:
        """Return the seconds to wait before the next attempt, or False to raise the error."""
        if not isinstance(error, _TRANSIENT):
            return False
        wait_s = max(self._next_wait_s, error.retry_after_s or 0.0) * (1 + SPREAD * self._draw())
        self._next_wait_s = min(MAX_WAIT_S, 2 * self._next_wait_s)
        return wait_s if wait_s < self._left_s() else False


class HttpTransport:
    """All I/O of the client; `draw` returns numbers from 0 to 1."""

    def __init__(self, options: ClientOptions, *, draw: Source = random.random) -> None:
        self._options, self._draw = options, draw
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._one_left = asyncio.Event()
        self._is_closed = False
        self._is_version_known = False
        # Arrays of floats hardly compress, so the client asks for uncompressed answers and never decompresses one.
        headers = {"accept-encoding": "identity", "user-agent": "attention-service-client"}
        if options.api_key is not None:
            headers["authorization"] = f"Bearer {options.api_key}"
        self._address = without_password(options.url)
        self._http = httpx2.AsyncClient(
            base_url=options.url.rstrip("/"),
            headers=headers,
            # The deadline covers all attempts. These give up one earlier: on a host that drops packets, or a peer that is frozen.
            timeout=httpx2.Timeout(checked_timeout(options.read_timeout_s), connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx2.Limits(max_connections=options.max_connections),
            transport=options.transport,
        )

    async def ask(self, call: Call[Result], timeout_s: float | None = None, request_id: str | None = None) -> Result:
        """Return the decoded answer. None means the client's timeout, or a random request id, the same for all attempts.

        Raises the service's error, DeadlineExceeded, ConnectionFailed or BadAnswer; InvalidInput for a timeout or id that is
        not valid; RuntimeError once closed or in another event loop.
        """
        request_id = checked_request_id(request_id) or secrets.token_hex(12)
        timeout_s = checked_timeout(self._options.timeout_s if timeout_s is None else timeout_s)
        self._claim_loop()
        if self._is_closed:
            raise RuntimeError("the client is closed")
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._limits.add(limit)
                return read_reply(await self._retried(call, limit.when() or math.inf, request_id), call.read)
        except TimeoutError as late:
            # The retry library keeps the context, a cancellation, until the next garbage collection.
            (late.__context__ or late).with_traceback(None)
            error = DeadlineExceeded(f"no answer from {self._address} within {timeout_s} s")
            ended = ConnectionFailed("the client was closed before the answer came") if self._is_closed else error
            raise ended.bare(request_id) from None
        except ServiceError as error:
            # Without the frames of the retry library, which keeps the error too, and with a cause only where `_once` gives one.
            raise error.bare(request_id) from error.__cause__
        finally:
            self._limits.discard(limit)
            self._one_left.set()
            del limit  # it refers to the task, and the task to this frame

    async def close(self) -> None:
        """Close the pool; calls in flight raise ConnectionFailed. A second call does nothing."""
        if self._is_closed and not self._limits:
            return
        self._claim_loop()
        self._is_closed = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)
        while self._limits:
            self._one_left.clear()
            await self._one_left.wait()
        await self._http.aclose()

    def _claim_loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError("a client belongs to the event loop that it was first used in; make one for each loop")

    async def _retried(self, call: Call[Any], end: float, request_id: str) -> Reply:
        """Return the reply of the first attempt that has one; the deadline `end` is a time of the loop."""

        def left_s() -> float:
            return end - asyncio.get_running_loop().time()

        policy, attempts = RetryPolicy(left_s, self._draw), call.attempts or self._options.attempts
        async for attempt in stamina.retry_context(policy, attempts=attempts, timeout=None):
            with attempt:
                return check(await self._once(call, left_s(), request_id))
        raise AssertionError("stamina raises what the last attempt raised. This is a bug.")

    async def _once(self, call: Call[Any], left_s: float, request_id: str) -> Reply:
        headers = {"accept": call.answer_type or call.media_type, "x-request-id": request_id}
        method, max_bytes = "GET" if call.content is None else "POST", self._options.max_answer_bytes
        headers |= {} if call.content is None else {"content-type": call.media_type}
        if left_s < math.inf:
            headers["x-request-timeout-ms"] = str(max(1, int(left_s * 1000)))
        try:
            async with self._http.stream(method, call.path, content=call.content, headers=headers) as got:
                is_ok = got.status_code == OK
                content = await _content(got, max_bytes if is_ok else MAX_PROBLEM_BYTES)
        except Exception as failure:  # noqa: BLE001 (raised as another)
            root: BaseException | None = failure
            while root is not None and not isinstance(root, _NAMED):
                root = root.__context__
            why = f"{type(root or failure).__name__}. Is the service running there?"
            failed = ConnectionFailed(f"no answer from {self._address}: {why}")
            # One of a lower library, a socket or the caller's transport is chained, because it may be a bug there.
            raise failed from (None if isinstance(failure, httpx2.HTTPError | httpx2.InvalidURL) else failure)
        if content is None and is_ok:
            error = BadAnswer(f"the answer of {self._address} is larger than {max_bytes} bytes")
            error.status = OK
            raise error
        if not self._is_version_known:
            self._check_version(got.headers.get("server", ""))
        # For an error response that is too long, the status is enough.
        return Reply(got.status_code, got.headers, content or b"", got.headers.get("x-request-id", request_id))

    def _check_version(self, server: str) -> None:
        """Warn once if the header Server names another major version; a proxy may hide that header."""
        self._is_version_known = True
        found = _SERVER.match(server)
        if found and int(found[1]) != MAJOR_VERSION:
            warnings.warn(
                f"the service at {self._address} is of major version {found[1]}, this client of {MAJOR_VERSION}: "
                "install the client of the service's version",
                stacklevel=2,
            )


async def _content(got: httpx2.Response, max_bytes: int) -> bytes | None:
    """Return the body as sent, or None if it has more than `max_bytes` bytes; the rest is not read."""
    assert isinstance(got.stream, httpx2.AsyncByteStream), "an asynchronous client gives no other. This is a bug."
    pieces, num_bytes = [], 0
    # Not `aiter_raw`: it omits the content that a test transport has read already.
    async for piece in got.stream:
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            return None
        pieces.append(piece)
    return b"".join(pieces)
