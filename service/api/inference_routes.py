"""Inference routes: the metadata, readiness, configuration and statistics of the Open Inference Protocol (`/v2`).

Invariants: a layer is a model; its one version is "1". Statistics are summed over the processes. What is not served (loading,
shared memory, tracing) is not announced.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from service import __version__
from service.api.attend_route import find_model
from service.api.outer_middleware import LayerTotals
from service.api.problems import problem_responses
from service.api.routes import ServiceView, check_ready
from service.api.shared_work import Throttle
from service.layers.catalog import Served, ServedAttention
from service.loop_time import LoopClock
from service.wire.inference_codec import VERSION

PLATFORM = "attention_service"
EXTENSIONS = ["binary_tensor_data", "parameters", "model_configuration", "statistics"]
_ANY = -1
_NOT_READY = problem_responses({503: "not ready, draining or down"}, as_inference=True)
_NO_MODEL = problem_responses({404: "no such model"}, as_inference=True) | _NOT_READY


class ServerLive(BaseModel):
    live: bool = Field(description="always true")


class ServerReady(BaseModel):
    ready: bool = Field(description="always true; else the answer is a 503")


class ModelReady(BaseModel):
    name: str = Field(description="the model")
    ready: bool = Field(description="always true; else the answer is a 503")


class ServerMetadata(BaseModel):
    name: str = Field(description="of the server")
    version: str = Field(description="of the server")
    extensions: list[str] = Field(description="of the protocol")


class TensorMetadata(BaseModel):
    """A tensor of a model; -1 is a size that varies, and the batch axis comes first."""

    name: str = Field(description="of the tensor")
    datatype: str = Field(description="as the protocol calls it")
    shape: list[int] = Field(description="sizes of the axes")


# Load generators send all `inputs` and request all `outputs`. The protocol has no optional tensors, so two more fields list them.
class ModelMetadata(BaseModel):
    name: str = Field(description="the model")
    versions: list[str] = Field(description="always 1")
    platform: str = Field(description="what computes it")
    inputs: list[TensorMetadata] = Field(description="required")
    outputs: list[TensorMetadata] = Field(description="of every answer")
    optional_inputs: list[TensorMetadata] = Field(description="masks and defaults")
    optional_outputs: list[TensorMetadata] = Field(description="if requested")


def make_inference_router(service: ServiceView) -> APIRouter:
    router = APIRouter(tags=["open inference protocol"])
    statistics = Throttle(lambda: _statistics(service), LoopClock())

    @router.get("/v2", summary="The server and its extensions")
    @router.get("/v2/", include_in_schema=False)
    async def server_metadata() -> ServerMetadata:
        return ServerMetadata(name="attention-service", version=__version__, extensions=EXTENSIONS)

    @router.get("/v2/health/live", summary="The process runs")
    async def server_live() -> ServerLive:
        return ServerLive(live=True)

    @router.get("/v2/health/ready", summary="Every layer answers", responses=_NOT_READY)
    async def server_ready() -> ServerReady:
        check_ready(service)
        return ServerReady(ready=True)

    @router.get("/v2/models/stats", summary="Statistics of every model", responses=_NOT_READY)
    async def all_model_stats() -> Response:
        return _statistics_answer(*(await statistics.get()).values())

    @router.post("/v2/repository/index", summary="The models that are served", responses=_NOT_READY)
    async def repository_index() -> JSONResponse:
        state = {"version": VERSION, "state": "READY", "reason": ""}
        return JSONResponse([{"name": model.name, **state} for model in service.catalog.models()])

    _add_inference_routes(router, service, statistics)
    return router


async def _statistics(service: ServiceView) -> dict[str, bytes]:
    names = [model.name for model in service.catalog.models()]
    totals = await service.layer_totals()
    return await asyncio.get_running_loop().run_in_executor(
        service.rendering, lambda: {name: orjson.dumps(_stats(name, totals.get(name, LayerTotals()))) for name in names}
    )


def _statistics_answer(*stats: bytes) -> Response:
    return Response(b'{"model_stats":[' + b",".join(stats) + b"]}", media_type="application/json")


def _add_inference_routes(router: APIRouter, service: ServiceView, statistics: Throttle[dict[str, bytes]]) -> None:
    """Add each route with and without the version in its path."""

    async def model_metadata(request: Request) -> ModelMetadata:
        return _metadata(find_model(service.catalog, request.path_params))

    async def model_ready(request: Request) -> ModelReady:
        model = find_model(service.catalog, request.path_params)
        check_ready(service)
        return ModelReady(name=model.name, ready=True)

    async def model_config(request: Request) -> JSONResponse:
        model = find_model(service.catalog, request.path_params)
        max_batch_size = 0 if isinstance(model, ServedAttention) else service.describe(model).limits.sequences
        return JSONResponse(_config(model, max_batch_size))

    async def model_stats(request: Request) -> Response:
        name = find_model(service.catalog, request.path_params).name
        # The layer may have been unloaded meanwhile.
        return _statistics_answer((await statistics.get()).get(name) or orjson.dumps(_stats(name, LayerTotals())))

    routes = (
        ("", model_metadata, "A model's inputs and outputs"),
        ("/ready", model_ready, "The model answers"),
        ("/config", model_config, "A model's configuration, as load generators read it"),
        ("/stats", model_stats, "What a model has done, over all processes"),
    )
    for tail, endpoint, summary in routes:
        for version, suffix in (("", ""), ("/versions/{version}", "_version")):
            path, name = f"/v2/models/{{layer}}{version}{tail}", f"{endpoint.__name__}{suffix}"
            router.get(path, name=name, summary=summary, responses=_NO_MODEL)(endpoint)


def _tensors(names: str, rank: int, last_size: int = _ANY, datatype: str = "FP32") -> list[TensorMetadata]:
    shape = [_ANY] * (rank - 1) + [last_size]
    return [TensorMetadata(name=name, datatype=datatype, shape=shape) for name in names.split()]


# A mask may also have fewer axes, and any of them may be 1.
_MASKS = _tensors("attend_mask ignore_mask", 4, datatype="BOOL") + _tensors("bias", 4)
_MASKS += _tensors("lengths", 2, datatype="INT64")


def _metadata(model: Served) -> ModelMetadata:
    if isinstance(model, ServedAttention):
        needed, optional = _tensors("query key value", 4), _tensors("past_key past_value", 4) + _tensors("sinks", 1)
        output = _tensors("output", 4)
    else:
        spec = model.spec
        needed, optional = _tensors("query", 3, spec.query_width), []
        (needed if spec.needs_key else optional).extend(_tensors("key", 3, spec.key_width))
        (needed if spec.needs_value else optional).extend(_tensors("value", 3, spec.value_width))
        optional += _tensors("past_key", 4, spec.head_width) + _tensors("past_value", 4, spec.value_head_width)
        optional += _tensors("positions key_positions", 2, datatype="INT64") if spec.uses_positions else []
        output = _tensors("output", 3, spec.out_width)
    return ModelMetadata(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=needed,
        outputs=output,
        optional_inputs=optional + _MASKS,
        optional_outputs=_tensors("weights scores present_key present_value", 4) + _tensors("lse entropy", 3),
    )


def _config(model: Served, max_batch_size: int) -> dict[str, Any]:
    """Return the fields of Triton's model configuration that apply here; a layer's `dims` omit the batch axis."""
    has_batch_axis, metadata = max_batch_size > 0, _metadata(model)

    def listed(tensors: list[TensorMetadata]) -> list[dict[str, Any]]:
        return [{"name": x.name, "data_type": f"TYPE_{x.datatype}", "dims": x.shape[has_batch_axis:]} for x in tensors]

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "",
        "max_batch_size": max_batch_size,
        "input": listed(metadata.inputs),
        "output": listed(metadata.outputs),
        "dynamic_batching": {},  # its presence says that requests are batched
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }


def _stats(name: str, done: LayerTotals) -> dict[str, Any]:
    """Return a model's entry in Triton's statistics extension; durations are nanoseconds, summed over requests."""
    nothing = (0, 0.0)
    durations = {
        "success": (done.successes, done.success_s),
        "fail": (done.failures, done.failure_s),
        "queue": (done.successes, done.queue_s),
        "compute_input": (done.successes, done.decode_s),
        "compute_infer": (done.successes, done.compute_s),
        "compute_output": (done.successes, done.encode_s),
        "cache_hit": nothing,
        "cache_miss": nothing,
    }
    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(done.last_answer_s * 1000),
        "inference_count": done.sequences,
        "execution_count": done.batches,
        "inference_stats": {
            phase: {"count": count, "ns": round(seconds * 1e9)} for phase, (count, seconds) in durations.items()
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }
