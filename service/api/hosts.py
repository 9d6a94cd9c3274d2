"""Hosts: the names under which the service may be called, so that a page of another site cannot call it under that site's own
name (DNS rebinding).

Invariants: the port plays no part; a request without one readable Host is not allowed; a refusal repeats nothing of it. The
transport puts the authority of an absolute target in the place of Host, so there is one name to look at.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from service.errors import BadRequest
from service.http.asgi import Scope, fields_of
from service.http.header_fields import HeaderFields

_HOST = re.compile(rb"(\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]|[^:\[\]]+)(?::[0-9]*)?")


class Hosts:
    """`names`: hosts, `*.domain` for its subdomains, `.domain` for the domain and its subdomains. Without any, loopback hosts are
    allowed and only requests of browsers are looked at.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(canonical(name.removeprefix(".")) for name in names if name[0] != "*")
        self._ends = tuple("." + canonical(name.lstrip("*.")) for name in names if name[0] in "*.")
        self._is_for_all = bool(names)

    def check(self, scope: Scope, *, is_health: bool) -> None:
        """Raises BadRequest. A probe names the address that it asks, so only browsers' requests for health are looked at."""
        fields = fields_of(scope)
        is_browser = b"origin" in fields or b"sec-fetch-site" in fields
        if (is_browser or (self._is_for_all and not is_health)) and not self._allows(fields.make(_named)):
            raise BadRequest(
                "Host names none of the hosts in ATTENTION_ALLOWED_HOSTS"
                if self._is_for_all
                else "a browser's request must name a loopback host here, or one of ATTENTION_ALLOWED_HOSTS"
            )

    def _allows(self, name: str) -> bool:
        if self._is_for_all:
            return name in self._names or name.endswith(self._ends)
        return is_loopback(name)


def canonical(name: str) -> str:
    """In lower case, without a dot at the end; an IPv6 address in its shortest form and without brackets."""
    name = name.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    return str(ipaddress.IPv6Address(name)) if ":" in name else name


def is_loopback(name: str) -> bool:
    """Whether a canonical name is of this machine wherever it is resolved (RFC 6761, section 6.3; RFC 6890)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _named(fields: HeaderFields) -> str:
    """The host that a request names; empty where it names none."""
    values = fields[b"host"]
    found = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    try:
        return "" if found is None else canonical(found[1].decode("latin-1"))
    except ValueError:
        return ""
