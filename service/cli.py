"""Command line: `attention-service serve | health | layers | models | keys`.

Invariants: A ServiceError prints one line on stderr and exits with code 1, never a traceback. A name that is not UTF-8, and
whatever else could control a terminal, is printed with backslash escapes. To keep help quick, heavy imports wait until a command
needs them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from service import __version__
from service.commands.health import health
from service.commands.keys import app as keys
from service.commands.layers import app as layers
from service.commands.models import app as models
from service.commands.serve import serve, worker
from service.commands.terminal import say
from service.errors import ServiceError

# Typer does not export its copy of click; the base class of BadParameter is click's UsageError.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    help="Multi-head attention layers of real models over REST.", no_args_is_help=True, pretty_exceptions_enable=False
)
for command in (serve, health):
    app.command()(command)
app.add_typer(layers, name="layers")
app.add_typer(models, name="models")
app.add_typer(keys, name="keys")
app.command(hidden=True)(worker)

# Shown at the end of each command's help; a test parses them.
EXAMPLES = {
    "serve": ("", "--port 9000 --layers-dir layers --workers 2"),
    "health": ("", "--url http://10.0.0.7:8000"),
    "layers import": (
        "gpt2/ --layer 0 --name gpt2-l0",
        "model.safetensors --name mine --heads 8 --map query=q.weight key=k.weight value=v.weight output=o.weight",
    ),
    "layers list": ("", "--layers-dir layers"),
    "layers check": ("gpt2-l0 gpt2/ --layer 0",),
    "layers remove": ("gpt2-l0",),
    "layers publish": ("/mnt/layers/blue", "--layers-dir layers /mnt/layers/green"),
    "models import": ("all-MiniLM-L6-v2/ --name minilm", "bert-base-uncased/ --name bert --layers-dir layers"),
    "keys new": ('--name "team a" >> keys.txt', "--role admin --name ops >> keys.txt"),
}
for prefix, group in (("", app), ("layers ", layers), ("models ", models), ("keys ", keys)):
    for info in group.registered_commands:
        name = prefix + str(info.name or getattr(info.callback, "__name__", ""))
        lines = [f"attention-service {name} {example}".strip() for example in EXAMPLES.get(name, ())]
        info.epilog = "\n\n".join(["Examples:", *lines]) if lines else None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say(f"attention-service {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def main() -> None:
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)  # NumPy's, of numbers that are not finite
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr
    try:
        raise SystemExit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        # Typer would print a box of several lines. Without arguments it has printed its help already.
        if message := error.format_message():
            say(f"attention-service: {message}", err=True)
        raise SystemExit(2) from None
    except (ServiceError, MemoryError) as error:
        say(f"attention-service: {getattr(error, 'message', 'the memory does not suffice')}", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF):
            raise
        # Python writes the rest of stdout at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):  # stderr may be the stream that failed
            say(f"attention-service: a write failed: {error.strerror}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
