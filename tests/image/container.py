"""A container of the image under test, as an engine runs it: docker, or podman, whose commands are the same.

`make image-test` makes the image and sets ENGINE and IMAGE. The network is this machine's, on loopback, so that no engine's
bridge is needed; everything else is what docs/container.md recommends.
"""

import json
import os
import subprocess
import uuid
from pathlib import Path

import httpx2

from tests import processes
from tests.e2e.namespace import members

ENGINE, IMAGE = os.environ.get("ENGINE", "docker"), os.environ.get("IMAGE", "attention-service:latest")
HARDENED = (
    "--read-only",
    "--tmpfs=/tmp:size=64m",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--pids-limit=128",
)
SIZED = ("--cpus=2", "--memory=2g")


def engine(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([ENGINE, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 or not check, f"{ENGINE} {' '.join(arguments)}: {done.stderr}"
    return done


class Container:
    def __init__(
        self, layers: Path | str | None, *options: str, port: int | None = None, limits: tuple[str, ...] = SIZED
    ) -> None:
        self.name = f"attention-{uuid.uuid4().hex[:12]}"
        self.port = port or processes.free_port()
        network = (
            ("--network=host", "--env=ATTENTION_HOST=127.0.0.1", f"--env=ATTENTION_PORT={self.port}")
            if port is None
            else ()
        )
        # Podman makes /run and /var/tmp writable by default; docker never does.
        plain = ("--read-only-tmpfs=false",) if ENGINE == "podman" else ()
        mount = () if layers is None else (f"--volume={layers}:/layers:ro",)
        engine("run", "--detach", f"--name={self.name}", *network, *HARDENED, *plain, *limits, *mount, *options, IMAGE)
        self.pid = int(self.inspect("{{.State.Pid}}"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inspect(self, template: str) -> str:
        return engine("inspect", "--format", template, self.name).stdout.strip()

    def health(self) -> subprocess.CompletedProcess[str]:
        """The image's own health check, word for word as the engine runs it."""
        kind, *command = json.loads(self.inspect("{{json .Config.Healthcheck.Test}}"))
        assert kind == "CMD", "no shell is started"
        return engine("exec", self.name, *command, check=False)

    def wait_healthy(self) -> None:
        processes.eventually(lambda: self.health().returncode == 0, f"{self.name} is ready: {self.logs()}", within_s=60)

    def pids(self) -> list[int]:
        return members(self.pid)

    def samples(self) -> dict[str, float]:
        return processes.samples(httpx2.get(f"{self.url}/metrics").text)

    def logs(self) -> str:
        told = engine("logs", self.name, check=False)
        return told.stdout + told.stderr

    def stop(self, within_s: int) -> int:
        """SIGTERM, and after so many seconds SIGKILL; the exit code."""
        engine("stop", "--time", str(within_s), self.name)
        return int(self.inspect("{{.State.ExitCode}}"))

    def remove(self) -> None:
        engine("rm", "--force", self.name)
