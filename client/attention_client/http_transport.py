"""HTTP transport: sends a call, retries it where that is safe, and returns a reply or raises a typed error.

Invariants: all calls share one connection pool. One deadline covers all attempts, and each attempt sends the time left to the
service. Errors of the HTTP library and below are converted here. No more of an answer is kept than its limit (max_answer_bytes,
MAX_PROBLEM_BYTES for an error). A cancelled call closes its connection, so the service drops it from its queue.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable

import httpx2
import stamina

from attention_client.answer import read_json
from attention_client.errors import BadAnswer, ConnectionFailed, DeadlineExceeded, ServiceError
from attention_client.in_flight import InFlight
from attention_client.options import ClientOptions, checked_request_id, checked_timeout
from attention_client.problem import MAX_PROBLEM_BYTES, Reply, check
from attention_client.request import Call, ready_call
from attention_client.retry_policy import Deadline, RetryPolicy

CONNECT_TIMEOUT_S = 5.0
_OK = 200


class HttpTransport:
    """All I/O of the client, within one event loop; `clock` returns monotonic seconds, `draw` numbers from 0 to 1."""

    def __init__(
        self,
        options: ClientOptions,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._options = options
        self._clock = clock
        self._draw = draw
        self._calls = InFlight()
        # Arrays of floats hardly compress, so the client asks for none.
        headers = {"accept-encoding": "identity", "user-agent": "attention-service-client"}
        if options.api_key is not None:
            headers["authorization"] = f"Bearer {options.api_key}"
        # For error messages: without the user name and password that a URL may hold.
        self._address = str(httpx2.URL(options.url).copy_with(userinfo=b""))
        self._http = httpx2.AsyncClient(
            base_url=options.url.rstrip("/"),
            headers=headers,
            # The deadline covers the whole attempt; the connect timeout only gives up earlier on a host that drops packets.
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(
                max_connections=options.max_connections, max_keepalive_connections=options.max_connections
            ),
            transport=transport,
        )

    async def ask(
        self, call: Call, *, timeout_s: float | None = None, request_id: str | None = None, attempts: int | None = None
    ) -> Reply:
        """Return the reply if it is a 200. Raises the service's error, DeadlineExceeded, ConnectionFailed or BadAnswer.

        None takes the value from the options; the request id is then random. All attempts have the same request id.
        Raises InvalidInput for a timeout or id that is not valid, RuntimeError once closed or in another event loop.
        """
        request_id = checked_request_id(request_id) or secrets.token_hex(12)
        timeout_s = self._options.timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(checked_timeout(timeout_s), self._clock)
        again = RetryPolicy(deadline, self._draw)
        attempts = attempts or self._options.attempts
        try:
            async with self._calls.within(deadline.timeout_s):
                async for attempt in stamina.retry_context(again, attempts=attempts, timeout=None):
                    with attempt:
                        return check(await self._once(call, deadline, request_id))
        except TimeoutError:
            late = DeadlineExceeded(f"no answer from {self._address} within {deadline.timeout_s:g} s")
            late.request_id = request_id
            raise late from None
        except ServiceError as error:
            error.request_id = error.request_id or request_id
            raise
        raise AssertionError("stamina raises what the last attempt raised. This is a bug.")

    async def is_ready(self) -> bool:
        """Return whether the service reports that it is ready, without retries; False also if there is no valid answer."""
        try:
            return read_json(await self.ask(ready_call(), attempts=1)).get("status") == "ready"
        except ServiceError:
            return False

    async def close(self) -> None:
        """Close the pool; calls in flight raise ConnectionFailed."""
        await self._calls.end()
        await self._http.aclose()

    async def _once(self, call: Call, deadline: Deadline, request_id: str) -> Reply:
        headers = {**call.headers, "x-request-id": request_id}
        if (left_ms := deadline.left_ms()) is not None:
            headers["x-request-timeout-ms"] = str(left_ms)
        try:
            async with self._http.stream(call.method, call.path, content=call.content, headers=headers) as got:
                content = await self._content(got)
        except ServiceError:
            raise
        except (httpx2.HTTPError, httpx2.InvalidURL) as failure:
            raise self._no_answer(failure) from None
        except Exception as failure:
            # From the library below, a socket or the caller's transport; chained, because it may be a bug there.
            raise self._no_answer(failure) from failure
        answered_as = got.headers.get("x-request-id", request_id)
        return Reply(got.status_code, dict(got.headers), content, answered_as)

    async def _content(self, got: httpx2.Response) -> bytes:
        """Return the body as sent, or b"" for an error response that is too long or compressed: its status is enough."""
        is_ok = got.status_code == _OK
        max_bytes = self._options.max_answer_bytes if is_ok else MAX_PROBLEM_BYTES
        if got.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            return self._unread("is compressed, though that was not asked for", is_ok=is_ok)
        assert isinstance(got.stream, httpx2.AsyncByteStream), "an asynchronous client gives such a one. This is a bug."
        pieces, num_bytes = [], 0
        # Not `aiter_raw`: it omits the content that a test transport has read already.
        async for piece in got.stream:
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                return self._unread(f"is larger than {max_bytes} bytes, the client's max_answer_bytes", is_ok=is_ok)
            pieces.append(piece)
        return b"".join(pieces)

    def _unread(self, why: str, *, is_ok: bool) -> bytes:
        if is_ok:
            error = BadAnswer(f"the answer of {self._address} {why}")
            error.status = _OK
            raise error
        return b""

    def _no_answer(self, failure: Exception) -> ConnectionFailed:
        name = type(failure).__name__
        return ConnectionFailed(f"no answer from {self._address}: {name}. Is the service running there?")
