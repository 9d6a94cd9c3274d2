"""Options: those that several commands have, the address that they choose, and the console to which commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import ServiceError

if TYPE_CHECKING:
    from rich.console import Console

# A service that listens on every address also listens on the loopback address.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (compared, not bound)

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="ATTENTION_URL", help="address of the service; default: from ATTENTION_HOST and ATTENTION_PORT"
    ),
]


class CommandFailed(ServiceError):
    """The service did not answer as it should, or the command's question has the answer no; the message says which."""


def service_url(given: str | None) -> str:
    """Return the given address, else the local one of a service with the settings of this environment.

    Raises SettingsError for port 0, whose choice is not known here.
    """
    if given:
        return given
    from service.settings import SettingsError, load_settings  # it takes 0.3 s to import

    settings = load_settings()
    if settings.port == 0:
        raise SettingsError("ATTENTION_PORT: 0 lets the service choose its port; give --url")
    host = _LOOPBACK.get(settings.host, settings.host)
    scheme = "http" if settings.tls_cert_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets and colons in the names of files are no markup."""
    from rich.console import Console  # it takes 0.1 s to import

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
