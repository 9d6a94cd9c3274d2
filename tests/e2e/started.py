"""The real service in a process of its own, with its log lines as they come."""

import json
import subprocess
import sys
import threading

import httpx2

from tests import processes

X = {"query": [[0.5] * 16, [0.25] * 16]}


class Started:
    """`serve` over a directory of small layers, with its log lines as they come."""

    def __init__(self, directory, *, program=("-m", "service"), before=(), environment=None, **settings) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, *map(str, program), "serve", "--port", "0", "--layers-dir", str(directory)],
            env=processes.environment(**settings) | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict] = []
        self.texts: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.texts.append(line)
                self.lines.append(json.loads(line))
                self._news.notify_all()

    def line(self, **wanted) -> dict:
        """The first line with these fields, waited for."""
        with self._news:
            assert self._news.wait_for(lambda: self.find(**wanted), 60), f"no line {wanted}"
        return self.find(**wanted)[0]

    def find(self, **wanted) -> list[dict]:
        return [line for line in self.lines if wanted.items() <= line.items()]

    @property
    def port(self) -> int:
        return int(self.line(event="serving", host="127.0.0.1")["port"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        url = self.url
        processes.eventually(lambda: processes.is_ready(url), "the service is ready", within_s=60)

    def attend(self) -> httpx2.Response:
        return httpx2.post(f"{self.url}/v1/layers/small/attend", json=X)

    def samples(self) -> dict[str, float]:
        return processes.samples(httpx2.get(f"{self.url}/metrics").text)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
