"""Imports run one way, without cycles; and what each room may import from outside."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[2] / "service"
LOADTEST = SERVICE.parent / "loadtest"
CLIENT = SERVICE.parent / "client"
MODULES = {
    path: "service." + ".".join(path.relative_to(SERVICE).with_suffix("").parts) for path in SERVICE.rglob("*.py")
}

# Each room, and the rooms below it; `errors` and `loop_time` are below all of them.
TOP = {"errors", "loop_time"}
BELOW: dict[str, set[str]] = {
    **dict.fromkeys(TOP, TOP),
    "settings": set(),
    "http": set(),
    "attention": set(),
    "batching": set(),
    "layers": {"attention"},
    "models": {"layers", "attention"},
    "wire": {"batching", "models", "layers", "attention"},
    "api": {"http", "wire", "batching", "models", "layers", "attention"},
    "observability": {"api", "http", "batching", "attention"},
    "supervisor": {"settings", "observability"},
    "limits": {"settings", "supervisor", "api", "http", "wire", "batching"},
    "__init__": set(),
}
BELOW["worker"] = {
    "settings",
    "limits",
    "api",
    "http",
    "models",
    "layers",
    "attention",
    "batching",
    "observability",
    "supervisor",
}
BELOW["app"] = BELOW["worker"] | {"worker"}
BELOW["commands"] = BELOW["app"] | {"app"}
BELOW["cli"] = {"commands"}
BELOW["__main__"] = {"cli"}
# Few enough to be read at one look.
MAX_MODULES_AT_THE_TOP = 8


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", sorted(MODULES), ids=lambda path: str(path.relative_to(SERVICE)))
def test_a_room_imports_only_from_rooms_below_it(path):
    room = room_of(MODULES[path])
    own = {name for name in imports_of(path) if name.startswith("service.")}
    wrong = {name for name in own if room_of(name) not in BELOW[room] | TOP | {room, "__version__"}}
    assert not wrong


def test_the_service_has_few_top_level_modules():
    assert len([*SERVICE.glob("*.py")]) <= MAX_MODULES_AT_THE_TOP


def test_the_supervisor_never_imports_torch():
    code = "import sys, service.supervisor.supervisor; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long
def test_a_service_imports_the_library_of_tokenizers_only_with_a_model():
    code = "import sys, service.app, service.commands.serve; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("batching", {"torch", "numpy", "fastapi", "starlette", "pydantic", "uvicorn"}),
        ("attention", {"asyncio", "fastapi", "starlette", "pydantic", "uvicorn", "orjson"}),
        ("layers", {"asyncio", "fastapi", "starlette", "pydantic", "uvicorn"}),
        ("models", {"asyncio", "fastapi", "starlette", "pydantic", "uvicorn"}),
        ("wire", {"fastapi", "starlette", "uvicorn"}),
        ("http", {"torch", "numpy", "fastapi", "starlette", "pydantic"}),
        ("supervisor", {"torch", "numpy", "fastapi", "starlette", "pydantic", "uvicorn"}),
    ],
)
def test_a_room_imports_no_forbidden_library(room, forbidden):
    for path in (SERVICE / room).rglob("*.py"):
        known = {name.split(".")[0] for name in imports_of(path)}
        assert not known & forbidden, path


def test_the_service_imports_nothing_of_its_client():
    assert not [
        path for path in MODULES if {name.split(".")[0] for name in imports_of(path)} & {"attention_client", "httpx2"}
    ]


def test_the_service_neither_imports_nor_installs_ray():
    project = tomllib.loads((SERVICE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [text for text in project["dependencies"] if text.startswith("ray")]
    assert not [path for path in MODULES if "ray" in {name.split(".")[0] for name in imports_of(path)}]


def test_only_the_check_of_a_layer_imports_transformers_which_the_service_does_not_install():
    project = tomllib.loads((SERVICE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [text for text in project["dependencies"] if text.startswith(("transformers", "huggingface"))]
    knowing = [
        path
        for path in MODULES
        if {name.split(".")[0] for name in imports_of(path)} & {"transformers", "huggingface_hub"}
    ]
    assert knowing == [SERVICE / "commands" / "parity.py"]
    top = ast.parse(knowing[0].read_text(encoding="utf-8")).body
    assert "transformers" not in {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=lambda path: str(path.relative_to(CLIENT)))
def test_the_client_imports_only_its_declared_dependencies(path):
    """Those of the extra only in the command line, of which the rest of the client imports nothing."""
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    is_command = path.parent.name == "cli"
    declared = project["dependencies"] + (project["optional-dependencies"]["cli"] if is_command else [])
    named = {re.split("[><=]", text)[0] for text in declared}
    imported = imports_of(path)
    known = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    # Recognised where the caller has them already, and never installed for the client's sake.
    assert known <= named | {"attention_client"} | (set() if is_command else {"torch", "ml_dtypes"})
    assert is_command or not any(name.startswith("attention_client.cli") for name in imported)


@pytest.mark.parametrize("path", sorted(LOADTEST.rglob("*.py")), ids=lambda path: str(path.relative_to(LOADTEST)))
def test_the_load_test_imports_only_pinned_packages_and_no_service_code(path):
    pinned = (LOADTEST / "requirements.txt").read_text(encoding="utf-8").lower()
    known = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names
    assert {name for name in known if name != "attention_load" and f"\n{name}==" not in pinned} == set()


def test_only_the_locustfile_imports_locust():
    """The rest is tested without it, in the service's environment."""
    knowing = {path.name for path in LOADTEST.rglob("*.py") if "locust" in {x.split(".")[0] for x in imports_of(path)}}
    assert knowing == {"locustfile.py"}


def test_only_settings_reads_the_environment():
    """The supervisor gives all of its own to the workers, and looks at nothing in it."""
    handed_on = {"processes.py": 1}
    for path in MODULES:
        if path.name != "settings.py":
            assert path.read_text(encoding="utf-8").count("os.environ") == handed_on.get(path.name, 0), path
            assert "getenv" not in path.read_text(encoding="utf-8"), path


def test_imports_have_no_cycle():
    graph = {name: {n for n in imports_of(path) if n in set(MODULES.values())} for path, name in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name in done:
            return
        for below in graph[name]:
            visit(below, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
