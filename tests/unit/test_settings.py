"""Settings: read once, refused with the variable's name, handed on to child processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from service import settings
from service.commands.layers import LAYERS_DIR
from service.commands.serve import num_workers
from service.limits import rate_limiter
from service.settings import SettingsError, child_environment, is_loopback, listed, load_settings, usable_cores


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in settings.Settings.model_fields:
        monkeypatch.delenv(f"ATTENTION_{name.upper()}", raising=False)


def test_the_command_line_overrides_the_environment(monkeypatch):
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
        ("RATE_LIMIT_PER_S", "-1"),
        ("RATE_LIMIT_PER_S", "inf"),
        ("RATE_BURST", "-1"),
        ("CORS_ORIGINS", "app.example"),
        ("CORS_ORIGINS", "https://app.example/"),
        ("CORS_ORIGINS", "https://App.example"),
        ("CORS_ORIGINS", "*, https://app.example"),
        ("CORS_ORIGINS", "https://app.example https://b.example"),
        ("CORS_ORIGINS", "null"),
        ("ALLOWED_HOSTS", "https://api.example"),
        ("ALLOWED_HOSTS", "api.example:8000"),
        ("ALLOWED_HOSTS", "10.0.0.1:80"),
        ("ALLOWED_HOSTS", "[::1]:80"),
        ("ALLOWED_HOSTS", "[fe80::1%eth0]"),
        ("ALLOWED_HOSTS", "api.example/path"),
        ("ALLOWED_HOSTS", "api.example b.example"),
        ("ALLOWED_HOSTS", "a*.example"),
        ("ALLOWED_HOSTS", "**"),
        ("ALLOWED_HOSTS", "*."),
        ("ALLOWED_HOSTS", "user@api.example"),
        ("ALLOWED_HOSTS", " , "),
        ("ALLOWED_HOSTS", "good.example, bad_one:"),
    ],
)
def test_an_invalid_value_names_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(f"ATTENTION_{name}", value)
    with pytest.raises(SettingsError, match=f"^ATTENTION_{name}: (?!Value error)"):
        load_settings()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("PROT", "PORT"),
        ("WORKER", "WORKERS"),
        ("LAYER_DIR", "LAYERS_DIR"),
        ("API_KEYS", "API_KEYS_FILE"),
        ("API_KEY", "API_KEYS_FILE"),
        ("CORS_ORIGIN", "CORS_ORIGINS"),
        ("TLS_CERT", "TLS_CERT_FILE"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_right_name(monkeypatch, wrong, right):
    monkeypatch.setenv(f"ATTENTION_{wrong}", "1")
    with pytest.raises(SettingsError, match=f"did you mean ATTENTION_{right}"):
        load_settings()


@pytest.mark.parametrize(
    "name", ["SERVICE_SERVICE_HOST", "SERVICE_PORT", "PORT_8000_TCP_ADDR", "SERVICE_SERVICE_PORT_HTTP"]
)
def test_variables_that_kubernetes_adds_for_a_service_of_our_name_are_ignored(monkeypatch, name):
    monkeypatch.setenv(f"ATTENTION_{name}", "10.0.0.1")
    load_settings()


@pytest.mark.parametrize("service", ["UI", "WORKERS", "DEVICE", "LAYERS", "TRACES"])
def test_the_address_that_kubernetes_adds_for_a_neighbour_is_no_misspelt_setting(monkeypatch, service):
    monkeypatch.setenv(f"ATTENTION_{service}_PORT", "tcp://10.0.0.1:80")
    load_settings()
    monkeypatch.setenv(f"ATTENTION_{service}_PORT", "80")
    with pytest.raises(SettingsError, match="did you mean"):
        load_settings()


@pytest.mark.parametrize("name", ["ATTENTION_CLIENT_KEY", "ATTENTION_URL"])
def test_a_variable_of_the_command_line_is_no_misspelt_setting(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    load_settings()


def test_the_command_line_has_the_default_layer_directory_of_the_settings():
    assert settings.Settings.model_fields["layers_dir"].default == LAYERS_DIR


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        ("https://a.example, http://[::1]:3000,,", ("https://a.example", "http://[::1]:3000")),
        ("chrome-extension://abc", ("chrome-extension://abc",)),
    ],
)
def test_origins_are_a_list_between_commas(text, origins):
    assert listed(load_settings(cors_origins=text).cors_origins) == origins


def test_the_default_burst_is_the_rate_of_one_second():
    def rate(**settings):
        limiter = rate_limiter(load_settings(**settings))
        return limiter and (limiter.rate_per_s, limiter.burst)

    assert rate() is None
    assert rate(rate_limit_per_s=2.5) == (2.5, 3)
    assert rate(rate_limit_per_s=0.1) == (0.1, 1)
    assert rate(rate_limit_per_s=5, rate_burst=2) == (5, 2)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("no such host", True),
    ],
)
def test_A12_a_host_is_loopback_or_open_to_others(host, is_local):
    assert is_loopback(host) is is_local


def test_a_child_reads_the_same_settings(monkeypatch):
    given = load_settings(port=1234, layers_dir=Path("some where"), exact=True)
    for name, value in child_environment(given).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == given


def test_a_child_imports_nothing_from_the_working_directory_unless_the_service_lies_there(monkeypatch, tmp_path):
    root = Path(__file__).parents[2]
    for module in ("service.py", "json.py"):
        (tmp_path / module).write_text("raise SystemExit('imported from the working directory')", encoding="ascii")
    command = [sys.executable, "-m", "service", "--version"]
    for directory, path in ((tmp_path, {"PYTHONPATH": str(root)}), (root, {})):
        monkeypatch.chdir(directory)
        environment = {name: text for name, text in child_environment(load_settings()).items() if name != "PYTHONPATH"}
        subprocess.run(command, env={**environment, **path}, check=True, timeout=60)


def test_workers_are_as_set_or_one_a_core_divided_by_the_threads_of_each(monkeypatch):
    monkeypatch.setattr("service.settings.usable_cores", lambda: 8)
    assert num_workers(load_settings(workers=3)) == 3
    assert num_workers(load_settings(device="cpu")) == 8
    assert num_workers(load_settings(device="cpu", compute_threads=3)) == 2
    assert num_workers(load_settings(device="cpu", compute_threads=99)) == 1


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 6), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 6), ("junk", 6)]
)
def test_a_cpu_quota_lowers_the_number_of_usable_cores(monkeypatch, text, cores):
    assert cores_with({"cpu.max": text}, monkeypatch) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 6), ("200000", 2), ("50000", 1), ("900000", 6), ("junk", 6)])
def test_a_quota_of_cgroups_v1_lowers_the_number_of_usable_cores(monkeypatch, quota, cores):
    texts = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert cores_with(texts, monkeypatch) == cores


def cores_with(texts, monkeypatch):
    """Of six cores, where /sys/fs/cgroup holds these files and no others."""

    def read_text(path, **_):
        name = str(path.relative_to("/sys/fs/cgroup"))
        if name not in texts:
            raise FileNotFoundError(name)
        return texts[name]

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(Path, "read_text", read_text)
    return usable_cores()


def test_r3_the_libraries_of_a_child_start_only_compute_threads(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    given = child_environment(load_settings(compute_threads=3))
    assert (given["OPENBLAS_NUM_THREADS"], given["OMP_NUM_THREADS"]) == ("1", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert child_environment(load_settings(compute_threads=3))["OMP_NUM_THREADS"] == "2", "the operator's own word"


@pytest.mark.parametrize("traces", [False, True])
def test_a_worker_gets_no_variable_that_would_change_its_texts_or_stop_its_imports(monkeypatch, traces):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("OTEL_PROPAGATORS", "b3")
    found = child_environment(load_settings(traces=traces))
    assert "PYTHONOPTIMIZE" not in found, "2 removes docstrings: /openapi.json was a 500, and the page of errors empty"
    assert ("OTEL_PROPAGATORS" in found) is traces
