"""Processes: what the supervisor asks of the operating system: a port, streams, children, signals.

Must not know: when a process is started, replaced or ended (`supervisor/supervisor.py`), what it does, torch, settings.
Laws: nothing here polls; a child begins with no signal ignored and only NEWS blocked, which would end it before it can listen,
in a process group of its own, so that Ctrl-C reaches the supervisor alone; every child holds the reading end of one pipe (the
lifeline) and nobody but the supervisor the writing end, so that the end of the supervisor, however it came, is an end-of-file
for every child. Of another (the pulse) every child holds the writing end. Nothing that a process of the service writes to
stdout or stderr waits for a reader, be it a log line, a traceback or what C code has to say.

Signals come through Python's wake-up pipe and not through sigwait: a thread that a library started (OpenBLAS starts one
at the import of NumPy) has them unblocked, and one that came while this thread did not wait would end the process there.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from service.errors import ServiceError
from service.observability.line_writer import FINISH_S, LineWriter, log_line
from service.supervisor.notification import NEWS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, NEWS)
STDOUT, STDERR = 1, 2
_log = LineWriter(STDOUT)


class StartError(ServiceError):
    """The service cannot start where it was told to; the message is one line."""

    code = "cannot_start"


def reserve_port(host: str, port: int) -> socket.socket:
    """A bound socket that never listens: it keeps `port` (0 = a free one) for this user's SO_REUSEPORT listeners.

    Anybody who listens there, and any other supervisor, makes the first bind fail. SO_REUSEADDR lets connections of an
    earlier run linger, and is taken off afterwards: with it a second supervisor would not be noticed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            reserved.close()
            raise
    except OSError as error:
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror or 'no such address'}") from None
    return reserved


def say_once(run_dir: Path, message: str) -> None:
    """One line on stderr, from whichever process of the service comes first: they mostly refuse for the same reason."""
    try:
        (run_dir / "refusal").open("x").close()
    except FileExistsError:
        return
    except OSError:  # no place for it: rather twice than never
        pass
    say(message)


def say(message: str) -> None:
    """One line on stderr, if there is room."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"attention-service: {message}\n")
        sys.stderr.flush()


def unblock(descriptor: int) -> bool:
    """Lets a write to this stream fail where it would wait for a reader; returns False where only a Relay can do that.

    O_NONBLOCK belongs to the open file, which a shell and other programs share with us. So a pipe is opened once more, which
    leaves theirs as it is. A file and a device like /dev/null have no reader. A terminal would take a part of a line.
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode):
        return not (stat.S_ISSOCK(mode) or os.isatty(descriptor))
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # another user's pipe (after sudo), no /proc
        return False
    os.dup2(own, descriptor)
    os.close(own)
    return True


def unbuffer_streams() -> None:
    """Lets Python's own streams keep nothing that found no room; tried again at the exit, it would make its code 120."""
    for name, descriptor in (("stdout", STDOUT), ("stderr", STDERR)):
        raw = io.FileIO(descriptor, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True))


class Relay:
    """Replaces a stream by a pipe that does not block; a thread copies the pipe to the stream and may wait."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._target = os.dup(descriptor)
        self._source, end = os.pipe()
        os.set_blocking(end, False)
        os.dup2(end, descriptor)
        os.close(end)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._source, 2**16):
                while data:
                    select.select([], [self._target], [])  # it may be non-blocking as it was given to us
                    data = data[os.write(self._target, data) :]
        os.close(self._source)  # the reader is gone: from here on each write to the pipe fails

    def close(self) -> None:
        """Puts the stream back after the last child; what is still in the pipe has FINISH_S to find a reader."""
        os.dup2(self._target, self._descriptor)
        self._thread.join(FINISH_S)


@contextlib.contextmanager
def unblocked_streams() -> Iterator[None]:
    """Unblocks stdout and stderr of this process and of those it starts; what waits at the end has FINISH_S to go out."""
    relays = [Relay(descriptor) for descriptor in (STDOUT, STDERR) if not unblock(descriptor)]
    unbuffer_streams()
    try:
        yield
    finally:
        _log.finish()
        for relay in relays:
            relay.close()


def _in_the_pipe(_: int, __: FrameType | None) -> None:
    """What Python's own handler wrote into the pipe is all that is needed."""


class Posix:
    """Children, signals and time of this process. Making one takes SIGNALS over for good: the process ends with it."""

    def __init__(self) -> None:
        self._signalled, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for signum in SIGNALS:
            # Also where our parent ignored it: an ignored SIGCHLD lets children vanish without a word.
            signal.signal(signum, _in_the_pipe)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.lifeline, self._keep = os.pipe()
        os.set_inheritable(self.lifeline, True)
        self._signs, self.pulse = os.pipe()
        for descriptor in (self._signs, self.pulse):
            os.set_blocking(descriptor, False)
        os.set_inheritable(self.pulse, True)

    def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """posix_spawn and not fork with code in between: the mask and the dispositions are set by the C library."""
        return os.posix_spawn(command[0], [*command], environment, setpgroup=0, setsigmask=(NEWS,), setsigdef=SIGNALS)

    def kill(self, pid: int, signum: int) -> None:
        # A child is ours until it is reaped, so its number cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def reap(self) -> Iterator[tuple[int, int]]:
        """Every child that ended: its pid, and its exit code (negative: the signal). As PID 1 also adopted ones."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)

    def wait(self, timeout_s: float | None) -> int | None:
        """The next signal; None when `timeout_s` passed first."""
        _log.flush()  # lines that found no room are tried again at every wait
        is_signalled, _, _ = select.select([self._signalled], [], [], timeout_s)
        return os.read(self._signalled, 1)[0] if is_signalled else None

    def heard(self) -> set[int]:
        """The slots that gave a sign of life since this was asked last (`supervisor/watchdog.py`)."""
        signs = set[int]()
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self._signs, 4096):
                signs.update(some)
        return signs

    def now(self) -> float:
        return time.monotonic()


def write_log_line(level: str, event: str, **fields: object) -> None:
    """Writes one line to stdout, without waiting for a reader."""
    _log.write(log_line(level, event, **fields))
