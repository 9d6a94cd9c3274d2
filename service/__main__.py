"""`python -m service` and `attention-service` are the command line.

Law: the first process of a container has no default for a signal, the kernel drops what it does not handle; so it can be told
to stop while it still imports, and whatever command it runs. `serve` puts its own handlers in place of this one.
"""

from __future__ import annotations

import os
import signal

FIRST_PROCESS = 1


def main() -> None:
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))
    from service.cli import main as run  # noqa: PLC0415 (a quarter of a second, in which the handler is there already)

    run()


if __name__ == "__main__":
    main()
