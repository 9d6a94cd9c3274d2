"""How `serve` starts: in a terminal for a person, elsewhere for a program, and with many descriptors of its parent."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from service.api.auth.key_ring import Role, line_for
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare
from tests.processes import environment, eventually, openpty

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
NEEDS_PROGRAMS = pytest.mark.skipif(
    not all(map(shutil.which, ("curl", "openssl"))), reason="curl or openssl is not installed"
)
KEY = "the-key-of-a-test"

# Opens descriptors up to that number, and becomes the command that follows.
INHERITED = """
import os, resource, sys
number, command = int(sys.argv[1]), sys.argv[2:]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(number + 500, 4096),) * 2)
while os.dup(0) < number - 1:
    pass
for descriptor in range(3, number):
    os.set_inheritable(descriptor, True)
os.execv(command[0], command)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [1100, 4000])
def test_descriptors_that_a_parent_leaves_open_change_nothing(tmp_path, number):
    """select takes no descriptor above 1,023."""
    prepare(tmp_path, LAYERS[:1])
    before = (sys.executable, "-c", INHERITED, str(number))
    service = Started(tmp_path / "layers", before=before, workers=2, heartbeat_s=0.2)
    try:
        service.wait_ready()
        assert service.attend().status_code == 200
        service.process.terminate()
        assert service.process.wait(30) == 0
        assert service.line(event="stopped")["exit_code"] == 0
    finally:
        service.end()


class Terminal:
    """`serve` in a terminal, and what that shows."""

    def __init__(self, *command, env) -> None:
        self._master, end = openpty()
        self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env)
        os.close(end)
        self._shown = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # no process has the other end
            while data := os.read(self._master, 2**16):
                self._shown += data

    @property
    def text(self) -> str:
        return self._shown.decode().replace("\r\n", "\n")

    def shows(self, pattern: str) -> re.Match[str]:
        eventually(lambda: re.search(pattern, self.text), f"{pattern} is shown: {self.text}", within_s=60)
        return next(re.finditer(pattern, self.text))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


@contextlib.contextmanager
def terminal(folder, *options, before=(), env=None, **settings):
    """A service over the layers of `folder`."""
    (folder / "layers").mkdir(exist_ok=True)
    command = [*before, sys.executable, "-m", "service", "serve", "--port", "0", "--layers-dir", folder / "layers"]
    given = {"TERM": "xterm", **environment(workers=1, **settings), **(env or {})}
    shown = Terminal(*map(str, [*command, *options]), env=given)
    try:
        yield shown
    finally:
        if shown.process.poll() is None:
            shown.process.kill()
        shown.process.wait()


def asked(shown: Terminal, **variables: str) -> dict:
    """The answer to the printed command, run as it is printed."""
    command = shown.shows(r"ask with: (.*)\n")[1]
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    answer = json.loads(done.stdout)
    assert "output" in answer, answer
    found: dict = answer
    return found


@NEEDS_PROGRAMS
@pytest.mark.parametrize(
    "layers",
    [pytest.param([], marks=pytest.mark.long), LAYERS[:1], pytest.param(LAYERS, marks=pytest.mark.long)],
    ids=["none", "one", "cross"],
)
def test_a_terminal_shows_address_layers_and_a_question_that_works_and_then_a_line_an_event(tmp_path, layers):
    prepare(tmp_path, layers)
    with terminal(tmp_path, env={"NO_COLOR": "1"}) as shown:
        answer = asked(shown)
        assert answer["layer"]["name"] == "sdpa"
        shown.shows("request .* status=200 ")
        assert shown.stop() == 0
        warnings = [] if layers else [r"\d\d:\d\d:\d\d \[warning  \] no_layers .*"]
        names = "".join(f", {layer.name}" for layer in sorted(layers, key=lambda layer: layer.name))
        expected = [
            *warnings,
            r"attention-service \S+ starts on (http://127\.0\.0\.1:\d+)",
            rf"ready: it serves attention without a layer{names}",
            r"open http://127\.0\.0\.1:\d+/explore, ask with: curl .*",
        ]
        lines = shown.text.splitlines()
        assert all(map(re.fullmatch, expected, lines)), lines
        events = lines[len(expected) :]
        assert {"request", "stopping", "draining", "left", "worker_left", "stopped"} <= {x.split()[3] for x in events}
        assert all(re.match(r"\d\d:\d\d:\d\d \[(info|warning) +\] \w+", event) for event in events)
        assert "\x1b" not in shown.text


@pytest.mark.long
def test_a_terminal_has_colours_and_no_text_of_a_caller_controls_it(tmp_path):
    prepare(tmp_path, LAYERS[:1])
    with terminal(tmp_path) as shown:
        url = shown.shows(r"open (\S+)/explore")[1]
        words = ["curl", "-s", "-X", "POST", f"{url}/v1/layers/%1b%5b2J%0aforged/attend?%1b", "-d", "\x1b[2J"]
        subprocess.run([*words, "-H", "X-Request-Id: \x9b2J", "-H", "Content-Type: \x1b]0;t\x07"], check=True)
        shown.shows(r"\x1b\[\d+mrequest ")
        assert shown.stop() == 0
        plain = re.sub(r"\x1b\[\d+m", "", shown.text)
        assert all(line.isprintable() for line in plain.splitlines())


@NEEDS_PROGRAMS
@pytest.mark.long
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost"])
def test_the_address_is_one_that_opens(tmp_path, host):
    prepare(tmp_path, LAYERS[:1])
    with terminal(tmp_path, "--host", host, docs=False) as shown:
        where = {"0.0.0.0": "127.0.0.1", "localhost": "localhost"}.get(host, r"\[::1\]")
        shown.shows(rf"starts on http://{where}:\d+\n")
        asked(shown)
        assert "/docs" not in shown.text, "nothing is there"


@pytest.mark.long
@NEEDS_PROGRAMS
def test_the_question_has_the_key_and_https(tmp_path):
    prepare(tmp_path, LAYERS[:1])
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=api.example"
    subprocess.run(f"{make} -keyout key -out cert", shell=True, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "keys").write_text(line_for(KEY, Role.INFER) + "\n")
    files = dict(api_keys_file=tmp_path / "keys", tls_cert_file=tmp_path / "cert", tls_key_file=tmp_path / "key")
    with terminal(tmp_path, **files) as shown:
        shown.shows(r"starts on https://127\.0\.0\.1:\d+\n")
        asked(shown, KEY=KEY)
        assert KEY not in shown.text


def test_a_layer_that_cannot_be_served_is_not_named_as_served(tmp_path):
    prepare(tmp_path, LAYERS[:1])
    for name in ("a", "$(id) \x1b[2J"):
        shutil.copy(tmp_path / "layers/small.safetensors", tmp_path / f"layers/{name}.safetensors")
    os.truncate(tmp_path / "layers/a.safetensors", 900)
    with terminal(tmp_path, strict_layers=False, env={"NO_COLOR": "1"}) as shown:
        asked(shown)
        shown.shows("ready: it serves attention without a layer, small\n")
        shown.shows("layer_refused .*layer='a'")
        assert "$(id)" not in shown.text
        assert "\x1b" not in shown.text


@pytest.mark.parametrize("log_format", ["json", pytest.param("console", marks=pytest.mark.long)])
def test_the_setting_decides_whatever_stdout_is(tmp_path, log_format):
    prepare(tmp_path, LAYERS[:1])
    with terminal(tmp_path, log_format=log_format) as shown:
        shown.shows('"event":"layers_served"' if log_format == "json" else "ready: it serves .*, small\n")
        assert shown.stop() == 0
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--layers-dir", tmp_path / "layers"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, env=environment(workers=1, log_format=log_format))
    eventually(lambda: re.search("served|ready: it", (tmp_path / "log").read_text()), "it is ready", within_s=60)
    process.terminate()
    assert process.wait(30) == 0
    for text in (shown.text, (tmp_path / "log").read_text()):
        lines = text.splitlines()
        assert {line.startswith("{") for line in lines} == {log_format == "json"}
        assert "stopped" in lines[-1]
    assert "\x1b" not in (tmp_path / "log").read_text(), "no colours in a file"
