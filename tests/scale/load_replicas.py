"""python -m tests.scale.load_replicas [--kill N] [--no-restart] [OPTION…]: `make load-replicas`.

Three replicas of one worker, HAProxy in front of them, and `loadtest/run.sh` with a master and two workers; other options go to
it. Under load N replicas are killed and started again. The exit status is 0 only if the objectives hold and every replica serves
at the end; 4 if one does not, 3 if they or HAProxy do not start. LAYERS_DIR (.layers) and what `loadtest/run.sh` reads come from
the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import processes
from tests.scale.balancer import Balancer
from tests.scale.replicas import Replica, replicas

ROOT = Path(__file__).parents[2]
NUM = 3
# Seconds of load before the kill, from there to the restart, and of load in all: a start takes up to 15 on a busy machine.
BEFORE_S, DOWN_S, LOAD_S = 10, 3, 45
# Until the references are fetched, one request at a time, and more than one caller waits for an answer.
BEGIN_S = 60
RETRIES = 4  # as many as the client makes by default
NOT_READY, NOT_BACK = 3, 4


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale.load_replicas", allow_abbrev=False)
    parser.add_argument("--kill", type=int, default=1, choices=range(NUM + 1))
    parser.add_argument("--no-restart", action="store_true")
    given, options = parser.parse_known_args(arguments)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))  # so that all processes are ended
    layers_dir = Path(os.environ.get("LAYERS_DIR") or ROOT / ".layers")
    with replicas(NUM, layers_dir) as started, Balancer([x.url for x in started]) as balancer:
        say(f"{NUM} replicas are ready behind HAProxy, {balancer.url}")
        with load_test(balancer.url, options) as load:
            victims = dict(zip(balancer.names[: given.kill], started, strict=False))
            before = disturbed(balancer, load, victims, is_restarted=not given.no_restart)
            status = load.wait()
        code, sentence = verdict(status, before, requests(balancer))
    say(sentence)
    return code


@contextlib.contextmanager
def load_test(url: str, options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The running load test, in a session of its own; none of its processes is left at the end."""
    port = str(processes.free_port())
    ports = ("--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port)
    own = ("--processes", "2", "--hold-s", str(LOAD_S), "--retries", str(RETRIES))
    command = [str(ROOT / "loadtest" / "run.sh"), *ports, *own, *options]
    with subprocess.Popen(command, env={**os.environ, "URL": url}, start_new_session=True) as load:
        try:
            yield load
        finally:
            load.terminate()
            load.wait()
            with contextlib.suppress(ProcessLookupError):  # Locust's workers, if their master was ended before them
                os.killpg(load.pid, signal.SIGKILL)


def disturbed(
    balancer: Balancer, load: subprocess.Popen[bytes], victims: Mapping[str, Replica], *, is_restarted: bool
) -> dict[str, int]:
    """Kill the victims under load and start them again; returns the requests of each replica once all of that is over."""

    def busy() -> bool:
        return load.poll() is not None or int(balancer.stats()["BACKEND"]["scur"]) > 1

    processes.eventually(busy, "the load test has begun", BEGIN_S)
    time.sleep(BEFORE_S)
    for name, replica in victims.items():
        replica.kill()
        say(f"{name} is killed")
    time.sleep(DOWN_S)
    for name, replica in victims.items() if is_restarted else ():
        replica.start()
        replica.ready()
        balancer.wait(name, "UP")
        say(f"{name} is back")
    return requests(balancer)


def requests(balancer: Balancer) -> dict[str, int]:
    """How many requests the balancer has sent to each replica."""
    stats = balancer.stats()
    return {name: int(stats[name]["stot"]) for name in balancer.names}


def verdict(status: int, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[int, str]:
    """The exit status and its sentence, from the load test's status and the requests of each replica after the last restart."""
    shares = ", ".join(f"{name} {num - before[name]}" for name, num in after.items())
    idle = [name for name, num in after.items() if num <= before[name]]
    if status:
        return max(status, 1), f"FAILED: the load test ended with {status}; requests after the restart: {shares}"
    if idle:
        return NOT_BACK, f"FAILED: the objectives held, but at the end {' and '.join(idle)} served nothing"
    return 0, f"passed: the objectives held with replicas killed; requests after the restart: {shares}"


def say(sentence: str) -> None:
    sys.stderr.write(f"load-replicas: {sentence}\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AssertionError as error:
        say(f"FAILED: {error}")
        sys.exit(NOT_READY)
