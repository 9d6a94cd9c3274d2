"""Settings: read once, refused with the variable's name, handed on to child processes."""

from pathlib import Path

import pytest

from service import settings
from service.commands.serve import num_workers
from service.settings import SettingsError, child_environment, load_settings, usable_cores


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in settings.Settings.model_fields:
        monkeypatch.delenv(f"ATTENTION_{name.upper()}", raising=False)


def test_the_command_line_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("ATTENTION_PORT", "9001")
    assert load_settings().port == 9001
    assert load_settings(port=9002, host=None).port == 9002


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("PORT", "tcp://10.0.0.1:80"),
        ("QUEUE_CAPACITY", "0"),
        ("BODY_TIMEOUT_S", "nan"),
        ("DTYPE", "int8"),
    ],
)
def test_a_value_that_cannot_be_names_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(f"ATTENTION_{name}", value)
    with pytest.raises(SettingsError, match=f"ATTENTION_{name}: "):
        load_settings()


@pytest.mark.parametrize(("wrong", "right"), [("PROT", "PORT"), ("WORKER", "WORKERS"), ("LAYER_DIR", "LAYERS_DIR")])
def test_a_misspelt_variable_is_refused_with_the_right_name(monkeypatch, wrong, right):
    monkeypatch.setenv(f"ATTENTION_{wrong}", "1")
    with pytest.raises(SettingsError, match=f"did you mean ATTENTION_{right}"):
        load_settings()


@pytest.mark.parametrize(
    "name", ["SERVICE_SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP_ADDR", "SERVICE_SERVICE_PORT_HTTP"]
)
def test_what_kubernetes_adds_for_a_service_of_our_name_is_nobodys_business(monkeypatch, name):
    monkeypatch.setenv(f"ATTENTION_{name}", "10.0.0.1")
    load_settings()


def test_a_child_reads_the_same_settings(monkeypatch):
    given = load_settings(port=1234, layers_dir=Path("some where"), exact=True)
    for name, value in child_environment(given).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == given


def test_workers_are_as_set_else_one_a_core_over_the_threads_of_each(monkeypatch):
    monkeypatch.setattr("service.commands.serve.usable_cores", lambda: 8)
    assert num_workers(load_settings(workers=3)) == 3
    assert num_workers(load_settings(device="cpu")) == 8
    assert num_workers(load_settings(device="cpu", compute_threads=3)) == 2
    assert num_workers(load_settings(device="cpu", compute_threads=99)) == 1


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 6), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 6), ("junk", 6)]
)
def test_a_cpu_quota_lowers_the_number_of_usable_cores(monkeypatch, text, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert usable_cores() == cores
