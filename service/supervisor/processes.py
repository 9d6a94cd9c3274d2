"""Processes: what the supervisor needs from the operating system: a port, descriptors, streams, children and signals.

Independent of torch, settings, what a process does, and when it is started, replaced or ended (`supervisor/supervisor.py`).
Invariants: Nothing here polls. A child begins with no signal blocked and none of SIGNALS ignored. It has a process group of its
own, so that Ctrl-C reaches only the supervisor. It holds one end of a socket pair, and only the supervisor holds the other
(`supervisor/channel.py`). So each reads an end-of-file when the other ends, even by SIGKILL. Nothing that a process of the
service writes to stdout or stderr waits for a reader, be it a log line, a traceback or output of C code. Descriptors may have any
number, because a parent may leave a thousand open; so poll is used, and never select, which takes numbers below 1,024 only.

Signals come through Python's wake-up pipe, not through sigwait. A thread that a library started (OpenBLAS starts one at the
import of NumPy) has them unblocked: a signal outside the main thread's sigwait would reach that thread and end the process.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from service.errors import ServiceError, printable
from service.observability.line_writer import FINISH_S, LineWriter, log_line
from service.supervisor.channel import MAX_WORKER_BYTES, Channel

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
STDOUT, STDERR = 1, 2
DEFAULT_MAX_CONNECTIONS = 8192
# For overflow connections (`http/listener.py`), files and pipes: with every connection in use a process can still report its
# state, read a layer and accept one more connection.
RESERVED_DESCRIPTORS = 160
_log = LineWriter(STDOUT)


class StartError(ServiceError, code="cannot_start"):
    """The service cannot start as configured; the message is one line."""


def bind(host: str, port: int, *, is_shared: bool = True) -> socket.socket:
    """Return a bound socket; the kernel spreads connections over all shared sockets of a port that listen."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # tolerates lingering connections of an earlier run
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a bound socket that never listens: it keeps `port` (0 = a free one) for this user's shared sockets.

    The first bind fails if a listener or another supervisor has the port. SO_REUSEADDR is removed afterwards, because with it the
    bind of a second supervisor would succeed.
    """
    try:
        bind(host, port, is_shared=False).close()
        reserved = bind(host, port)
    except (OSError, UnicodeError) as error:  # a host name with an empty or too long part is a UnicodeError
        reason = getattr(error, "strerror", None) or "no such address"
        raise StartError(f"cannot listen on {host} port {port}: {reason}") from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def max_connections(asked: int) -> int:
    """Return the number asked for, or for 0 what the hard limit of descriptors allows; raise StartError if it allows too few."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return asked or DEFAULT_MAX_CONNECTIONS
    least = max(1, asked)
    if descriptors < least + RESERVED_DESCRIPTORS:
        needed = f"{least:,} need {least + RESERVED_DESCRIPTORS:,} file descriptors"
        raise StartError(f"ATTENTION_MAX_CONNECTIONS: {needed}, and a process may have {descriptors:,} (ulimit -Hn)")
    return asked or min(DEFAULT_MAX_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS)


def raise_descriptor_limit(asked: int) -> None:
    """Raise the soft limit of this process to what `max_connections(asked)` need, which the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections(asked) + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def print_error(message: str) -> None:
    """Write one line to stderr, if there is room."""
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(f"attention-service: {message}") + "\n")
        sys.stderr.flush()


def set_nonblocking(descriptor: int) -> bool:
    """Make a write to this stream fail instead of waiting for a reader; return False if only a Relay can do that.

    O_NONBLOCK belongs to the open file, which a shell and other programs share. So a pipe is opened once more for this process
    alone. A file or a device like /dev/null makes no write wait. A non-blocking terminal could take only a part of a line.
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode):
        return not (stat.S_ISSOCK(mode) or os.isatty(descriptor))
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # another user's pipe (after sudo), or no /proc
        return False
    os.dup2(own, descriptor)
    os.close(own)
    return True


def unbuffer_streams() -> None:
    """Keep no unwritten text in Python's own streams: they would retry it at exit and make the exit code 120."""
    for name, descriptor in (("stdout", STDOUT), ("stderr", STDERR)):
        raw = io.FileIO(descriptor, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True))


class Relay:
    """Replaces a stream by a non-blocking pipe; a thread copies the pipe to the stream and may wait."""

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
        room = select.poll()
        room.register(self._target, select.POLLOUT)
        with contextlib.suppress(OSError):
            while data := os.read(self._source, 2**16):
                while data:
                    room.poll()  # the stream may have been non-blocking before
                    data = data[os.write(self._target, data) :]
        os.close(self._source)  # the reader is gone: from now on each write to the pipe fails

    def close(self) -> None:
        """Restore the stream after the last child has ended, and wait at most FINISH_S until the rest of the pipe is copied."""
        os.dup2(self._target, self._descriptor)
        self._thread.join(FINISH_S)


@contextlib.contextmanager
def nonblocking_streams() -> Iterator[None]:
    """Make stdout and stderr non-blocking, for children too; at the end, waiting lines get FINISH_S to be read."""
    relays = [Relay(descriptor) for descriptor in (STDOUT, STDERR) if not set_nonblocking(descriptor)]
    unbuffer_streams()
    try:
        yield
    finally:
        _log.finish()
        for relay in relays:
            relay.close()


class Posix:
    """Children, signals and time of this process. An instance takes over SIGNALS until the process ends."""

    def __init__(self) -> None:
        self._signalled, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for signum in SIGNALS:
            # It does nothing, because Python has written the number into the wake-up pipe. Set it even if our parent ignored the
            # signal: with SIGCHLD ignored, a child's exit is never reported.
            signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def spawn(self, command: Sequence[str]) -> tuple[int, Channel]:
        """Start a child, with the number of its end of the channel as `--channel`; return its pid and our end.

        It uses posix_spawn, so that no Python runs between fork and exec: the C library sets signal mask and dispositions.
        """
        ours, its = socket.socketpair()
        with its:
            its.set_inheritable(True)
            arguments = [*command, "--channel", str(its.fileno())]
            try:
                pid = os.posix_spawn(command[0], arguments, os.environ, setpgroup=0, setsigmask=(), setsigdef=SIGNALS)
            except OSError:
                ours.close()
                raise
        return pid, Channel(ours, MAX_WORKER_BYTES)

    def kill(self, pid: int, signum: int) -> None:
        # A child's pid is not reused before the child is reaped.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def reap(self) -> Iterator[tuple[int, int]]:
        """Yield each child that ended: its pid and its exit code (negative: the signal). PID 1 also gets adopted ones."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                yield pid, os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)

    def wait(self, timeout_s: float | None, channels: Sequence[Channel]) -> int | None:
        """Return the next signal; None if a channel has something to do, or `timeout_s` passed first."""
        _log.flush()  # retries lines that found no room
        events = select.poll()
        events.register(self._signalled, select.POLLIN)
        for channel in channels:
            events.register(channel, select.POLLIN | (select.POLLOUT if channel.is_full else 0))
        ready = dict(events.poll(None if timeout_s is None else timeout_s * 1000))
        return os.read(self._signalled, 1)[0] if self._signalled in ready else None

    now = staticmethod(time.monotonic)


def write_text(text: str) -> None:
    """Write whole lines to stdout without waiting for a reader."""
    _log.write(text.encode())


def write_log_line(level: str, event: str, **fields: object) -> None:
    """Write one line to stdout without waiting for a reader."""
    _log.write(log_line(level, event, **fields))
