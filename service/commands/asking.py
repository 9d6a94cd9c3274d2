"""Attend request from the command line: asks a server over HTTP, or an engine in this process.

Invariants: The same JSON body passes the same checks on both ways. Without a server there are no size limits and no settings; a
float64 query computes in float64, any other in float32. Arrays travel as base64, so no digit is lost. An error is one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson
import pybase64

import attention_client
from attention_client.answer import EXTRAS
from attention_client.arrays import VALUES
from attention_client.options import without_password
from service.commands.options import CommandFailed
from service.errors import InvalidInput

if TYPE_CHECKING:
    from service.attention.engine import Engine
    from service.layers.catalog import Served

TIMEOUT_S = 60.0
_FOREIGN = "a field of the answer is missing or has another type"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """Arrays by name: "output", and "weights", or "values", "indices" and "rest"; `facts` has the other fields.

    The output is [L, D] or [B, L, D]. Without a layer it has the layout of the query, and the scores, the lse and the present key
    and value that the answer has are among the arrays.
    """

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]

    def array(self, name: str, *shapes: tuple[int | None, ...]) -> np.ndarray:
        """Return one of the arrays, which must have one of these shapes (None is any size above 0).

        `asking` reports the BadAnswer that this raises otherwise.
        """
        found = self.arrays.get(name)
        if found is not None and found.size:
            for shape in shapes:
                if len(shape) == found.ndim and all(a in (None, b) for a, b in zip(shape, found.shape, strict=True)):
                    return found
        raise attention_client.BadAnswer(f"the answer lacks {name} of the requested shape")


Ask: TypeAlias = Callable[[str | None, dict[str, Any]], Reply]


def tensor_field(array: np.ndarray) -> dict[str, Any]:
    """Return an array as the contract's base64 tensor object."""
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": pybase64.b64encode(data).decode()}


def load_array(path: Path, name: str | None = None) -> np.ndarray:
    """Return the array of a .npy file; with a `name` also that array of an .npz file, or its only array."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if name is not None and not isinstance(found, np.ndarray):
                found = found[name if name in found or len(found) != 1 else next(iter(found))]
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from None
    except KeyError:
        raise InvalidInput(f"{path} has no array called {name}") from None
    except Exception as error:  # for damaged bytes numpy and zipfile raise a dozen unrelated types
        raise InvalidInput(f"{path} is not a readable {'.npy or .npz' if name else '.npy'} file") from error
    if not isinstance(found, np.ndarray):
        raise InvalidInput(f"{path} must hold one array (.npy)")
    return found


@contextlib.contextmanager
def asking(where: Path | str, api_key: str | None = None) -> Iterator[Ask]:
    """Yield a function that sends one body after another, over one client of a URL or to one engine in this process.

    If `where` is a directory, the engine computes with the layers stored there. Layer None is attention on the body's own
    tensors. The function raises CommandFailed with the server's message or, without a server, the error of the check.
    """
    if isinstance(where, Path):
        # Imported here, because asking a server needs no torch, which takes seconds to import.
        import torch

        from service.attention.engine import Engine, EngineOptions
        from service.layers.catalog import ServedAttention, ServedLayer
        from service.layers.store import Store

        with contextlib.closing(Engine(EngineOptions(torch.device("cpu"), torch.float32))) as engine:

            @functools.cache  # a layer is read, loaded and self-checked once for all bodies
            def served(layer: str | None) -> Served:
                if layer is None:
                    return ServedAttention(engine.load(None, {}).result())
                stored = Store(where).load(layer)
                return ServedLayer(stored, engine.load(stored.spec, stored.tensors).result())

            yield lambda layer, body: _computed(engine, served(layer), body)
        return
    try:
        # One attempt: a user at a terminal sees the error at once and can retry.
        with attention_client.Client(where, timeout_s=TIMEOUT_S, attempts=1, api_key=api_key) as client:
            yield lambda layer, body: _reply(
                client.attention_json(body) if layer is None else client.attend_json(layer, body)
            )
    except attention_client.BadAnswer as error:
        raise CommandFailed(f"{without_password(where)} does not answer as the service does: {error.message}") from None
    except attention_client.ServiceError as error:
        raise CommandFailed((f"{error.status} {error.code}: " if error.status else "") + error.message) from None


def _computed(engine: Engine, model: Served, body: dict[str, Any]) -> Reply:
    from service.attention.engine import LayerCall
    from service.batching.job import BatchInfo
    from service.layers.catalog import ServedAttention
    from service.wire.answer import write_json
    from service.wire.attend_request import AnswerFacts, RequestLimits, check_request
    from service.wire.attention_request import check_attention
    from service.wire.json_document import parse

    unlimited = RequestLimits(*(2**62,) * 5)
    document = parse(json.dumps(body).encode(), max_depth=32, max_numbers=2**62)
    if isinstance(model, ServedAttention):
        request = check_attention(document, unlimited).counted()
    else:
        request = check_request(document, model.name, model.spec, unlimited).counted()
    answers: Any = engine.run([LayerCall(model.loaded, request.call)]).result()  # no batch is preempted here
    batch = BatchInfo(1, request.cost.sequences, request.cost.tokens)
    facts = AnswerFacts(request.masked_rows, model.name, model.digest, batch, dict)
    return _reply(orjson.loads(b"".join(write_json(request.tensors(answers[0]), facts, request.form))))


def _reply(found: dict[str, Any]) -> Reply:
    """Return the reply in the JSON object of an answer; raises BadAnswer if another program than the service made it."""
    match found:
        case {"output": output, "weights": {"values": values, "indices": indices, "rest": rest}}:
            fields = {"output": output, "values": values, "indices": indices, "rest": rest}
        case {"output": output, "weights": weights}:
            fields = {"output": output} | ({} if weights is None else {"weights": weights})
        case _:
            raise attention_client.BadAnswer(_FOREIGN)
    fields |= {name: found[name] for name in EXTRAS if found.get(name) is not None}
    facts = {name: value for name, value in found.items() if name not in ("output", "weights", *EXTRAS)}
    try:
        orjson.dumps(facts)
    except orjson.JSONEncodeError:  # a number or a text that the command could not print
        raise attention_client.BadAnswer(_FOREIGN) from None
    return Reply(
        {name: _array(field, "int32" if name == "indices" else "float32") for name, field in fields.items()}, facts
    )


def _array(field: Any, name: str) -> np.ndarray:
    """Return a tensor of an answer, in any of its forms, where lists have the dtype `name`; "nan" and "inf" become floats.

    Raises BadAnswer.
    """
    match field:
        case list():
            shape = None
            data: list[Any] | str = field
        case {"dtype": str(name), "shape": list(shape), "data": list() | str() as data} if name in VALUES:
            pass
        case _:
            raise attention_client.BadAnswer(_FOREIGN)
    # NumPy has no bfloat16; a float32 with the same upper bits is the same number.
    dtype = np.dtype("float32" if name == "bfloat16" else name).newbyteorder("<")
    try:
        if isinstance(data, list):
            found = np.array(data, dtype=object).astype(dtype)
        elif name == "bfloat16":
            found = (np.frombuffer(pybase64.b64decode(data), "<u2").astype("<u4") << 16).view(dtype)
        else:
            found = np.frombuffer(pybase64.b64decode(data), dtype)
        return found if shape is None else found.reshape(shape)
    except (TypeError, ValueError, OverflowError):  # values of another type, too few of them, or ragged lists
        raise attention_client.BadAnswer(_FOREIGN) from None
