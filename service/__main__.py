"""`python -m service` and `attention-service` are the command line.

Laws: the first process of a container has no default for a signal, the kernel drops what it does not handle; so it can be told
to stop while it still imports, and whatever command it runs (`serve` puts its own handlers in place of this one). A standard
stream that was closed leads to /dev/null, here and in every process that comes of this one: else some file or socket would get
its number, and with it what is written there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FIRST_PROCESS = 1


def main() -> None:
    _open_streams()
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))
    from service.cli import main as run  # noqa: PLC0415 (a quarter of a second, in which the handler is there already)

    run()


def _open_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It takes the lowest number, which is the closed one, and stays open until the end.
            stream = Path(os.devnull).open(mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # whatever is put in its place later


if __name__ == "__main__":
    main()
