"""Access: closed by default, one refusal for whatever is wrong with a key, roles from one table."""

import pytest

from service.api.auth.access import ADMIN, METRICS, OPEN, Access, Limiter, presented
from service.api.auth.key_ring import Key, KeyRing, Role, digest_of
from service.errors import Forbidden, RateLimited, Unauthorized
from tests.doubles import ManualClock

RING = KeyRing((Key(digest_of(b"user"), Role.INFER), Key(digest_of(b"root"), Role.ADMIN)))
LAYER = "/v1/layers/small"


def request(path: str = "/v1/layers", method: str = "GET", **headers: bytes):
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": named}


def refusal(access: Access, scope) -> type[Exception] | None:
    try:
        access.admit(scope)
    except (Unauthorized, Forbidden, RateLimited) as error:
        return type(error)
    return None


@pytest.fixture
def access():
    return Access(lambda: RING)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": b"Bearer user"},
        {"authorization": b"bearer user"},
        {"authorization": b"BEARER   user "},
        {"x_api_key": b"user"},
        {"x_api_key": b" user\t"},
        {"authorization": b"Bearer user", "x_api_key": b"user"},
    ],
)
def test_a_known_key_is_accepted_in_either_header(access, headers):
    assert refusal(access, request(**headers)) is None


WRONG: dict[str, list[tuple[bytes, bytes]]] = {
    "A1-none": [],
    "A1-empty": [(b"authorization", b"")],
    "A1-empty-bearer": [(b"authorization", b"Bearer ")],
    "A1-empty-x-api-key": [(b"x-api-key", b"")],
    "A1-wrong": [(b"authorization", b"Bearer resu")],
    "A1-scheme": [(b"authorization", b"Basic user")],
    "A1-no-scheme": [(b"authorization", b"user")],
    "A1-glued": [(b"authorization", b"Beareruser")],
    "A1-tab": [(b"authorization", b"Bearer\tuser")],
    "A1-bearer-in-x-api-key": [(b"x-api-key", b"Bearer user")],
    "A1-case": [(b"x-api-key", b"USER")],
    "A1-the-digest-itself": [(b"x-api-key", digest_of(b"user").hex().encode())],
    "A1-other-header": [(b"x-auth", b"user"), (b"cookie", b"key=user")],
    "A5-two-authorizations": [(b"authorization", b"Bearer user")] * 2,
    "A5-two-x-api-keys": [(b"x-api-key", b"user")] * 2,
    "A5-two-and-one-wrong": [(b"authorization", b"Bearer user"), (b"authorization", b"Bearer no")],
    "A5-two-kinds-that-differ": [(b"authorization", b"Bearer user"), (b"x-api-key", b"root")],
    "A5-one-kind-wrong-scheme": [(b"authorization", b"Basic x"), (b"x-api-key", b"user")],
    "A5-list": [(b"authorization", b"Bearer user, Bearer user")],
    "A5-two-words": [(b"authorization", b"Bearer user user")],
    "A5-long": [(b"authorization", b"Bearer " + b"u" * 2**20)],
    "A5-latin-1": [(b"authorization", b"Bearer \xe9")],
    "A5-utf-8": [(b"x-api-key", "é".encode())],
    "A5-nul": [(b"x-api-key", b"user\0")],
    "A5-newline": [(b"x-api-key", b"user\n")],
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
def test_every_wrong_key_gets_the_same_refusal(access, headers):
    with pytest.raises(Unauthorized) as wrong:
        access.admit({**request(), "headers": headers})
    with pytest.raises(Unauthorized) as none:
        access.admit(request())
    assert wrong.value.message == none.value.message


def test_a_key_outside_visible_ascii_is_refused_even_if_its_digest_is_in_the_file():
    odd = ["é".encode(), b"two words", b"", b"\x00", b"x" * 513]
    ring = KeyRing(tuple(Key(digest_of(secret), Role.ADMIN) for secret in odd))
    for secret in odd:
        assert presented(request(x_api_key=secret)) is None
        assert refusal(Access(lambda: ring), request(x_api_key=secret)) is Unauthorized


@pytest.mark.parametrize("path", sorted(OPEN))
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_A2_the_open_paths_need_no_key(access, path, method):
    assert refusal(access, request(path, method)) is None


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "*", "/docs", "/openapi.json", "/metrics", "/v1/layers", "/v2", "/v2/health", "/v3/nothing",
        "/healthz/", "//healthz",
        "/healthz\n", "/healthz\0", "/HEALTHZ", "/healthz/../v1/layers", "/v1/layers/../../healthz", "/healthz;x", "healthz",
        "/healthz?", "/v2/health/live/x",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "TRACE", "FOO"])
def test_A2_every_other_path_needs_a_key_whether_it_exists_or_not(access, path, method):
    assert refusal(access, request(path, method)) is Unauthorized
    assert access.needs_key(path)


def test_only_a_setting_opens_metrics():
    access = Access(lambda: RING, is_metrics_open=True)
    assert refusal(access, request(METRICS)) is None
    assert refusal(access, request(METRICS + "/")) is Unauthorized


@pytest.mark.parametrize(("method", "path"), [(method, path.replace("{layer}", "x")) for method, path in ADMIN])
def test_A8_routes_that_change_the_service_need_an_admin_key(access, method, path):
    assert refusal(access, request(path, method)) is Unauthorized
    assert refusal(access, request(path, method, x_api_key=b"user")) is Forbidden
    assert refusal(access, request(path, method, x_api_key=b"root")) is None


@pytest.mark.parametrize("layer", ["x\n", "x y", "%2e", "é", "..", "X", "a" * 9999])
def test_A8_a_layer_of_any_name_is_a_layer(access, layer):
    assert refusal(access, request(f"/v1/layers/{layer}", "PUT", x_api_key=b"user")) is Forbidden


def test_an_admin_key_may_do_what_an_infer_key_may(access):
    assert refusal(access, request("/v1/layers/x/attend", "POST", x_api_key=b"root")) is None
    assert refusal(access, request(LAYER, "GET", x_api_key=b"user")) is None
    assert refusal(access, request("/v1/layers/x/attend", "PUT", x_api_key=b"user")) is None, (
        "405 is the route's to say"
    )


def test_A12_without_a_keys_file_all_routes_are_open_and_admin_is_off():
    access = Access()
    assert refusal(access, request("/v1/layers/x/attend", "POST")) is None
    assert refusal(access, request(METRICS)) is None
    for key in (b"", b"root"):
        assert refusal(access, request(LAYER, "DELETE", x_api_key=key)) is Forbidden
    assert not access.needs_key(LAYER)


def test_with_an_empty_file_every_key_is_refused():
    access = Access(KeyRing)
    assert refusal(access, request(x_api_key=b"user")) is Unauthorized
    assert refusal(access, request("/healthz")) is None


def test_the_current_key_ring_decides():
    ring = RING
    access = Access(lambda: ring)
    assert refusal(access, request(x_api_key=b"user")) is None
    ring = KeyRing((Key(digest_of(b"new"), Role.INFER),))
    assert refusal(access, request(x_api_key=b"user")) is Unauthorized
    assert refusal(access, request(x_api_key=b"new")) is None


class Known(Limiter):
    """Knows the callers that it has been asked about: each takes memory."""

    def __init__(self):
        super().__init__(0.5, 2, ManualClock().now)
        self.callers = set[bytes]()

    def take(self, caller):
        self.callers.add(caller)
        super().take(caller)


def limited(ring=RING):
    limiter = Known()
    return Access(ring, limiter, is_metrics_open=False), limiter


def test_each_key_has_its_own_rate_and_refused_requests_use_none():
    access, limiter = limited(lambda: RING)
    one, other = request(x_api_key=b"user"), request(x_api_key=b"root")
    assert [refusal(access, one) for _ in range(3)] == [None, None, RateLimited]
    assert refusal(access, other) is None
    for number in range(1000):
        assert refusal(access, request(x_api_key=str(number).encode())) is Unauthorized
        assert refusal(access, request(LAYER, "PUT", x_api_key=b"user")) is Forbidden
    assert len(limiter.callers) == 2


def test_without_keys_all_callers_share_one_rate():
    access, limiter = limited(None)
    assert [refusal(access, request(x_api_key=str(n).encode())) for n in range(3)] == [None, None, RateLimited]
    assert len(limiter.callers) == 1


def test_health_and_metrics_are_never_limited():
    access, _ = limited(lambda: RING)
    for path in [*OPEN, METRICS] * 5:
        assert refusal(access, request(path, x_api_key=b"user")) is None


def test_a_removed_key_loses_its_bucket():
    ring = RING
    access, _ = limited(lambda: ring)
    root = request(x_api_key=b"root")
    assert [refusal(access, root) for _ in range(3)] == [None, None, RateLimited]
    ring = KeyRing(RING.keys[:1])
    assert refusal(access, root) is Unauthorized
    ring = KeyRing(RING.keys)
    assert refusal(access, root) is None, "it begins anew"
