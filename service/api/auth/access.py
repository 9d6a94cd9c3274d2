"""Access: decides by method and path whether a request may reach a route: host, key, role and rate.

Invariants: only this module decides, on the method and `scope["path"]`. Access is closed by default: a path that the tables below
do not name needs a key, even if no route serves it. Without a keys file everything is open except the admin routes, which are
off. Every refused key gets the same answer, whatever is wrong with it. Nothing that the caller sent is stored or repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.routing import compile_path

from service.api.auth.key_ring import Key, KeyRing, Role
from service.api.auth.rate_limit import Limiter
from service.api.hosts import Hosts
from service.errors import Forbidden, NotReady, Unauthorized
from service.http.asgi import CROWDED, KEY_DIGEST, Scope, fields_of

OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
METRICS = "/metrics"
# Method and path template of each route that changes the service.
ADMIN = (("PUT", "/v1/layers/{layer}"), ("DELETE", "/v1/layers/{layer}"))

_ADMIN = tuple((method, compile_path(path)[0]) for method, path in ADMIN)
_ADMIN_METHODS = frozenset(method for method, _ in ADMIN)
_SECRET = re.compile(rb"[\x21-\x7e]{1,512}")
_EVERYBODY = b""


class Access:
    """`keys` returns the keys in force (None: no keys file); `limiter` bounds each caller's rate (None: no bound); `hosts` are
    the hosts that a request may name (None: any).
    """

    def __init__(
        self,
        keys: Callable[[], KeyRing] | None = None,
        limiter: Limiter | None = None,
        hosts: Hosts | None = None,
        *,
        is_metrics_open: bool = False,
    ) -> None:
        self._keys = keys
        self._limiter = limiter
        self._hosts = hosts
        self._open = OPEN | {METRICS} if is_metrics_open else OPEN
        self._last: KeyRing | None = None

    def admit(self, scope: Scope) -> None:
        """Raise BadRequest, NotReady, Unauthorized, Forbidden or RateLimited if the request may not go on."""
        path = scope["path"]
        if self._hosts is not None:
            self._hosts.check(scope, is_health=path in OPEN)
        if path in self._open:
            return
        if CROWDED in scope and path != METRICS:
            raise NotReady(
                "this process has ATTENTION_MAX_CONNECTIONS connections; only health and metrics are answered",
                retry_after_s=1,
            )
        caller = self._caller(scope)
        # Metrics have no rate limit: monitoring must work when the service is busiest.
        if self._limiter is not None and path != METRICS:
            self._limiter.take(caller)

    def needs_key(self, path: str) -> bool:
        return self._keys is not None and path not in self._open

    def _caller(self, scope: Scope) -> bytes:
        """Return the digest of the key; without a keys file, the one name that all callers share."""
        if self._keys is None:
            if needs_admin(scope):
                raise Forbidden("layers cannot be changed: there is no keys file with an admin key")
            return _EVERYBODY
        key = self._key(self._keys(), presented(scope))
        if needs_admin(scope) and key.role is not Role.ADMIN:
            raise Forbidden("this route needs a key with the role admin")
        scope[KEY_DIGEST] = key.digest
        return key.digest

    def _key(self, ring: KeyRing, secret: bytes | None) -> Key:
        if ring is not self._last and self._limiter is not None:
            self._limiter.keep([key.digest for key in ring.keys])
            self._last = ring
        key = None if secret is None else ring.find(secret)
        if key is None:
            raise Unauthorized("this route needs a key: Authorization: Bearer <key>, or X-API-Key: <key>")
        return key


def needs_admin(scope: Scope) -> bool:
    if scope["method"] not in _ADMIN_METHODS:
        return False
    return any(method == scope["method"] and path.match(scope["path"]) for method, path in _ADMIN)


def presented(scope: Scope) -> bytes | None:
    """Return the one key that a request carries; None if it carries none, two different ones, or a malformed one.

    Both headers may carry it. A header that occurs twice is refused even with equal values: a proxy may have read either.
    """
    fields = fields_of(scope)
    bearers, plain = fields[b"authorization"], fields[b"x-api-key"]
    if len(bearers) > 1 or len(plain) > 1:
        return None
    found = {*map(_bearer, bearers), *plain}
    secret = found.pop() if len(found) == 1 else b""
    return secret if _SECRET.fullmatch(secret) else None


def _bearer(value: bytes) -> bytes:
    scheme, _, secret = value.partition(b" ")
    return secret.strip(b" ") if scheme.lower() == b"bearer" else b""
