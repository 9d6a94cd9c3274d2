"""Line: the one place of the client that does I/O: a call goes out, again if need be, and a reply or a typed error comes back.

Laws: one pool of connections for all calls; one deadline over all attempts, told to the service in each; errors of the HTTP
library end here; a call that is cancelled closes its connection, so that the service frees its place in the queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import secrets
import time
from collections.abc import Callable

import httpx2
import stamina

from service.calling.patience import Deadline, Patience
from service.calling.problem import BadAnswer, ConnectionFailed, Reply, check
from service.calling.request import Call
from service.errors import DeadlineExceeded, InvalidInput

CONNECT_TIMEOUT_S = 5.0
FOR_EVER_S = 1e9
"""From here on a timeout is none: some thirty years, and the largest number that timers take."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class LineOptions:
    """Where and how patiently to ask; `timeout_s` None waits for ever. Raises InvalidInput."""

    url: str = dataclasses.field(repr=False)
    timeout_s: float | None
    max_connections: int
    attempts: int
    api_key: str | None = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except (httpx2.InvalidURL, TypeError):
            raise InvalidInput("url must be like http://127.0.0.1:8000") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidInput("url must be like http://127.0.0.1:8000")
        checked_timeout(self.timeout_s)
        if self.max_connections < 1 or self.attempts < 1:
            raise InvalidInput("max_connections and attempts must be at least 1")
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise InvalidInput("api_key must be printable ASCII without spaces")


class Line:
    """Use it within one event loop; `clock` gives monotonic seconds, `draw` numbers from 0 to 1."""

    def __init__(
        self,
        options: LineOptions,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._options = options
        self._clock = clock
        self._draw = draw
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

        None stands for what the options say. All attempts have the same request id.
        """
        if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
            raise InvalidInput(f"request_id must be {_REQUEST_ID.pattern}")
        request_id = request_id or secrets.token_hex(12)
        timeout_s = self._options.timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(checked_timeout(timeout_s), self._clock)
        again = Patience(deadline, self._draw)
        async for attempt in stamina.retry_context(again, attempts=attempts or self._options.attempts, timeout=None):
            with attempt:
                return check(await self._once(call, deadline, request_id))
        raise AssertionError("stamina raises what the last attempt raised. This is a bug.")

    async def close(self) -> None:
        await self._http.aclose()

    async def _once(self, call: Call, deadline: Deadline, request_id: str) -> Reply:
        headers = {**call.headers, "x-request-id": request_id}
        if (left_ms := deadline.left_ms()) is not None:
            headers["x-request-timeout-ms"] = str(left_ms)
        limit = asyncio.timeout(None if deadline.timeout_s is None else deadline.left_s())
        try:
            async with limit:
                got = await self._http.request(call.method, call.path, content=call.content, headers=headers)
        except TimeoutError:
            if not limit.expired():
                raise
            error: DeadlineExceeded | ConnectionFailed | BadAnswer = DeadlineExceeded(
                f"no answer from {self._address} within {deadline.timeout_s:g} s"
            )
        except httpx2.DecodingError:
            error = BadAnswer(f"the answer of {self._address} cannot be decompressed")
        except (httpx2.HTTPError, httpx2.InvalidURL) as failure:
            name = type(failure).__name__
            error = ConnectionFailed(f"no answer from {self._address}: {name}. Is the service running there?")
        else:
            answered_as = got.headers.get("x-request-id", request_id)
            return Reply(got.status_code, dict(got.headers), got.content, answered_as)
        error.request_id = request_id
        raise error


def checked_timeout(timeout_s: float | None) -> float | None:
    """None for what is as good as for ever; raises InvalidInput for what is no time to come."""
    if timeout_s is None:
        return None
    if not timeout_s > 0:
        raise InvalidInput("timeout_s must be above 0")
    return timeout_s if timeout_s < FOR_EVER_S else None
