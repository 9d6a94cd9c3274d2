"""`make load`: the load test against a service that is started for it, or against `--url`; prints the verdict, leaves reports.

Laws: run by the service's Python, and nothing but the standard library: it starts programs of two environments; what it
started it ends, whatever happens, SIGTERM and Ctrl-C too; its exit status is the verdict's, 3 where there was no service to ask
(make turns each that is not 0 into 2); a report that lies there is of this run. Options that it does not know are the load
test's (`loadtest/README.md`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
READY_S = 120.0
GRACE_S = 40.0
# What a run leaves in the directory of reports; those of earlier runs go before it begins.
TABLES = ("stats", "stats_history", "failures", "exceptions")
REPORTS = ("load.html", "load.json", *(f"load_{name}.csv" for name in TABLES))


class NotReady(Exception):
    """The service ended or did not become ready in time."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make load", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="", help="a running service; empty = start one")
    parser.add_argument("--layers-dir", default=str(ROOT / ".layers"))
    parser.add_argument("--locust", default=str(ROOT / ".venv-load/bin/locust"))
    parser.add_argument("--reports", type=Path, default=ROOT / "reports")
    given, rest = parser.parse_known_args(arguments)
    given.reports.mkdir(parents=True, exist_ok=True)
    for report in found(given.reports):
        report.unlink()
    signal.signal(signal.SIGTERM, leave)
    service = (
        contextlib.nullcontext(given.url) if given.url else started(given.layers_dir, given.reports / "service.log")
    )
    try:
        with service as url:
            return load(given.locust, url, given.layers_dir, given.reports, rest)
    except NotReady as error:
        print(f"make load: {error}; see {given.reports}/service.log", file=sys.stderr)  # noqa: T201
        return 3
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def leave(number: int, _: object) -> NoReturn:
    """Through every `finally` on the way."""
    sys.exit(128 + number)


def found(reports: Path) -> list[Path]:
    return [path for name in REPORTS if (path := reports / name).is_file()]


def load(locust: str, url: str, layers_dir: str, reports: Path, rest: list[str]) -> int:
    """Headless with all three reports, unless the options say otherwise: later ones win."""
    command = [
        *(locust, "-f", str(ROOT / "loadtest/locustfile.py"), "--headless", "--only-summary", "--host", url),
        *("--html", str(reports / "load.html"), "--csv", str(reports / "load")),
        *("--json-report", str(reports / "load.json"), "--layers-dir", layers_dir),
        *rest,
    ]
    with ended(subprocess.Popen(command)) as process:  # noqa: S603 (our own programs)
        status = process.wait()
    print(f"reports: {', '.join(map(str, found(reports))) or 'none'}", flush=True)  # noqa: T201
    return status


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which does not outlive the block."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:  # a second signal ends the waiting, not the law
            process.kill()
            process.wait()


@contextlib.contextmanager
def started(layers_dir: str, log: Path) -> Iterator[str]:
    """A service of our own on a free port of loopback. Its log goes to a file: a pipe that nobody empties would stop it."""
    command = [
        sys.executable,
        "-m",
        "service",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--layers-dir",
        layers_dir,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603
    with ended(process):
        yield wait_ready(process, log)


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address, once every layer has answered."""
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        if port := port_in(log):
            url = f"http://127.0.0.1:{port}"
            with contextlib.suppress(OSError):  # refused, or a 503
                urllib.request.urlopen(f"{url}/readyz", timeout=5).close()  # noqa: S310 (an address of our own)
                return url
        time.sleep(0.1)
    raise NotReady(
        "the service ended before it was ready" if process.poll() is not None else "the service is not ready"
    )


def port_in(log: Path) -> int | None:
    for line in log.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line half written, or one that is not the log's
            told = json.loads(line)
            if told.get("event") == "serving" and "port" in told:
                return int(told["port"])
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
