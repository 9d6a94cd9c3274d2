"""The service as a container has it, without an engine: PID 1 of its own namespace, a read-only root, no capability.

Bubblewrap makes the box. Its root is this machine's, read-only, so that the interpreter and the service are the ones under
test; the user is another inside and this one outside. The image itself, on a real engine, is tried by tests/image.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import processes
from tests.e2e.namespace import members

ROOT = Path(__file__).parents[2]
BWRAP = (
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/run", "--chdir", "/",
    "--unshare-pid", "--unshare-ipc", "--unshare-user", "--uid", "10001", "--gid", "10001", "--cap-drop", "ALL",
    "--as-pid-1", "--new-session", "--die-with-parent",
)  # fmt: skip


class Boxed:
    """`serve` over a directory of layers in a box, or another `command` of the service."""

    def __init__(self, layers: Path, *command: str, **environment: str) -> None:
        # What the tmpfs would hide where a checkout or an interpreter is in /tmp.
        seen = [word for path in (ROOT, sys.prefix, sys.base_prefix) for word in ("--ro-bind", str(path), str(path))]
        told, tell = os.pipe()
        box = (*BWRAP, *seen, "--ro-bind", str(layers), "/tmp/layers", "--info-fd", str(tell), "--")
        self.process = subprocess.Popen(
            [*box, sys.executable, "-m", "service", *(command or ("serve",))],
            pass_fds=(tell,),
            env=processes.environment(layers_dir="/tmp/layers", port=0) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(tell)
        with os.fdopen(told) as info:
            self.pid: int = json.loads(info.read())["child-pid"]

    def wait_ready(self) -> str:
        """Its URL."""
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        port = next(line["port"] for line in map(json.loads, lines) if line["event"] == "serving")
        url = f"http://127.0.0.1:{port}"
        processes.eventually(lambda: processes.is_ready(url), "the service is ready", within_s=60)
        return url

    def pids(self) -> list[int]:
        return members(self.pid)

    def stop(self) -> tuple[int, str]:
        """What `docker stop` does: SIGTERM to PID 1. The exit code, and what was said until then."""
        os.kill(self.pid, signal.SIGTERM)
        said, _ = self.process.communicate(timeout=40)
        return self.process.returncode, said

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()  # its child dies with it, and the namespace with that
        self.process.communicate()
