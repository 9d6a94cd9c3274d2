"""Hosts: by default a browser may call a loopback address under loopback names only; a setting names the hosts for all."""

import itertools

import pytest

from service.api.auth.access import OPEN, Access, Hosts
from service.errors import BadRequest
from service.limits import hosts
from service.settings import load_settings

BROWSER = [{"origin": b"http://evil.example"}, {"origin": b"null"}, {"sec_fetch_site": b"none"}, {"origin": b""}]
LOOPBACK = [
    b"localhost", b"localhost:8000", b"LocalHost.", b"localhost.:1", b"a.b.localhost", b"127.0.0.1", b"127.0.0.1:65535",
    b"127.255.0.9", b"[::1]", b"[::1]:8000", b"[0:0:0:0:0:0:0:1]", b"[::ffff:127.0.0.1]:80", b"[::FFFF:7f00:1]", b"127.0.0.1:",
]  # fmt: skip
FOREIGN = [
    None, b"", b":8000", b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"evillocalhost",
    b"127.0.0.1.evil.example",
    b"128.0.0.1", b"0.0.0.0", b"[::]", b"[::2]", b"[::ffff:10.0.0.1]", b"10.0.0.1:8000", b"127.1", b"0127.0.0.1", b"localhost..",
    b"[127.0.0.1]", b"::1", b"[::1", b"[::1]x", b"localhost:x", b"localhost:80:80", b"\xff", b"[:::]",
    b"2130706433", b"[::1]:8000:1",
]  # fmt: skip


def scope(host: bytes | None, path: str = "/v1/layers", method: str = "GET", **headers):
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*named, *([(b"host", host)] if host is not None else [])],
    }


def is_refused(access: Access, asked) -> bool:
    try:
        access.admit(asked)
    except BadRequest:
        return True
    return False


def refused_of(access: Access, asked) -> list:
    return [one for one in asked if is_refused(access, one)]


def taken_of(access: Access, asked) -> list:
    return [one for one in asked if not is_refused(access, one)]


def access_of(**settings) -> Access:
    return Access(hosts=hosts(load_settings(**settings)))


@pytest.mark.parametrize("headers", BROWSER)
def test_a_browser_may_name_any_loopback_host(headers):
    assert refused_of(access_of(), (scope(host, **headers) for host in LOOPBACK)) == []


@pytest.mark.parametrize("headers", BROWSER)
def test_D9_by_default_a_browser_may_name_no_other_host_on_any_route(headers):
    paths = ("/v1/layers", "/v1/layers/a/attend", "/docs", "/metrics", "/nothing", *OPEN)
    methods = ("GET", "POST", "PUT", "OPTIONS", "HEAD")
    asked = (scope(host, path, method, **headers) for host, path, method in itertools.product(FOREIGN, paths, methods))
    assert taken_of(access_of(), asked) == []


def test_by_default_only_browsers_are_checked_for_their_host():
    asked = [scope(host, user_agent=b"curl/8", referer=b"http://evil.example/") for host in (*LOOPBACK, *FOREIGN)]
    assert refused_of(access_of(), asked) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_beyond_loopback_accepts_any_host(host):
    assert hosts(load_settings(host=host)) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_every_loopback_address_is_guarded_unless_there_are_keys(host, tmp_path):
    assert is_refused(access_of(host=host), scope(b"evil.example", origin=b"null"))
    assert hosts(load_settings(host=host, api_keys_file=tmp_path / "keys")) is None


NAMED = "api.example, *.wild.example ,.dot.example,192.0.2.7,[::1],2001:DB8::0, UPPER.example."


OURS = [
    b"api.example", b"API.example:443", b"api.example.", b"a.wild.example", b"a.b.wild.example:1",
    b"dot.example", b"a.dot.example", b"192.0.2.7:8000", b"[::1]", b"[0::1]:80", b"[2001:db8::]", b"upper.example",
]  # fmt: skip
OTHERS = [
    None, b"", b"localhost", b"127.0.0.1", b"a.api.example", b"xapi.example", b"wild.example", b"xwild.example",
    b"wild.example.evil", b"xdot.example", b"192.0.2.70", b"[::2]", b"api.example@evil", b"api.example:x",
    b"*.wild.example:x", b"evil.example",
]  # fmt: skip


@pytest.mark.parametrize("headers", [{}, *BROWSER])
def test_with_the_setting_a_request_names_one_of_its_hosts(headers):
    assert refused_of(access_of(allowed_hosts=NAMED), (scope(host, **headers) for host in OURS)) == []


@pytest.mark.parametrize("headers", [{}, *BROWSER])
def test_D9_with_the_setting_a_request_of_another_host_is_refused(headers):
    assert taken_of(access_of(allowed_hosts=NAMED), (scope(host, **headers) for host in OTHERS)) == []


def test_the_setting_holds_on_every_address_and_beside_keys(tmp_path):
    for settings in ({"host": "0.0.0.0"}, {"api_keys_file": tmp_path / "keys"}):
        assert is_refused(access_of(allowed_hosts="api.example", **settings), scope(b"other.example"))


def test_a_probe_may_name_any_address_and_a_browser_may_not():
    for path in OPEN:
        for host in (b"10.1.2.3:8000", None):
            assert not is_refused(access_of(allowed_hosts="api.example"), scope(host, path))
            assert is_refused(access_of(allowed_hosts="api.example"), scope(host, path, origin=b"http://evil.example"))
    assert is_refused(access_of(allowed_hosts="api.example"), scope(b"10.1.2.3:8000", "/metrics"))


@pytest.mark.parametrize("names", ["*", "api.example, *"])
def test_a_star_allows_any_host(names):
    assert hosts(load_settings(allowed_hosts=names)) is None


def test_a_repeated_header_names_no_host():
    asked = scope(b"localhost", origin=b"null")
    asked["headers"].append((b"host", b"localhost"))
    assert is_refused(access_of(), asked)


def test_the_host_is_checked_before_the_key_and_not_echoed():
    def no_keys():
        raise AssertionError

    access = Access(no_keys, hosts=Hosts(["api.example"]))
    with pytest.raises(BadRequest) as refused:
        access.admit(scope(b"secret.example"))
    assert "secret" not in refused.value.message
    assert "ATTENTION_ALLOWED_HOSTS" in refused.value.message
    with pytest.raises(AssertionError):
        access.admit(scope(b"api.example"))
