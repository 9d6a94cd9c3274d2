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

from service.http.connection import Connection
from service.worker import server
from service.worker.server import Server

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("name", ["fastapi", "prometheus-client", "starlette", "torch"])
def test_a_dependency_whose_internals_are_used_has_an_upper_bound(name):
    (found,) = (text for text in PROJECT["dependencies"] if re.match(rf"{name}[<>=]", text))
    assert "<" in found, (
        f"{found}: the next version may move what the tests below name, so pyproject.toml must bound it"
    )


def test_our_http_layer_is_an_asyncio_protocol_and_our_server_overrides_public_methods_of_uvicorns():
    """Each overridden name is in the docstring of `worker/server.py`."""
    assert Connection.__mro__ == (Connection, asyncio.Protocol, asyncio.BaseProtocol, object)
    overridden = {name for name in vars(Server) if hasattr(uvicorn.Server, name) and not name.startswith("__")}
    assert overridden == {"capture_signals", "serve", "startup", "main_loop", "shutdown"}
    assert server.__doc__
    assert [name for name in overridden if f"`{name}`" not in server.__doc__] == []
    private = {name for name in vars(uvicorn.Server(uvicorn.Config(print, log_config=None))) if name.startswith("_")}
    assert private & set(re.findall(r"self\.(\w+)", inspect.getsource(server))) == set(), "uvicorn uses it too"


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
