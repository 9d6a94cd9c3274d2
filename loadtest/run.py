"""`make load`: the load test against a service that is started for it, or against `--url`; prints the verdict, leaves reports.

Laws: nothing but the standard library, since it starts programs of two environments; what it started it ends, whatever happens;
its exit status is the verdict's. Options that it does not know are the load test's (`loadtest/README.md`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READY_S = 120.0
GRACE_S = 40.0


class NotReady(Exception):
    """The service ended or did not become ready in time."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make load", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="", help="a running service; empty = start one")
    parser.add_argument("--layers-dir", default=str(ROOT / ".layers"))
    parser.add_argument("--service", default=str(ROOT / ".venv/bin/attention-service"))
    parser.add_argument("--locust", default=str(ROOT / ".venv-load/bin/locust"))
    parser.add_argument("--reports", type=Path, default=ROOT / "reports")
    given, rest = parser.parse_known_args(arguments)
    given.reports.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.nullcontext(given.url) if given.url else started(given.service, given.layers_dir) as url:
            return load(given.locust, url, given.layers_dir, given.reports, rest)
    except NotReady as error:
        print(f"make load: {error}", file=sys.stderr)  # noqa: T201
        return 3


def load(locust: str, url: str, layers_dir: str, reports: Path, rest: list[str]) -> int:
    """Headless with all three reports, unless the options say otherwise: later ones win."""
    command = [
        *(locust, "-f", str(ROOT / "loadtest/locustfile.py"), "--headless", "--only-summary", "--host", url),
        *("--html", str(reports / "load.html"), "--csv", str(reports / "load")),
        *("--json-report", str(reports / "load.json"), "--layers-dir", layers_dir),
        *rest,
    ]
    status = subprocess.run(command, check=False).returncode  # noqa: S603 (our own programs)
    print(f"reports: {reports}/load.html, load.json, load_*.csv")  # noqa: T201
    return status


@contextlib.contextmanager
def started(service: str, layers_dir: str) -> Iterator[str]:
    """A service of our own on a free port of loopback; its log goes to stderr where it says more than info."""
    command = [service, "serve", "--host", "127.0.0.1", "--port", "0", "--layers-dir", layers_dir]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    port: list[int] = []
    is_told = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            told = json.loads(line)
            if told["event"] == "serving":
                port.append(told["port"])
                is_told.set()
            if told["level"] not in {"debug", "info"}:
                print(line, end="", file=sys.stderr)  # noqa: T201
        is_told.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not is_told.wait(READY_S) or not port:
            raise NotReady("the service did not start")
        url = f"http://127.0.0.1:{port[0]}"
        wait_ready(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):  # refused, or a 503
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()  # noqa: S310 (an address of our own)
            return
        time.sleep(0.1)
    raise NotReady(
        "the service ended before it was ready" if process.poll() is not None else "the service is not ready"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
