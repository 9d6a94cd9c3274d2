"""Entry point: `python -m service` and `attention-service` start the command line.

Invariants: For the first process of a container, the kernel drops a signal without a handler. So SIGTERM has a handler before
the imports begin, for every command; `serve` replaces it. A closed standard stream is opened on /dev/null, here and in every
child process; otherwise a file or socket would get its descriptor, and with it the output. A write to a closed stdout fails, so
that a lost result is no success.
"""

from __future__ import annotations

import io
import os
import signal
import sys

FIRST_PROCESS = 1


def main() -> None:
    _open_streams()
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))
    from service.cli import main as run  # noqa: PLC0415 (it takes 0.25 s; the handler is set before)

    run()


def _open_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free descriptor, which is the closed one, and stays open until the process ends.
            descriptor = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            # Written through, so that nothing is left to write when the interpreter ends.
            stream = io.TextIOWrapper(io.FileIO(descriptor, mode), write_through=True)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # keeps the stream open if `sys.<name>` is replaced later


if __name__ == "__main__":
    main()
