"""Hosts: checks the host that a request names, as protection against DNS rebinding.

With DNS rebinding, a page of another site calls the service under that site's own name. Invariants: the port plays no part. A
request without exactly one readable Host is not allowed. A refusal repeats nothing of it. The transport replaces Host by the
authority of an absolute target, so there is one name to check.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from service.errors import BadRequest
from service.http.asgi import Scope, fields_of
from service.http.head import HeaderFields

_HOST = re.compile(rb"(\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]|[^:\[\]]+)(?::[0-9]*)?")


class Hosts:
    """`names`: hosts, `*.domain` for its subdomains, `.domain` for the domain and its subdomains. Without names, only browsers'
    requests are checked, and only loopback hosts are allowed.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(canonical(name.removeprefix(".")) for name in names if name[0] != "*")
        self._ends = tuple("." + canonical(name.lstrip("*.")) for name in names if name[0] in "*.")
        self._is_for_all = bool(names)

    def check(self, scope: Scope, *, is_health: bool) -> None:
        """Raise BadRequest if the host is not allowed. Probes name an address, so health checks only browsers' requests."""
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
