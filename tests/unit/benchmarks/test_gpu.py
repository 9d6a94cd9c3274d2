"""`make gpu`: what a machine lacks, its environment, its parts one by one, and the page of their results."""

import dataclasses
import json
import subprocess
import sys
import textwrap
import zipfile

import pytest
import torch

from benchmarks import gpu, gpu_page
from benchmarks.gpu_checks import DRY, counted
from benchmarks.gpu_load import LoadFailed, merged
from benchmarks.gpu_part import PARTS
from benchmarks.gpu_serve import marked_tests
from benchmarks.gpu_start import PYTHON, Machine, lacks, make_environment, needed_packages
from benchmarks.gpu_wheels import pins
from benchmarks.subjects import ROOT
from tests import processes

COMPLETE = Machine(PYTHON, has_pip=True, has_numpy=True, torch=(2, 11), device_gib=70.0, memory_gib=120.0,
                   wheels=needed_packages())  # fmt: skip


def part(seconds=1.0, failed=None, rows=()):
    return {"seconds": seconds, "failed": failed, "rows": list(rows)}


def run_program(tmp_path, program, limit_s=20.0):
    path = tmp_path / "part.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    return gpu.run_part([sys.executable, str(path)], limit_s)


def results(**parts):
    about = {"measured_at": "2026-11-27 10:00 UTC", "commit": "abc1234", "cpu": "Abacus 9", "cores": 16}
    return {**about, "memory_gib": 128, "python": "3.12.3", "dry": False, "parts": parts}


def test_a_machine_that_has_everything_lacks_nothing():
    assert lacks(COMPLETE, needed_packages()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"python": (3, 11)}, "Python 3.12 is needed"),
        ({"has_pip": False}, "pip is needed"),
        ({"has_numpy": False}, "NumPy is needed"),
        ({"torch": (2, 9)}, "torch 2.11 or newer with CUDA is needed; this Python has 2.9."),
        ({"torch": None}, "this Python has none"),
        ({"device_gib": None}, "A CUDA device is needed"),
        ({"device_gib": 1.0}, "8 GiB of the device's memory are needed; 1.0 are free."),
        ({"memory_gib": 2.0}, "24 GiB of memory are needed"),
        ({"wheels": needed_packages() - {"orjson"}}, "Wheels are missing (orjson): `make gpu-wheels`"),
    ],
)
def test_what_a_machine_lacks_is_one_sentence_each(changes, sentence):
    (found,) = lacks(dataclasses.replace(COMPLETE, **changes), needed_packages())
    assert sentence in found


def test_the_wheels_are_all_that_is_needed_besides_torch_and_numpy():
    names = {pin.split("==")[0] for pin in pins()}
    assert needed_packages() <= names
    assert not names & {"torch", "numpy", "attention-service"}


@pytest.mark.long
def test_the_parts_the_service_and_the_marked_tests_import_nothing_without_a_wheel():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in marked_tests()]
    program = f"""
import importlib, sys
from importlib.metadata import packages_distributions
for name in {["benchmarks.gpu", "benchmarks.gpu_part", "service.app", "service.worker.server", "tests.conftest", *names]}:
    importlib.import_module(name)
found = packages_distributions()
print(*(found[name][0] for name in {{name.partition(".")[0] for name in sys.modules}} & found.keys() - {{"opentelemetry"}}))
"""
    command = [sys.executable, "-c", program]
    used = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wheels = {pin.split("==")[0] for pin in pins()}
    assert {"torch", "pydantic"} <= set(used)
    assert {name.lower().replace("_", "-") for name in used} - wheels <= {
        "torch",
        "numpy",
        "setuptools",
        "attention-service",
    }


@pytest.mark.long
def test_the_environment_sees_its_wheels_and_the_packages_of_the_python_that_made_it(tmp_path):
    """Also where that Python is one of an environment, as here."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "gathered-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gathered.py", "")
        wheel.writestr("gathered-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: gathered\nVersion: 1\n")
        wheel.writestr("gathered-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("gathered-1.dist-info/RECORD", "")
    python = make_environment(tmp_path / "made", wheels)
    program = "import gathered, importlib.util as u; print(gathered.__file__, u.find_spec('torch').origin)"
    own, outer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert own.startswith(str(tmp_path))
    assert not outer.startswith(str(tmp_path))


def test_all_parts_have_a_limit_and_together_take_less_than_eight_minutes():
    assert gpu.LIMITS.keys() == PARTS.keys()
    assert sum(gpu.LIMITS.values()) + 30 < 480


@pytest.mark.parametrize("name", ["machine", "meaning", "launches", "varlen", "memory", "lost"])
def test_a_check_runs_on_the_cpu(name):
    rows = list(PARTS[name](DRY))
    assert rows
    assert not [row for row in rows if "failed" in row]
    json.dumps(rows)


def test_launches_copies_and_waits_are_counted_apart():
    @dataclasses.dataclass
    class Event:
        text: str
        where: str = "CUDA"

        def name(self):
            return self.text

        def device_type(self):
            return getattr(torch.profiler.DeviceType, self.where)

    events = [Event("gemm"), Event("fmha"), Event("Memcpy HtoD (Pinned -> Device)"), Event("Memset (Device)")]
    events += [Event("cudaStreamSynchronize", "CPU"), Event("aten::mm", "CPU"), Event("cudaLaunchKernel", "CPU")]
    assert counted(events) == {"kernels": 2, "HtoD": 1, "DtoH": 0, "DtoD": 0, "waits": 1}


def test_a_part_gives_its_rows(tmp_path):
    found = run_program(tmp_path, """print('{"figure": 1}'); print("other text")""")
    assert (found["rows"], found["failed"]) == ([{"figure": 1}], None)


def test_a_part_that_breaks_a_promise_fails_and_keeps_its_rows(tmp_path):
    found = run_program(tmp_path, """print('{"a": 1}'); print('{"failed": "not equal"}'); raise SystemExit(1)""")
    assert found["failed"] == "not equal"
    assert len(found["rows"]) == 2


def test_a_part_that_dies_fails_with_its_last_words(tmp_path):
    assert run_program(tmp_path, "raise OSError('no device')")["failed"] == "exit code 1: OSError: no device"


def test_a_late_part_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "END_S", 0.2)
    program = """
        import signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print('{"pid": %d}' % started.pid, flush=True)
        time.sleep(1000)
    """
    found = run_program(tmp_path, program, limit_s=2.0)
    assert found["failed"] == "it was ended after 2 s"
    (row,) = found["rows"]
    processes.eventually(lambda: not processes.is_alive(row["pid"]), "an end of what it started")


def test_one_failed_part_does_not_stop_the_others_and_the_run_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_part", lambda command, _: part(failed="late" if command[-2] == "bits" else None))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--commit", "abc1234", "--out", str(out)])
    assert gpu.main() == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    assert list(found["parts"]) == [name for name in gpu.LIMITS if name not in gpu.NOT_DRY]


def test_the_figures_of_several_load_processes_are_joined():
    one, other = (
        {"us": us, "refused": 1, "broken": 0, "seconds": 2.0, "cpu_s": 1.0} for us in ([1000] * 98, [9000, 7000])
    )
    figures = {"rps": 50.0, "p50_ms": 1.0, "p99_ms": 9.0, "refused": 2 / 102, "broken": 0, "generator_cores": 1.0}
    assert merged([one, other]) == figures
    with pytest.raises(LoadFailed, match=r"no answer of 2xx, 1 others"):
        merged([{**one, "us": []}])


def test_the_page_says_that_no_card_has_run_it():
    assert gpu_page.section(None).startswith("No card has run it yet")


def test_the_page_names_card_commit_aims_and_what_failed():
    speeds = [("float32", False, 100.0), ("float32", True, 90.0), ("bfloat16", False, 50.0)]
    found = results(
        machine=part(rows=[{"card": "Abacus GPU", "driver": "580", "torch": "2.11.0"}]),
        speed=part(rows=[dict(case="w2", batch=16, dtype=d, exact=e, calls_per_s=x) for d, e, x in speeds]),
        lost=part(failed="expected EngineDown"),
    )
    text = gpu_page.section(found)
    for expected in (
        "at `abc1234` on Abacus GPU (driver 580, torch 2.11.0); Abacus 9, 16 cores, 128 GiB, Python 3.12.3.",
        "| W2 with the best number of workers, requests/s ≥ 20,000 |  | not measured |",
        "| float32, exact over tolerant, lowest of the cases ≥ 0.8 | 0.900 | yes |",
        "| bfloat16 over float32, lowest of the cases ≥ 1 | 0.500 | **no** |",
        "| w2 | 16 | 100 | 90.0 | 50.0 |  |",
        "| lost | 1 | expected EngineDown |",
    ):
        assert expected in text
