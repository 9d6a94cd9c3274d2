"""Processes: ports, descriptors, child processes and signals, as the supervisor uses them."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.supervisor.processes import (
    DEFAULT_MAX_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    Relay,
    StartError,
    max_connections,
    print_error,
    raise_descriptor_limit,
    reserve_port,
    set_nonblocking,
)
from tests.processes import eventually, openpty


def test_port_zero_reserves_a_free_port_that_reusable_listeners_may_take():
    with reserve_port("127.0.0.1", 0) as reserved, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(reserved.getsockname())
        listener.listen()
        with socket.create_connection(reserved.getsockname(), timeout=5) as client:
            accepted, address = listener.accept()
            accepted.close()
            assert address == client.getsockname(), "the reserving socket takes no connection"


def test_a_reserved_port_cannot_be_reserved_again():
    with reserve_port("127.0.0.1", 0) as reserved, pytest.raises(StartError) as refusal:
        reserve_port("127.0.0.1", reserved.getsockname()[1])
    assert refusal.value.message.endswith("Address already in use")


def test_a_foreign_listener_is_detected_even_with_reuseport():
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with pytest.raises(StartError):
            reserve_port("127.0.0.1", stranger.getsockname()[1])


@pytest.mark.parametrize("host", ["203.0.113.7", "no host at all", "127..0.0.1", "a" * 64])
def test_a_foreign_address_is_one_line(host):
    with pytest.raises(StartError) as refusal:
        reserve_port(host, 0)
    assert refusal.value.message.startswith(f"cannot listen on {host} port 0: ")
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("wanted", "descriptors", "kept"),
    [
        (0, 1024, 1024 - RESERVED_DESCRIPTORS),
        (0, 2**20, DEFAULT_MAX_CONNECTIONS),
        (0, resource.RLIM_INFINITY, DEFAULT_MAX_CONNECTIONS),
        (50_000, resource.RLIM_INFINITY, 50_000),
        (50_000, 2**20, 50_000),
        (864, 1024, 864),
        (0, RESERVED_DESCRIPTORS + 1, 1),
    ],
)
def test_the_number_of_connections_fits_the_descriptors(monkeypatch, wanted, descriptors, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, descriptors))
    assert max_connections(wanted) == kept


@pytest.mark.parametrize(("wanted", "descriptors"), [(865, 1024), (0, RESERVED_DESCRIPTORS), (10**6, 10**6)])
def test_more_connections_than_descriptors_refuse_the_start(monkeypatch, wanted, descriptors):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, descriptors))
    with pytest.raises(StartError, match=r"^ATTENTION_MAX_CONNECTIONS: .* need .* file descriptors"):
        max_connections(wanted)


@pytest.mark.parametrize(
    ("soft", "asked", "found"),
    [
        (700, 200, 700),
        (700, 640, 800),
        (700, 1000 - RESERVED_DESCRIPTORS, 1000),
        (700, 0, 1000),
        (resource.RLIM_INFINITY, 640, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_of_descriptors_is_raised_as_far_as_needed(monkeypatch, soft, asked, found):
    limits = [(soft, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_descriptor_limit(asked)
    assert limits[-1] == (found, 1000)


@pytest.fixture
def descriptors():
    """Yield a list of descriptors, and close them at the end of the test."""
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def fill(descriptor: int) -> int:
    """Write until the descriptor would block; return the number of bytes."""
    number = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            number += os.write(descriptor, b"x" * 1000)
    return number


def test_a_pipe_is_non_blocking_only_in_this_process(descriptors):
    source, theirs = os.pipe()
    ours = os.dup(theirs)
    descriptors += [source, theirs, ours]
    assert set_nonblocking(ours)
    assert fill(ours) > 0
    assert os.get_blocking(theirs)


def test_a_file_and_a_device_stay_unchanged(tmp_path):
    """Opening a file again would write from its start."""
    with (tmp_path / "out.log").open("wb", buffering=0) as file:
        file.write(b"12")
        assert set_nonblocking(file.fileno())
        file.write(b"3")
    assert (tmp_path / "out.log").read_bytes() == b"123"
    for path in ("/dev/null", "/dev/full"):
        with Path(path).open("wb", buffering=0) as file:
            assert set_nonblocking(file.fileno())
            assert os.get_blocking(file.fileno())


def test_a_socket_and_a_pipe_of_another_user_stay_blocking(descriptors, monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        assert not set_nonblocking(one.fileno())
    descriptors += os.pipe()
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError))
    assert not set_nonblocking(descriptors[1])


def test_a_terminal_stays_blocking(descriptors):
    descriptors += openpty()
    assert not set_nonblocking(descriptors[1]), "it would take a part of a line"


def test_lines_for_a_socket_go_through_a_non_blocking_pipe(descriptors):
    target, reader = socket.socketpair()
    with target, reader:
        stream = os.dup(target.fileno())
        descriptors.append(stream)
        relay = Relay(stream)
        written = fill(stream)
        assert target.getblocking()
        got = b""
        while len(got) < written:
            got += reader.recv(2**16)
        os.write(stream, b"the last")
        relay.close()
        assert reader.recv(100) == b"the last"
        os.write(stream, b"as it was")
        assert reader.recv(100) == b"as it was"


def test_a_relay_reports_a_lost_reader(descriptors):
    target, reader = socket.socketpair()
    reader.close()
    with target:
        stream = os.dup(target.fileno())
        descriptors.append(stream)
        relay = Relay(stream)
        os.write(stream, b"lost")
        with pytest.raises(BrokenPipeError):
            eventually(lambda: not os.write(stream, b"and known to be"), "a write fails")
        relay.close()


def test_a_relay_with_a_stalled_reader_does_not_delay_the_end(descriptors):
    target, reader = socket.socketpair()
    with target, reader:
        stream = os.dup(target.fileno())
        descriptors.append(stream)
        target.setblocking(False)
        written = fill(stream)
        relay = Relay(stream)
        written += fill(stream)
        relay.close()
        while written:  # what waited still arrives
            written -= len(reader.recv(2**16))


NO_ROOM = """
import os, sys, warnings
from service.supervisor.processes import print_error, set_nonblocking, unbuffer_streams, write_log_line
print("0")
source, end = os.pipe()
sys.stdout.flush()
os.dup2(end, 1), os.dup2(end, 2)
assert set_nonblocking(1) and set_nonblocking(2)
unbuffer_streams()
try:
    while True:
        os.write(1, b"x" * 4096)
except BlockingIOError:
    pass
print("nobody reads this")
print_error("nor this")
warnings.warn("nor this")
write_log_line("info", "nor_this")
sys.exit(3)
"""


def test_a_process_with_unread_output_exits_with_its_own_code():
    """Python flushes its buffer again at exit; if that fails, the exit code is 120."""
    assert subprocess.run([sys.executable, "-c", NO_ROOM], timeout=60, check=False).returncode == 3


CHILD = """
import os, signal
ignored = [s for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD) if signal.getsignal(s) is signal.SIG_IGN]
print(not ignored and signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), os.getpgid(0) == os.getpid())
"""
PARENT = f"""
import os, signal, sys
from service.supervisor.processes import Posix
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
system = Posix()
pid, channel = system.spawn([sys.executable, "-c", {CHILD!r}])
print(system.wait(30, []) == signal.SIGCHLD, list(system.reap()) == [(pid, 0)], system.wait(0, []))
os.kill(os.getpid(), signal.SIGTERM)
print(system.wait(None, []) == signal.SIGTERM, os.get_inheritable(channel.fileno()), list(system.reap()))
"""
CHANNELS = """
import dataclasses, os, signal, sys
from service.supervisor.processes import Posix
@dataclasses.dataclass
class Message:
    text: str
system = Posix()
child = "import os, sys; fd = int(sys.argv[2]); os.write(fd, b'1\\\\n2\\\\n'); os.read(fd, 99); os.write(fd, b'3\\\\n')"
(first, one), (second, two) = (system.spawn([sys.executable, "-c", child]) for _ in range(2))
def received(channel, last):
    found = None
    while found != last and not channel.is_ended:
        system.wait(30, [channel])
        found = channel.receive() or found
        channel.flush()
    return found, channel.is_ended
print(received(one, 2)[0], received(two, 2)[0])
one.send(Message("go on"))
print(received(one, "end"))  # the other child does not hold its end
two.send(Message("x" * 10**6))
print(received(two, "end"))
"""
THREADED = """
import os, signal, threading
from service.supervisor.processes import Posix
end = threading.Event()
threading.Thread(target=end.wait).start()  # as a library's that was imported first
system = Posix()
for _ in range(200):
    os.kill(os.getpid(), signal.SIGTERM)
    assert system.wait(30, []) == signal.SIGTERM
end.set()
"""


def test_a_child_starts_in_its_own_group_with_no_signal_blocked_and_its_end_wakes_the_parent():
    done = subprocess.run([sys.executable, "-c", PARENT], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True"] * 4 + ["None", "True", "False", "[]"]


def test_a_signal_is_kept_until_the_next_wait_with_any_threads():
    subprocess.run([sys.executable, "-c", THREADED], check=True, timeout=60)


def test_each_child_has_a_channel_of_its_own_which_ends_with_it():
    done = subprocess.run([sys.executable, "-c", CHANNELS], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["2 2", "(3, True)", "(3, True)"]


def test_the_reason_of_a_refused_start_is_one_line_without_controls(capfd):
    print_error('layer "small": the file says \x1b[2J\nattention-service: all is well')
    line = 'attention-service: layer "small": the file says \\x1b[2J\\nattention-service: all is well\n'
    assert capfd.readouterr() == ("", line)
