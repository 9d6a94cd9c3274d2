"""Access: what a request needs before it reaches a route, decided in this one place, on the method and `scope["path"]`.

Laws: closed by default: what the tables below do not name needs a key, a path that nothing serves too; without a keys file all
is open but what needs an admin, which is off; every refusal for the key is the same answer, whatever was wrong with it;
nothing of what the caller sent is kept or told.
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
# Method and path (as a route has it) of what changes the service.
ADMIN = (("PUT", "/v1/layers/{layer}"), ("DELETE", "/v1/layers/{layer}"))

_ADMIN = tuple((method, compile_path(path)[0]) for method, path in ADMIN)
_ADMIN_METHODS = frozenset(method for method, _ in ADMIN)
_SECRET = re.compile(rb"[\x21-\x7e]{1,512}")
_EVERYBODY = b""


class Access:
    """`keys` gives the keys in force (None: there is no keys file); `limiter` bounds each caller's rate (None: it does not);
    `hosts` are those that a request may name (None: any).
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
        """Raises BadRequest, NotReady, Unauthorized, Forbidden or RateLimited."""
        path = scope["path"]
        if self._hosts is not None:
            self._hosts.check(scope, is_health=path in OPEN)
        if path in self._open:
            return
        if CROWDED in scope and path != METRICS:
            raise NotReady("this process has as many connections as it keeps; health is answered", retry_after_s=1)
        caller = self._caller(scope)
        # Whoever watches the service must see it when it is busiest.
        if self._limiter is not None and path != METRICS:
            self._limiter.take(caller)

    def needs_key(self, path: str) -> bool:
        return self._keys is not None and path not in self._open

    def _caller(self, scope: Scope) -> bytes:
        """The digest of the key, or the one name of all who come without."""
        if self._keys is None:
            if needs_admin(scope):
                raise Forbidden("layers cannot be changed here: no keys file with a key of role admin is set")
            return _EVERYBODY
        key = self._key(self._keys(), presented(scope))
        if needs_admin(scope) and key.role is not Role.ADMIN:
            raise Forbidden("this takes a key of role admin")
        scope[KEY_DIGEST] = key.digest
        return key.digest

    def _key(self, ring: KeyRing, secret: bytes | None) -> Key:
        if ring is not self._last and self._limiter is not None:
            self._limiter.keep([key.digest for key in ring.keys])
            self._last = ring
        key = None if secret is None else ring.find(secret)
        if key is None:
            raise Unauthorized("this takes a key: Authorization: Bearer <key>, or X-API-Key: <key>")
        return key


def needs_admin(scope: Scope) -> bool:
    if scope["method"] not in _ADMIN_METHODS:
        return False
    return any(method == scope["method"] and path.match(scope["path"]) for method, path in _ADMIN)


def presented(scope: Scope) -> bytes | None:
    """The one key that a request carries; None where there is none, or two, or something that can be no key.

    Both headers may carry it. One that stands there twice is refused even so: which of them a proxy saw is anybody's guess.
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
