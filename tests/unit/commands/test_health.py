"""`attention-service health`: its exit code and output for each answer."""

import socket
import subprocess
import sys

import pytest

from service import cli
from service.commands.health import ask, service_url
from service.errors import InvalidInput
from service.settings import ENV_PREFIX, Settings, SettingsError
from tests.unit.commands.answering import answering

READY = b'{"status":"ready"}'
LOADING = b'{"code":"not_ready","detail":"the layers are being loaded","status":503}'


def run_command(arguments, monkeypatch, capfd) -> tuple[int, str, str]:
    """Run `attention-service health`; return its exit code and output."""
    monkeypatch.setattr(sys, "argv", ["attention-service", "health", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capfd.readouterr()


def test_a_service_that_is_ready_is_exit_code_0(monkeypatch, capfd):
    with answering(200, READY) as (url, asked):
        assert run_command(["--url", url], monkeypatch, capfd) == (0, "ready\n", "")
    assert asked == ["/readyz"]


def test_an_unready_service_is_exit_code_1_with_its_reason(monkeypatch, capfd):
    with answering(503, LOADING) as (url, _):
        expected = (1, "", "not ready: 503 the layers are being loaded\n")
        assert run_command(["--url", url], monkeypatch, capfd) == expected


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b'{"detail": 5}', b'{"detail": "two\\nlines"}', b"[" * 60_000],
    ids=lambda body: repr(body[:30]),
)
def test_an_answer_without_a_reason_is_one_line_too(body):
    with answering(503, body) as (url, _):
        assert ask(url, 4) == (False, "not ready: 503")


@pytest.mark.parametrize("body", [b"", b"<html></html>", b"[]", b'{"status": "ok"}', b'{"status": ["ready"]}'])
def test_another_server_that_answers_200_is_not_ready(body):
    with answering(200, body) as (url, _):
        assert ask(url, 4) == (False, "not ready: 200")


def test_a_redirect_is_not_followed():
    with answering(307, b"") as (url, asked):
        assert ask(url, 4) == (False, "not ready: 307")
    assert asked == ["/readyz"]


def test_an_address_with_a_path_keeps_it():
    with answering(200, READY) as (url, asked):
        assert ask(f"{url}/attention/", 4) == (True, "ready")
    assert asked == ["/attention/readyz"]


@pytest.mark.parametrize(
    "url", ["http://me:pa/ss@127.0.0.1:x", "ftp://me:pa/ss@127.0.0.1", "http://me:pass@127.0.0.1:1"]
)
def test_a_password_in_the_url_is_not_printed(url, monkeypatch, capfd):
    code, out, err = run_command(["--url", url], monkeypatch, capfd)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "127.0.0.1" in err
    assert "ss" not in err.replace("address", "").replace("does not", "")


def test_a_refused_connection_is_not_ready():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        is_ready, line = ask(url, 4)
    assert (is_ready, line) == (False, f"not ready: no answer from {url} (Connection refused)")


def test_a_silent_server_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        is_ready, line = ask(url, 0.1)
    assert (is_ready, line) == (False, f"not ready: no answer from {url} (TimeoutError)")


HOSTS = [
    "",
    "[::1",
    "127.0.0.1:x",
    "127.0.0.1:70000",
    "a..b",
    ".a",
    "é..b",
    "a" * 64,
    f"x.{'a' * 64}:80",
    "a b",
    "a\x7fb",
]


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://127.0.0.1/é",
        *(f"{scheme}://{host}" for host in HOSTS for scheme in ("http", "https")),
    ],
)
def test_an_invalid_url_is_refused_and_named(url):
    with pytest.raises(InvalidInput) as run_command:
        ask(url, 1)
    assert run_command.value.message == f"--url must be like http://127.0.0.1:8000, not {url}"


@pytest.fixture
def no_variables(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{ENV_PREFIX}{name.upper()}", raising=False)


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"HOST": "0.0.0.0", "PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"HOST": "::"}, "http://[::1]:8000"),
        ({"HOST": "192.0.2.7"}, "http://192.0.2.7:8000"),
        ({"TLS_CERT_FILE": "cert.pem"}, "https://127.0.0.1:8000"),
    ],
)
def test_the_address_comes_from_the_settings(given, url, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(f"{ENV_PREFIX}{name}", value)
    assert service_url(None) == url


@pytest.mark.usefixtures("no_variables")
def test_port_zero_cannot_be_checked(monkeypatch):
    monkeypatch.setenv(f"{ENV_PREFIX}PORT", "0")
    assert service_url("http://127.0.0.1:1") == "http://127.0.0.1:1"
    with pytest.raises(SettingsError, match="give --url"):
        service_url(None)


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing_does_not_make_a_service_unready(stdout):
    """The exit code is the answer."""
    with answering(200, READY) as (url, _):
        words = ["bash", "-c", f"exec {sys.executable} -m service health --url {url} {stdout}"]
        assert subprocess.run(words, check=False).returncode == 0
