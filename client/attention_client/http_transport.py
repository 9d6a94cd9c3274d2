"""HTTP transport: sends a call, repeats it where that is safe, returns a reply or raises a typed error; all I/O of the client.

Laws: one pool of connections for all calls; one deadline over all attempts, told to the service in each; errors of the HTTP
library and of what lies below it end here; no more of an answer is held than its limit; a call that is cancelled closes its
connection, so that the service frees its place in the queue.
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
    """Use it within one event loop; `clock` gives monotonic seconds, `draw` numbers from 0 to 1."""

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
        # Arrays of floats hardly shrink, so compression is not asked for.
        headers = {"accept-encoding": "identity", "user-agent": "attention-service-client"}
        if options.api_key is not None:
            headers["authorization"] = f"Bearer {options.api_key}"
        # What errors say: without the name and the password that a URL may hold.
        self._address = str(httpx2.URL(options.url).copy_with(userinfo=b""))
        self._http = httpx2.AsyncClient(
            base_url=options.url.rstrip("/"),
            headers=headers,
            # The deadline is one clock around the whole attempt; only a host that swallows packets is given up earlier.
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(
                max_connections=options.max_connections, max_keepalive_connections=options.max_connections
            ),
            transport=transport,
        )

    async def ask(
        self, call: Call, *, timeout_s: float | None = None, request_id: str | None = None, attempts: int | None = None
    ) -> Reply:
        """The reply to the call if it is a 200; raises what the service told, DeadlineExceeded, ConnectionFailed, BadAnswer.

        None stands for what the options say. All attempts have the same request id. RuntimeError once it is closed, and in
        another event loop.
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
        """Whether the service says so, asked once; False also where nobody answers, or something else does."""
        try:
            return read_json(await self.ask(ready_call(), attempts=1)).get("status") == "ready"
        except ServiceError:
            return False

    async def close(self) -> None:
        """What is in flight ends as ConnectionFailed."""
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
            # Of the library below, of sockets, or of a transport of the caller's own; told, in case it is a bug there.
            raise self._no_answer(failure) from failure
        answered_as = got.headers.get("x-request-id", request_id)
        return Reply(got.status_code, dict(got.headers), content, answered_as)

    async def _content(self, got: httpx2.Response) -> bytes:
        """The body as it was sent; of a refusal nothing where it is too long or coded, because its status says enough."""
        is_ok = got.status_code == _OK
        max_bytes = self._options.max_answer_bytes if is_ok else MAX_PROBLEM_BYTES
        if got.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            return self._unread("is compressed, though that was not asked for", is_ok=is_ok)
        assert isinstance(got.stream, httpx2.AsyncByteStream), "an asynchronous client gives such a one. This is a bug."
        pieces, num_bytes = [], 0
        # Not `aiter_raw`, which does not give what a double of the transport has read already.
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
