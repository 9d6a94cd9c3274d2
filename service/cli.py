"""The command line: `attention-service serve | health | layers | attend | show | keys`.

Laws: a failure of ours is one line on stderr and exit code 1, never a traceback; help is quick, so heavy imports wait until
a command needs them.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from service.commands.attend import attend, show
from service.commands.health import health
from service.commands.keys import app as keys
from service.commands.layers import app as layers
from service.commands.serve import serve, worker
from service.errors import ServiceError

# Typer keeps its copy of click to itself; what it does export leads to the class.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Multi-head attention layers of real models over REST.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(health)
app.add_typer(layers, name="layers")
app.add_typer(keys, name="keys")
app.command()(attend)
app.command()(show)
app.command(hidden=True)(worker)


def main() -> None:
    try:
        raise SystemExit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        # Typer's own way to say it is a box of several lines. Without any argument it has shown its help already.
        if message := error.format_message():
            sys.stderr.write(f"attention-service: {message}\n")
        raise SystemExit(2) from None
    except ServiceError as error:
        sys.stderr.write(f"attention-service: {error.message}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
