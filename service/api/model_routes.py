"""Model routes: the models of the layer directory, and the hot routes that take a text or tokens.

Invariants: a text is tokenized off the event loop, and nothing of it reaches an error, a log line or a trace. A model is read at
its first use: the request that comes first waits for that within its deadline, and so do those that come meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.api.attend_route import ANSWER_CODINGS, BODY_CODINGS, FORMS
from service.api.problems import problem_responses
from service.api.reply import JSON, Coding, answer_coding, answer_type, body_type
from service.api.request_context import RequestContext, SharedState
from service.errors import DuplicateKey, EngineFailed, Malformed, NonFinite, ServiceError
from service.http.asgi import Application, Receive, Scope, Send
from service.http.request_parser import HeaderFields
from service.layers.catalog import Catalog
from service.models.served_model import ModelState, ServedModel
from service.wire.attend_request import RequestLimits
from service.wire.model_request import Check, Checked, ModelFacts, check_model_attend, check_states, write_model_json
from service.wire.safetensors_codec import write_safetensors

MODEL_ROUTES: dict[str, Check] = {
    "/v1/models/{model}/attend": check_model_attend,
    "/v1/models/{model}/states": check_states,
}


class Model(BaseModel):
    """One model of the layer directory; what its file does not say is null."""

    name: str = Field(description="as in the path")
    family: str | None = Field(description="kind of checkpoint that it comes from")
    source: str | None = Field(description="where it was imported from")
    digest: str | None = Field(description="sha256 of its tensors, its options and its layers' digests")
    layers: list[str] = Field(description="its layers among the served ones, first to last")
    width: int | None = Field(description="features of a hidden state")
    heads: list[int] = Field(description="of each layer; empty if one is not served")
    max_tokens: int | None = Field(description="of a sequence, those that the model adds included")
    vocabulary: int | None = Field(description="number of tokens that it knows")
    fault: str | None = Field(description="why it cannot be used now; null if nothing is wrong")


class ModelList(BaseModel):
    models: list[Model] = Field(description="by name")


class Models(Protocol):
    """The models of one process; `worker/model_registry.py` implements it."""

    def find(self, name: str) -> ServedModel | None: ...
    async def get(self, name: str) -> ServedModel: ...
    async def states(self) -> list[ModelState]: ...
    async def state(self, name: str) -> ModelState: ...


def model_endpoints(shared: SharedState, models: Models) -> dict[str, Application]:
    return {path: ModelRoute(shared, models, check) for path, check in MODEL_ROUTES.items()}


class ModelRoute:
    """The ASGI endpoint of a model: attention of one of its layers, or its hidden states."""

    def __init__(self, shared: SharedState, models: Models, check: Check) -> None:
        self._shared = shared
        self._models = models
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        with RequestContext(self._shared, scope, receive, self._find) as context:
            wanted, coding = context.fields.make(_negotiated, context.limits.take_offers)
            document = await _parsed(context, await context.read(BODY_CODINGS, is_binary=False))
            model = await context.within_deadline(
                "the model was read and checked, for its first use", self._models.get(name)
            )
            context.take(model)
            request, more = await context.off_loop(
                partial(_checked, self._check, document, model, context.limits.request)
            )
            await context.counted(request)
            del document
            tensors, found = await context.ask(request)
            facts = ModelFacts(found, more)
            if "layers" in more:
                tensors = {"states": tensors["output"]}
            is_json = wanted == JSON
            pieces = write_model_json(tensors, facts, request.form) if is_json else write_safetensors(tensors, facts)
            del request
            await context.send(send, [(b"content-type", wanted)], pieces, coding)

    def _find(self, _: Catalog, path: Mapping[str, str]) -> ServedModel | None:
        return self._models.find(path["model"])


def _negotiated(fields: HeaderFields, take_offers: bool) -> tuple[bytes, Coding | None]:
    """Return the media type of the answer, and its content coding."""
    body_type(fields, (JSON,))
    return answer_type(fields, FORMS), answer_coding(fields, ANSWER_CODINGS, take_offers=take_offers)


async def _parsed(context: RequestContext, body: bytearray) -> dict[str, Any]:
    """Return the JSON object; an error shows nothing of the body, not even a name, because a text may have slipped into one."""
    try:
        return await context.parsed(body)
    except (Malformed, NonFinite) as error:
        has_name = error.param is not None or isinstance(error, DuplicateKey)
        raise type(error)(_WITHOUT_NAME if has_name else error.message) from None


_WITHOUT_NAME = "the body has the same key twice in one object, or a number that neither JSON nor float64 has"


def _checked(check: Check, document: Mapping[str, object], model: ServedModel, limits: RequestLimits) -> Checked:
    """Return the checked request; a fault of ours is reported with its place, but without its message, which may have text."""
    try:
        return check(document, model, limits)
    except ServiceError:
        raise
    except Exception as fault:  # noqa: BLE001 (see above)
        place = RuntimeError(type(fault).__name__).with_traceback(fault.__traceback__)
    raise EngineFailed("an internal fault; the log has its place under the request id") from place


def make_models_router(models: Models) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", summary="The models of the layer directory", responses=_NOT_READY)
    async def list_models() -> ModelList:
        return ModelList(models=[_described(state) for state in await models.states()])

    @router.get("/v1/models/{model}", summary="One model: layers, width, heads, most tokens", responses=_NO_MODEL)
    async def get_model(model: str) -> Model:
        return _described(await models.state(model))

    return router


_NOT_READY = problem_responses({503: "not ready, draining or down"})
_NO_MODEL = problem_responses(
    {404: "no such model", 503: "not ready, or this model cannot be used: its file or its layers"}
)


def _described(state: ModelState) -> Model:
    said: dict[str, Any] = dict.fromkeys(Model.model_fields)
    if (about := state.about) is not None:
        options = about.options
        said |= dict(family=about.family, source=about.source, digest=about.digest)
        said |= dict(width=options.width, max_tokens=options.max_tokens, vocabulary=options.vocabulary)
    layers = [] if about is None else [layer.name for layer in about.layers]
    heads = [layer.spec.num_heads for layer in state.layers]
    return Model(**said | dict(name=state.name, layers=layers, heads=heads, fault=state.fault))
