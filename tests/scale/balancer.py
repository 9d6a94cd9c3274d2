"""Balancer: the real haproxy with deploy/haproxy/haproxy.cfg, in front of up to three addresses."""

from __future__ import annotations

import csv
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests import processes

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"


def haproxy() -> str:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    assert program, "haproxy is not installed: apt-get install haproxy"
    return program


class Balancer:
    """A context manager; `urls` are those of the replicas, named replica1 and so on; `env` has further variables of the cfg.

    It is entered once all of them have this status.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        configuration: Path = CONFIGURATION,
        env: dict[str, str] | None = None,
        status: str = "UP",
    ) -> None:
        self._first_status = status
        self._directory = tempfile.TemporaryDirectory(prefix="balancer-")
        self._port, metrics_port = processes.free_port(), processes.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._socket = f"{self._directory.name}/socket"
        self._command = [haproxy(), "-db", "-f", str(configuration)]
        named = {f"REPLICA_{number}": url.removeprefix("http://") for number, url in enumerate(urls, 1)}
        own = {
            "BALANCER_BIND": f"127.0.0.1:{self._port}",
            "BALANCER_METRICS_BIND": f"127.0.0.1:{metrics_port}",
            "BALANCER_SOCKET": self._socket,
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("REPLICA", "BALANCER"))}
        self._env = clean | own | named | (env or {})
        self.names = tuple(f"replica{number}" for number in range(1, len(urls) + 1))

    def __enter__(self) -> Self:
        self._log = (Path(self._directory.name) / "log").open("w+")
        self._process = subprocess.Popen(self._command, env=self._env, stdout=self._log, stderr=self._log)
        try:
            processes.eventually(lambda: self._has_begun(), "haproxy listens")
            for name in self.names:
                self.wait(name, self._first_status)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._directory.cleanup()

    def log(self) -> str:
        return (Path(self._directory.name) / "log").read_text(encoding="utf-8", errors="replace")

    def command(self, text: str) -> str:
        """The answer of the runtime socket, as to `set server attention/replica1 weight 10`."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(self._socket)
            link.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: link.recv(2**16), b"")).decode()

    def stats(self) -> dict[str, dict[str, str]]:
        """The fields of `show stat` of each server and of BACKEND: status, stot, wretr, wredis, hrsp_5xx and so on."""
        rows = csv.DictReader(self.command("show stat").removeprefix("# ").splitlines())
        return {row["svname"]: row for row in rows if row["pxname"] == "attention"}

    def status(self, name: str) -> str:
        """UP, DOWN or NOLB; `UP 1/2` is UP. INI before the first check."""
        row = self.stats()[name]
        return "INI" if "INI" in row["check_status"] else row["status"].split()[0]

    def wait(self, name: str, status: str, within_s: float = 20) -> None:
        processes.eventually(lambda: self.status(name) == status, f"{name} is {status}", within_s)

    def _has_begun(self) -> bool:
        assert self._process.poll() is None, self.log()
        return Path(self._socket).exists() and bool(self.stats())
