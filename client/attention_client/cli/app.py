"""Command line: `attention attend | sdpa | show | compare | golden`.

Invariants: A ServiceError prints one line on stderr and exits with code 1, never a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from attention_client.cli.commands import attend, compare, golden, sdpa, show
from attention_client.cli.terminal import complain
from attention_client.errors import ServiceError

# Typer does not export its copy of click; the base class of BadParameter is click's UsageError.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(help="Ask an attention service.", no_args_is_help=True, pretty_exceptions_enable=False)

# Shown at the end of each command's help; a test parses them.
EXAMPLES = {
    "attend": (
        "minilm-l3 --query q.npy --weights mean --out answer.npz",
        'minilm-l3 --query q.npy --mask "ignore axes=bs values=padding.npy" --json',
        "llama-l1 --query q.npy --past-key k.npy --past-value v.npy --positions p.npy --key-positions kp.npy --present",
        "llama-l1 --request capture.safetensors --layer-masks none --weights mean --json",
        'minilm-l3 --query q.npy --mask "window left=4 right=0 align=top_left" --weights "top_k k=3"',
    ),
    "sdpa": (
        "--query q.npy --key k.npy --value v.npy --layout bhld --causal bottom_right --out output.npy",
        '--request body.json --mask "lengths values=[3,5]" --scores masked --lse --json',
    ),
    "show": (
        '--text "the dog saw the cat because it ran" --layer 3 --head 1',
        'minilm-l3 --query q.npy --head 2 --tokens "the cat sat"',
        "--weights answer.npz --sequence 1 --svg head.svg",
    ),
    "compare": ("case.safetensors", "case.safetensors --scale 0.125"),
    "golden": ("--out vectors", "--out vectors --seed 7"),
}
# In the help of `show`; a test draws it.
DRAWING = """
minilm-l3, head 2
    the cat sat strongest
the 100  0   0  the 1.000
cat 33  67   0  cat 0.667
sat 12  55  33  cat 0.550
weights in hundredths; brighter = stronger"""
show.__doc__ = f"{show.__doc__}\n\nRows are queries, columns are keys:\n\n\b{DRAWING}"
for command in (attend, sdpa, show, compare, golden):
    examples = "\n\n".join(f"attention {command.__name__} {example}" for example in EXAMPLES[command.__name__])
    app.command(epilog=f"Examples:\n\n{examples}")(command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"attention {version_of('attention-service-client')}")
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
    warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr
    try:
        raise SystemExit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        # Typer would print a box of several lines. Without arguments it has printed its help already.
        if message := error.format_message():
            complain(message)
        raise SystemExit(2) from None
    except (ServiceError, MemoryError) as error:
        complain(getattr(error, "message", "the memory does not suffice"))
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        # Python writes the rest of stdout at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"a write failed: {error.strerror}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
