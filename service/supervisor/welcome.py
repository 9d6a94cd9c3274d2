"""Welcome: the three lines with which a terminal begins: the address, then, once it is ready, what is served and how to ask."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection

from service.supervisor.processes import write_text

AUTHORITY, LAYERS = "<authority>", "<layers>"
MAX_NAMES = 8


def welcome(text: str, host: str, port: int) -> Callable[[Collection[str]], None]:
    """Write the first line, for a bound address; return what writes the others, for the names of the served layers."""
    first, _, others = text.replace(AUTHORITY, f"{reachable(host)}:{port}").partition("\n")
    write_text(first + "\n")

    def write_others(layers: Collection[str]) -> None:
        more = [f"{len(layers) - MAX_NAMES} more"] if len(layers) > MAX_NAMES else []
        write_text(others.replace(LAYERS, "".join(f"{name}, " for name in [*sorted(layers)[:MAX_NAMES], *more])))

    return write_others


def reachable(host: str) -> str:
    """Return a bound address as a URL has it; the loopback address in place of one that stands for every address."""
    address = ipaddress.ip_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))  # noqa: S104 (compared, not bound)
    return f"[{address}]".replace("%", "%25") if isinstance(address, ipaddress.IPv6Address) else str(address)
