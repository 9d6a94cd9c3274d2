"""Internals of dependencies that the service uses: each test names what an upgrade has changed, and the module that uses it."""

import asyncio
import inspect
import re
import tomllib
from pathlib import Path

import prometheus_client
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from prometheus_client import mmap_dict, values
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route, compile_path
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("name", ["fastapi", "prometheus-client", "starlette", "torch", "uvicorn"])
def test_a_dependency_whose_internals_are_used_has_an_upper_bound(name):
    (found,) = (text for text in PROJECT["dependencies"] if re.match(rf"{name}[<>=]", text))
    assert "<" in found, (
        f"{found}: the next version may move what the tests below name, so pyproject.toml must bound it"
    )


def test_uvicorns_protocol_is_made_of_what_connection_extends():
    moved = "uvicorn moved what service/http/connection.py extends in HttpToolsProtocol: "
    assert parameters(HttpToolsProtocol) == {"config", "server_state", "app_state", "_loop"}, moved + "its arguments"
    methods = (
        "connection_made connection_lost pause_writing resume_writing shutdown on_response_complete _start_asgi_task"
        " on_message_begin"
    )
    assert [name for name in methods.split() if not hasattr(HttpToolsProtocol, name)] == [], moved + "its methods"
    assert parameters(HttpToolsProtocol._start_asgi_task) == {"cycle", "app"}, moved + "the start of a request's task"

    names = "app loop logger access_logger access_log server_state connections tasks transport flow cycle scope"
    names += " timeout_keep_alive parser"
    config = uvicorn.Config(print, log_config=None, lifespan="off", interface="asgi3")
    config.load()

    async def begun() -> HttpToolsProtocol:
        protocol = HttpToolsProtocol(config, ServerState(), {})
        protocol.on_message_begin()
        return protocol

    protocol = asyncio.run(begun())
    assert set(names.split()) - set(vars(protocol)) == set(), moved + "these attributes"
    keys = {"type", "asgi", "scheme", "root_path", "server", "client", "state"}
    assert keys - set(protocol.scope) == set(), moved + "these keys of the scope"


def test_uvicorns_cycle_takes_and_keeps_what_our_cycle_gives_it():
    moved = "uvicorn moved what service/http/cycle.py extends in RequestResponseCycle: "
    taken = "scope transport flow logger access_logger access_log default_headers message_event expect_100_continue"
    taken += " keep_alive on_response"
    assert parameters(RequestResponseCycle) == set(taken.split()), moved + "its arguments"
    nothing: dict = dict.fromkeys(taken.split())
    cycle = RequestResponseCycle(**nothing)
    kept = (
        "scope transport flow message_event disconnected keep_alive waiting_for_100_continue more_body response_started"
    )
    kept += " response_complete chunked_encoding expected_content_length"
    assert set(kept.split()) - set(vars(cycle)) == set(), moved + "these attributes"
    for name in ("run_asgi", "send", "receive"):
        assert inspect.iscoroutinefunction(getattr(RequestResponseCycle, name, None)), moved + name


def test_uvicorns_flow_control_pauses_as_our_flow_expects():
    moved = "uvicorn moved what service/http/cycle.py extends in FlowControl: "
    for name in ("pause_reading", "resume_reading", "pause_writing", "resume_writing", "drain"):
        assert hasattr(FlowControl, name), moved + name
    flow = FlowControl(asyncio.Transport())
    assert (flow.read_paused, flow.write_paused) == (False, False), moved + "its two flags"


def test_uvicorns_server_goes_through_the_steps_that_our_server_overrides():
    moved = "uvicorn moved what service/worker/server.py overrides in Server: "
    source = inspect.getsource(uvicorn.Server._serve)
    for step in ("self.startup(", "self.main_loop(", "self.shutdown("):
        assert step in source, moved + f"_serve no longer calls {step}…)"
    assert "serve(" in inspect.getsource(uvicorn.Server.run), moved + "run no longer calls serve"
    assert parameters(uvicorn.Server.on_tick) == {"counter"}, moved + "on_tick, which renews the date header"
    state = vars(uvicorn.Server(uvicorn.Config(print, log_config=None)).server_state)
    assert {"connections", "tasks", "default_headers"} <= set(state), (
        moved + "the state that it shares with connections"
    )
    lost = inspect.getsource(HttpToolsProtocol.connection_lost)
    assert "self.connections.discard(" in lost, moved + "connections no longer leave their set by discard"


def test_prometheus_client_makes_values_by_the_class_that_we_replace():
    moved = "prometheus_client moved what service/observability/metrics.py replaces: "
    assert hasattr(values, "MutexValue"), moved + "the class of values in memory"
    source = inspect.getsource(prometheus_client.metrics)
    assert "values.ValueClass(" in source, moved + "metrics no longer look values.ValueClass up when they are made"
    taken = "typ metric_name name labelnames labelvalues help_text"
    assert parameters(values.MutexValue) - {"kwargs"} == set(taken.split()), moved + "what a value is made of"
    assert {"inc", "set", "get", "set_exemplar", "get_exemplar"} <= set(dir(values.MutexValue)), (
        moved + "a value's methods"
    )


def test_prometheus_client_keeps_values_where_we_change_them(monkeypatch):
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)  # other tests replace it, as the service does
    moved = "prometheus_client moved what service/observability/ changes without the library's own calls: "
    made = prometheus_client.Histogram("made_for_a_test", "…", buckets=(1.0, 2.0), registry=None)
    assert list(made._upper_bounds) == [1.0, 2.0, float("inf")], f"{moved}the bounds of a histogram"
    assert [bucket.get() for bucket in made._buckets] == [0.0] * 3, f"{moved}its buckets are no longer apart"
    assert made._sum.get() == 0.0, f"{moved}its sum"
    for kind in (prometheus_client.Counter, prometheus_client.Gauge):
        series = kind("made_for_a_test", "…", registry=None)
        series._value.inc(2)
        assert [sample.value for family in series.collect() for sample in family.samples][:1] == [2.0], (
            f"{moved}the value of a {kind.__name__}"
        )


def test_prometheus_client_writes_the_files_that_our_values_reserve_space_for(tmp_path):
    moved = "prometheus_client moved what service/observability/shared_values.py extends in MmapedDict: "
    file = mmap_dict.MmapedDict(str(tmp_path / "counter_1.db"))
    try:
        before = file._used
        key = mmap_dict.mmap_key("a", "a_total", ["layer"], ["x"], "help")
        file._init_value(key)
        assert file._used - before <= len(key.encode()) + 32, moved + "an entry takes more than its key and 32 bytes"
        assert (file._capacity, file._f.closed) == (1 << 16, False), moved + "its capacity or its file"
        file.write_value(key, 2.5, 0.0)
        assert file.read_value(key)[0] == 2.5, moved + "reading a value"
    finally:
        file.close()
    (family,) = MultiProcessCollector.merge([str(tmp_path / "counter_1.db")])
    assert [sample.value for sample in family.samples] == [2.5], moved + "merging the files of several processes"


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN: its product is not used"
)
def test_torch_has_the_packed_product_of_its_own_compiler():
    moved = "torch moved oneDNN's operators, so service/attention/projection.py silently takes its slower product: "
    for name in ("_linear_pointwise", "_reorder_linear_weight"):
        assert hasattr(torch.ops.mkldnn, name), moved + name
    weight, x = torch.eye(16), torch.arange(64.0).reshape(4, 16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    found = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    assert torch.equal(found, x), moved + "_linear_pointwise gives another product"


def test_starlette_matches_routes_and_paths_as_access_and_the_outer_middleware_do():
    moved = "starlette moved what service/api matches requests by: "
    pattern, *_ = compile_path("/v1/layers/{layer}/attend")
    assert pattern.match("/v1/layers/a/attend"), moved + "compile_path, which service/api/auth/access.py uses"
    route = Route("/x", print, methods=["GET"])
    scope = {"type": "http", "path": "/x", "root_path": ""}
    found = [route.matches({**scope, "method": method})[0] for method in ("GET", "PUT")]
    assert found == [Match.FULL, Match.PARTIAL], moved + "Route.matches, which service/api/outer_middleware.py uses"
    assert isinstance(FastAPI().router.routes, list), moved + "the router's list, which service/app.py extends"


def test_starlettes_cors_answers_a_preflight_by_itself():
    rules = CORSMiddleware(FastAPI(), allow_origins=["https://a"])
    asked = Headers({"origin": "https://a", "access-control-request-method": "GET"})
    moved = "starlette moved CORSMiddleware.preflight_response, which service/api/auth/access.py overrides"
    assert rules.preflight_response(asked).status_code == 200, moved
