"""The house's law of imports: one way, no cycles, and who may know what."""

import ast
import sys
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[2] / "service"
LOADTEST = SERVICE.parent / "loadtest"
MODULES = {
    path: "service." + ".".join(path.relative_to(SERVICE).with_suffix("").parts) for path in SERVICE.rglob("*.py")
}

GROUND = {
    "settings", "errors", "events", "metrics", "memory", "logs", "line_writer", "timestamp", "turn", "header_fields",
    "json_object", "safetensors_header",
}  # fmt: skip
ALLOWED = {
    "attention": {"attention"} | GROUND,
    "batching": {"batching"} | GROUND,
    "layers": {"layers", "attention"} | GROUND,
    "wire": {"wire", "batching", "layers", "attention"} | GROUND,
    "calling": {"calling", "errors"},
    "transport": {"transport", "errors", "header_fields", "turn", "api"},  # of the door only ASGI's words, see below
    "api": {"api", "wire", "batching", "layers", "attention"} | GROUND,
}
# What lies beside the rooms, from below: what knows no room; who starts processes; one process; what is told to do something.
BESIDE = GROUND | {
    "bell", "descriptors", "heartbeat", "heat_map", "layer_series", "roll", "series", "shared_file", "shared_values", "tls",
}  # fmt: skip
STARTING = {"plan", "processes", "pulse", "run_directory", "slot", "supervisor"}
PROCESS = {
    "changes", "follower", "limits", "probes", "readiness", "server", "service", "shelf", "tally", "telemetry", "trace_export",
    "tracing",
}  # fmt: skip
BELOW_APP = PROCESS | STARTING | BESIDE | (ALLOWED.keys() - {"calling"})
ALLOWED |= {
    **dict.fromkeys(BESIDE, BESIDE),
    **dict.fromkeys(STARTING, STARTING | BESIDE),
    **dict.fromkeys(PROCESS, BELOW_APP),
    "client": {"calling", "errors"},
    "app": BELOW_APP,
    "commands": BELOW_APP | {"commands", "app", "client"},
    "cli": {"commands", "errors"},
    "__main__": {"cli"},
    "__init__": set(),
}


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
    wrong = {name for name in own if room_of(name) not in ALLOWED[room] | {"__version__"}}
    assert not wrong


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("batching", {"torch", "numpy", "fastapi", "starlette", "pydantic", "uvicorn"}),
        ("attention", {"asyncio", "fastapi", "starlette", "pydantic", "uvicorn", "orjson"}),
        ("layers", {"asyncio", "fastapi", "starlette", "pydantic", "uvicorn"}),
        ("wire", {"fastapi", "starlette", "uvicorn"}),
        ("calling", {"fastapi", "starlette", "uvicorn", "pydantic"}),
        ("transport", {"torch", "numpy", "fastapi", "starlette", "pydantic"}),
    ],
)
def test_a_room_does_not_know_what_is_not_its_business(room, forbidden):
    for path in (SERVICE / room).rglob("*.py"):
        known = {name.split(".")[0] for name in imports_of(path)}
        assert not known & forbidden, path


def test_the_transport_knows_of_the_door_only_the_words_of_asgi():
    for path in (SERVICE / "transport").rglob("*.py"):
        known = {name for name in imports_of(path) if name.startswith("service.api.")}
        assert all(name.startswith("service.api.asgi") for name in known), path


@pytest.mark.parametrize("path", sorted(LOADTEST.rglob("*.py")), ids=lambda path: str(path.relative_to(LOADTEST)))
def test_the_load_test_knows_nothing_of_the_service_and_needs_nothing_that_is_not_pinned(path):
    pinned = (LOADTEST / "requirements.txt").read_text(encoding="utf-8").lower()
    known = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names
    assert {name for name in known if name != "attention_load" and f"\n{name}==" not in pinned} == set()


def test_of_the_load_test_only_the_users_and_the_wiring_know_locust():
    knowing = {path.name for path in LOADTEST.rglob("*.py") if "locust" in {x.split(".")[0] for x in imports_of(path)}}
    assert knowing == {"locustfile.py", "user.py"}


def test_only_settings_reads_the_environment():
    """The supervisor gives all of its own to the workers, and looks at nothing in it."""
    handed_on = {"supervisor.py": 1}
    for path in MODULES:
        if path.name != "settings.py":
            assert path.read_text(encoding="utf-8").count("os.environ") == handed_on.get(path.name, 0), path
            assert "getenv" not in path.read_text(encoding="utf-8"), path


def test_nothing_loads_pickles_evaluates_strings_or_hides_disconnects():
    for path in MODULES:
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
        }
        names |= {
            node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)
        }
        assert not names & {"eval", "exec", "pickle", "BaseHTTPMiddleware"}, path


def test_there_is_no_cycle_of_imports():
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
