"""`health` command: asks the service on this machine or in this container whether it is ready.

Must not import: torch, because a check runs every few seconds.
Invariants: The exit code is the answer, and one line describes the state. The command needs no shell, no curl and no key. By
default it derives the address from the service's settings. It follows no redirect.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from service.commands.terminal import say
from service.errors import InvalidInput

if TYPE_CHECKING:
    from http.client import HTTPConnection

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="ATTENTION_URL", help="address of the service; default: from ATTENTION_HOST and ATTENTION_PORT"
    ),
]
_READY = 200
_MAX_ANSWER_BYTES = 65536


def health(
    url: Url = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=60, help="longest time of one network operation")] = 4.0,
) -> None:
    """Ask /readyz: exit code 0 = ready, 1 = not."""
    is_ready, message = ask(service_url(url), timeout_s)
    with contextlib.suppress(OSError):  # a closed stdout does not make a service unready
        say(message, err=not is_ready)
    raise typer.Exit(0 if is_ready else 1)


def service_url(given: str | None) -> str:
    """Return the given address, else the local one of a service with the settings of this environment.

    Raises SettingsError for port 0, whose choice is not known here.
    """
    if given:
        return given
    from service.settings import SettingsError, load_settings, local_url  # it takes 0.3 s to import

    settings = load_settings()
    if settings.port == 0:
        raise SettingsError("ATTENTION_PORT: 0 lets the service choose its port; give --url")
    return local_url(settings, settings.port)


def ask(url: str, timeout_s: float) -> tuple[bool, str]:
    """Return whether the service is ready, and one line with the state or the reason; raises InvalidInput."""
    try:
        status, body = answer_of(url, "GET", "/readyz", timeout_s)
    except ConnectionError as error:
        return False, f"not ready: {error}"
    is_ready = status == _READY and text_of(body, "status") == "ready"  # another server may answer 200 too
    return is_ready, "ready" if is_ready else f"not ready: {status} {text_of(body, 'detail')}".rstrip()


def answer_of(url: str, method: str, path: str, timeout_s: float, key: str = "") -> tuple[int, bytes]:
    """Return status and body of an answer; raise ConnectionError, and InvalidInput if the address cannot be one."""
    from http.client import HTTPException

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with contextlib.closing(_connection(url, timeout_s, is_verified=bool(key))) as connection:
            connection.request(method, urlsplit(url).path.rstrip("/") + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_ANSWER_BYTES)
    except (OSError, HTTPException) as error:
        why = getattr(error, "verify_message", "") or getattr(error, "strerror", None) or type(error).__name__
        raise ConnectionError(f"no answer from {url.rpartition('@')[2]} ({why})") from None  # no password


def _connection(url: str, timeout_s: float, *, is_verified: bool) -> HTTPConnection:
    import http.client
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if is_verified:
        context.load_default_certs()
    else:  # the certificate has the service's public name, not the address used here, and the request no secret
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    secure = functools.partial(http.client.HTTPSConnection, context=context)
    kinds: dict[str, Callable[..., HTTPConnection]] = {"http": http.client.HTTPConnection, "https": secure}
    try:
        where = urlsplit(url)
        host = where.hostname or "."
        host.encode("idna"), where.path.encode("ascii")  # as the request does; IDNA refuses an empty or a long label
        return kinds[where.scheme](host, where.port, timeout=timeout_s)
    except (KeyError, ValueError, http.client.InvalidURL):
        raise InvalidInput(f"--url must be like http://127.0.0.1:8000, not {url.rpartition('@')[2]}") from None


def text_of(body: bytes, name: str) -> str:
    """Return a text of a JSON object if it is printable, else an empty one."""
    import json

    try:
        found = json.loads(body)[name]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return found if isinstance(found, str) and found.isprintable() else ""
