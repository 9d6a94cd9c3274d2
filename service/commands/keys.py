"""`keys new` command: makes an API key and the keys-file line that allows it.

Invariants: The key is printed once, to stderr, and stored nowhere. Only the line goes to stdout, so that `>>` appends it. There
is no line for a key that could not be printed.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from service.commands.terminal import say
from service.errors import InvalidInput

app = typer.Typer(help="Make API keys.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Make API keys."""


@app.command()
def new(
    role: Annotated[str, typer.Option("--role", help="infer or admin; admin may also change layers")] = "infer",
    name: Annotated[str, typer.Option("--name", help="owner of the key, a comment in the file")] = "",
) -> None:
    """Print a new key to stderr, once, and its line for the keys file to stdout."""
    from service.api.auth.key_ring import Role, line_for, new_secret

    if role not in list(Role):
        raise InvalidInput("--role must be infer or admin")
    if not name.isprintable():
        raise InvalidInput("--name must be one line of printable characters")
    # `__main__.py` opens /dev/null for a closed stream.
    if os.path.samestat(os.fstat(sys.stderr.fileno()), os.stat(os.devnull)):  # noqa: PTH116 (compared with a descriptor's)
        raise InvalidInput("stderr is closed; the key would be lost")
    secret = new_secret()
    say(secret, err=True)
    say(line_for(secret, Role(role)) + (f"  # {name}" if name else ""))
