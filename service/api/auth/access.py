"""Access: decides whether a request may reach a route (host, key, role, rate), and which pages may read its answer (CORS).

Invariants: only this module decides, on the method and `scope["path"]`. Access is closed by default: a path that the tables below
do not name needs a key, even if no route serves it. Without a keys file everything is open except the admin routes, which are
off. Every refused key gets the same answer, whatever is wrong with it. Nothing that the client sent is stored or repeated.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path

from service.api.auth.key_ring import KeyRing, Role
from service.errors import BadRequest, Forbidden, NotReady, RateLimited, Unauthorized
from service.http.asgi import CROWDED, KEY_DIGEST, KEY_NAME, Application, Scope
from service.http.request_parser import HeaderFields, fields_of

_HOST = re.compile(rb"(\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]|[^:\[\]]+)(?::[0-9]*)?")


class Hosts:
    """Checks the host that a request names: with DNS rebinding, a page of another site calls the service under its own name.

    `names`: hosts, `*.domain` for its subdomains, `.domain` for the domain and its subdomains. Without names, only browsers'
    requests are checked, and only loopback hosts are allowed. The port plays no part.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(canonical(name.removeprefix(".")) for name in names if name[0] != "*")
        self._ends = tuple("." + canonical(name.lstrip("*.")) for name in names if name[0] in "*.")
        self._is_for_all = bool(names)

    def check(self, scope: Scope, *, is_health: bool) -> None:
        """Raise BadRequest if the host is not allowed, or not named exactly once.

        Probes name an address, so only browsers' requests for health are checked.
        """
        fields = fields_of(scope)
        is_browser = b"origin" in fields or b"sec-fetch-site" in fields
        if not is_browser and (is_health or not self._is_for_all):
            return
        name = fields.make(_named)
        if self._is_for_all and name not in self._names and not name.endswith(self._ends):
            raise BadRequest("Host names none of the hosts in ATTENTION_ALLOWED_HOSTS")
        if not self._is_for_all and not is_loopback(name):
            raise BadRequest("a browser's request must name a loopback host here, or one of ATTENTION_ALLOWED_HOSTS")


def canonical(name: str) -> str:
    """Return the name in lower case without a final dot; an IPv6 address in its shortest form without brackets."""
    name = name.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    return str(ipaddress.IPv6Address(name)) if ":" in name else name


def is_loopback(name: str) -> bool:
    """Return whether a canonical name means the local machine wherever it is resolved (RFC 6761, section 6.3; RFC 6890)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _named(fields: HeaderFields) -> str:
    """Return the canonical host that a request names; empty if it names none."""
    values = fields[b"host"]
    found = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    try:
        return "" if found is None else canonical(found[1].decode("latin-1"))
    except ValueError:
        return ""


# Sums of floating-point times miss the exact moment by a rounding error.
_EPSILON_S = 1e-7


class Limiter:
    """Bounds how often each caller may send requests, with one token bucket a caller; `now` is in monotonic seconds.

    In t seconds at most burst + t × rate requests of one caller are admitted. A refusal costs no token. A bucket is the time at
    which it will be full again (generic cell rate algorithm).
    """

    def __init__(self, rate_per_s: float, burst: int, now: Callable[[], float]) -> None:
        self.rate_per_s, self.burst, self._now = rate_per_s, burst, now
        self._full_at: dict[bytes, float] = {}

    def take(self, caller: bytes) -> None:
        """Take a token of this caller; raise RateLimited, with the whole seconds until the next token, if there is none."""
        if wait_s := self.wait_s(caller):
            raise RateLimited(
                f"more than {self.rate_per_s:g} requests a second, in bursts of at most {self.burst:,}",
                retry_after_s=max(1, math.ceil(wait_s - _EPSILON_S)),
            )

    def wait_s(self, caller: bytes) -> float:
        """Take a token of this caller and return 0.0, or return the seconds until the next token."""
        now, token_s = self._now(), 1 / self.rate_per_s
        full_at = max(now, self._full_at.get(caller, now)) + token_s
        wait_s = full_at - now - self.burst * token_s
        if wait_s > _EPSILON_S:
            return wait_s
        self._full_at[caller] = full_at
        return 0.0

    def keep(self, callers: Collection[bytes]) -> None:
        """Drop the buckets of all other callers."""
        self._full_at = {caller: self._full_at[caller] for caller in callers if caller in self._full_at}


OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
METRICS = "/metrics"
# With what is below /docs/ and /explore/ they need no key while their setting is on: a browser that opens a page sends none.
DOCS = frozenset({"/", "/docs", "/openapi.json"})
EXPLORE = frozenset({"/", "/explore"})
# Method and path template of each route that changes the service.
ADMIN = (("PUT", "/v1/layers/{layer}"), ("DELETE", "/v1/layers/{layer}"))
_ADMIN = {method: [compile_path(path)[0] for other, path in ADMIN if other == method] for method, _ in ADMIN}
_SECRET = re.compile(rb"[\x21-\x7e]{1,512}")


class Access:
    """`keys` returns the keys in force (None: no keys file), `hosts` are those that a request may name (None: any)."""

    def __init__(
        self,
        keys: Callable[[], KeyRing] | None = None,
        limiter: Limiter | None = None,
        hosts: Hosts | None = None,
        *,
        is_metrics_open: bool = False,
        are_docs_open: bool = False,
        is_explore_open: bool = False,
        are_layers_fixed: bool = False,
    ) -> None:
        self._keys = keys
        self._are_layers_fixed = are_layers_fixed
        self._limiter = limiter
        self._hosts = hosts
        pages = (DOCS if are_docs_open else frozenset()) | (EXPLORE if is_explore_open else frozenset())
        self._open = OPEN | pages | ({METRICS} if is_metrics_open else frozenset())
        self._below = tuple(f"{page}/" for page in ("/docs", "/explore") if page in pages)
        self._last: KeyRing | None = None

    def admit(self, scope: Scope) -> None:
        """Raise BadRequest, NotReady, Unauthorized, Forbidden or RateLimited if the request is not admitted."""
        path = scope["path"]
        if self._hosts is not None:
            self._hosts.check(scope, is_health=path in OPEN)
        if CROWDED in scope and path not in OPEN and path != METRICS:
            raise NotReady(
                "this process has ATTENTION_MAX_CONNECTIONS connections; only health and metrics are answered"
            )
        if self._is_open(path):
            return
        caller = self._caller(scope)
        # Metrics have no rate limit: monitoring must work when the service is busiest.
        if self._limiter is not None and path != METRICS:
            self._limiter.take(caller)

    def needs_key(self, path: str) -> bool:
        return self._keys is not None and not self._is_open(path)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(self._below)

    def _caller(self, scope: Scope) -> bytes:
        """Return the digest of the key; without a keys file, the empty name that all clients share."""
        if self._keys is None:
            if needs_admin(scope) and not self._are_layers_fixed:  # else the route refuses it, with the reason
                raise Forbidden("layers cannot be changed: there is no keys file with an admin key")
            return b""
        ring, secret = self._keys(), presented(scope)
        if ring is not self._last and self._limiter is not None:
            self._limiter.keep([key.digest for key in ring.keys])
            self._last = ring
        found = None if secret is None else ring.find(secret)
        if found is None:
            raise Unauthorized("this route needs a key: Authorization: Bearer <key>, or X-API-Key: <key>")
        scope[KEY_NAME] = found.name
        if needs_admin(scope) and found.role is not Role.ADMIN:
            raise Forbidden("this route needs a key with the role admin")
        scope[KEY_DIGEST] = found.digest
        return found.digest


def needs_admin(scope: Scope) -> bool:
    return any(path.match(scope["path"]) for path in _ADMIN.get(scope["method"], ()))


def presented(scope: Scope) -> bytes | None:
    """Return the one key that a request carries; None if it carries none, two different ones, or a malformed one.

    Both headers may carry it. A header that occurs twice is refused even with equal values: a proxy may have read either.
    """
    fields = fields_of(scope)
    bearers, plain = fields[b"authorization"], fields[b"x-api-key"]
    if len(bearers) > 1 or len(plain) > 1:
        return None
    found = set(plain)
    for value in bearers:
        scheme, _, secret = value.partition(b" ")
        found.add(secret.strip(b" ") if scheme.lower() == b"bearer" else b"")
    secret = found.pop() if len(found) == 1 else b""
    return secret if _SECRET.fullmatch(secret) else None


REQUEST_HEADERS = (
    "Accept", "Authorization", "Content-Encoding", "Content-Type", "Inference-Header-Content-Length",
    "X-API-Key", "X-Request-ID", "X-Request-Timeout-Ms", "traceparent", "tracestate",
)  # fmt: skip
EXPOSED = ("X-Request-ID", "Server-Timing", "Retry-After", "Inference-Header-Content-Length", "WWW-Authenticate")


class CrossOrigin(CORSMiddleware):
    """Adds CORS for `origins` (`*`: any) by Starlette's rules to refusals too, or a page could not read them.

    An allowed preflight is answered without a key, because browsers send none with it. Any other preflight is an ordinary
    OPTIONS request. Cookies play no part: keys come in headers.
    """

    def __init__(self, application: Application, origins: Sequence[str]) -> None:
        super().__init__(
            application,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
            allow_headers=REQUEST_HEADERS,
            expose_headers=EXPOSED,
            max_age=600,  # seconds
        )

    def preflight_response(self, request_headers: Headers) -> Any:
        answer = super().preflight_response(request_headers)
        return answer if answer.status_code == HTTPStatus.OK else self.app
