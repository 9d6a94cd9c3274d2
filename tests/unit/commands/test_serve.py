"""What a process of the service is given before it serves."""

import json
import sys

import pytest
import torch
import typer

from service import cli
from service import settings as settings_module
from service.attention import heap as memory
from service.commands import serve
from service.observability import logs
from service.settings import load_settings


@pytest.fixture
def served(monkeypatch):
    """The switch interval and whether freed memory was to be kept, as they were when serving began."""
    found: dict[str, object] = {}
    kept: list[bool] = []
    interval = sys.getswitchinterval()

    def run(*_):
        found.update(interval=sys.getswitchinterval(), kept=list(kept))
        return 3

    monkeypatch.setattr(memory, "keep_freed", lambda: kept.append(True))
    monkeypatch.setattr(logs, "configure_logs", lambda level, **_: None)
    monkeypatch.setattr(serve, "_run", run)
    yield found
    sys.setswitchinterval(interval)


def test_a_worker_keeps_freed_memory_and_shares_the_interpreter_quickly(served, tmp_path):
    with pytest.raises(typer.Exit) as ended:
        serve.worker(port=1, slot=0, channel=0, run_dir=tmp_path)
    assert ended.value.exit_code == 3
    assert served["kept"] == [True]
    assert served["interval"] == pytest.approx(serve.SWITCH_INTERVAL_S)


@pytest.mark.parametrize("name", ["nvidia0", "nvidia3", "nvidia12"])
def test_a_gpu_that_torch_can_use_has_one_worker_whatever_its_number(monkeypatch, tmp_path, name):
    """A container on a machine of several GPUs has the device file of its own only."""
    monkeypatch.setattr(serve, "DEVICES", tmp_path)
    monkeypatch.setattr(serve, "version", lambda _: "2.13.0")
    monkeypatch.setattr(settings_module, "usable_cores", lambda: 8)
    for other in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / other).touch()
    given = load_settings(workers=0, compute_threads=2)
    assert serve.num_workers(given) == 4
    assert serve.num_workers(given.model_copy(update={"device": "cuda"})) == 1
    (tmp_path / name).touch()
    assert serve.num_workers(given) == 1
    assert serve.num_workers(given.model_copy(update={"device": "cpu"})) == 4
    monkeypatch.setattr(serve, "version", lambda _: "2.13.0+cpu")
    assert serve.num_workers(given) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU that torch can use")
def test_a_gpu_that_torch_cannot_use_is_said_and_has_a_worker_a_core(monkeypatch, tmp_path, capfd):
    """Here torch cannot, because it was built for the CPU; elsewhere because the driver is too old."""
    monkeypatch.setattr(serve, "DEVICES", tmp_path)
    monkeypatch.setattr(serve, "version", lambda _: "2.13.0")
    monkeypatch.setattr(settings_module, "usable_cores", lambda: 8)
    given = load_settings(workers=0)
    assert serve.without_unusable_gpu(given) is given
    assert not capfd.readouterr().out
    (tmp_path / "nvidia0").touch()
    found = serve.without_unusable_gpu(given)
    assert (found.device, serve.num_workers(found)) == ("cpu", 8)
    line = json.loads(capfd.readouterr().out)
    assert (line["event"], line["level"]) == ("gpu_unusable", "warning")
    assert "CUDA" in line["reason"]
    chosen = given.model_copy(update={"device": "cuda"})
    assert serve.without_unusable_gpu(chosen) is chosen, "its workers refuse to start"


@pytest.mark.parametrize("place", ["none", "file/layers", "file", "a" * 300, "a" * 300 + "/layers"])
def test_a_layer_directory_that_cannot_be_read_is_one_sentence_with_its_path(tmp_path, monkeypatch, capfd, place):
    """The system refuses a name of 300 characters to root too, which may search every directory."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["attention-service", "serve", "--layers-dir", str(tmp_path / place)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (1, "", 1)
    start = f"attention-service: --layers-dir: {tmp_path / place} cannot be read: "
    assert err.startswith(start)


@pytest.mark.parametrize("place", ["/proc/none", "file/inside"])
def test_a_directory_for_fetched_layers_that_cannot_be_written_ends_the_start(tmp_path, monkeypatch, capfd, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["attention-service", "serve", "--layers-dir", str(tmp_path / place)])
    monkeypatch.setenv("ATTENTION_LAYERS_SOURCE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    assert f"--layers-dir: {tmp_path / place} must be writable, because" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("port", "99999", "Input should be less than or equal to 65535"),
        ("workers", "-1", "Input should be greater than or equal to 0"),
        ("dtype", "int8", "Input should be 'float32', 'bfloat16' or 'float16'"),
        ("device", "tpu", "Input should be 'auto', 'cpu' or 'cuda'"),
        ("layers-dir", "none", "none cannot be read: No such file or directory"),
    ],
)
def test_a_value_is_refused_under_the_name_that_the_user_gave_it(tmp_path, monkeypatch, capfd, name, value, fits):
    """As an option it has another name than as a variable."""
    monkeypatch.chdir(tmp_path)
    shown = f"--{name}" if name == "layers-dir" else f"--{name} {value}"
    for words, origin in (([f"--{name}", value], shown), ([], f"ATTENTION_{name.upper().replace('-', '_')}")):
        if not words:
            monkeypatch.setenv(origin, value)
        monkeypatch.setattr(sys, "argv", ["attention-service", "serve", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code, *capfd.readouterr()) == (1, "", f"attention-service: {origin}: {fits}\n")


def test_the_default_of_an_option_is_named_by_the_option(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTENTION_LAYERS_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["attention-service", "serve"])
    with pytest.raises(SystemExit):
        cli.main()
    line = "attention-service: --layers-dir: .layers cannot be read: No such file or directory\n"
    assert capfd.readouterr().err == line
