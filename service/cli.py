"""Command line: `attention-service serve | health | layers | attend | attention | show | compare | golden | keys`.

Invariants: A ServiceError prints one line on stderr and exits with code 1, never a traceback. Help is quick, so heavy imports
wait until a command needs them.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from service.commands.attend import attend, attention, show
from service.commands.compare import compare
from service.commands.golden import golden
from service.commands.health import health
from service.commands.keys import app as keys
from service.commands.layers import app as layers
from service.commands.serve import serve, worker
from service.errors import ServiceError

# Typer does not export its copy of click; the base class of BadParameter is click's UsageError.
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
app.command()(attention)
app.command()(show)
app.command()(compare)
app.command()(golden)

app.command(hidden=True)(worker)


def main() -> None:
    try:
        raise SystemExit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        # Typer would print a box of several lines. Without arguments it has printed its help already.
        if message := error.format_message():
            sys.stderr.write(f"attention-service: {message}\n")
        raise SystemExit(2) from None
    except ServiceError as error:
        sys.stderr.write(f"attention-service: {error.message}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
