"""Attend request from the command line: asks a server over HTTP, or an engine in this process, and reports the answer.

Invariants: The same JSON body passes the same checks on both ways. Without a server there are no size limits and no settings; a
float64 query computes in float64, any other in float32. Arrays travel as base64, so no digit is lost. An error is one sentence.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import orjson
import pybase64
import typer

import attention_client
from attention_client.answer import EXTRAS
from attention_client.arrays import VALUES, bits_dtype
from attention_client.options import without_password
from service.commands.options import CommandFailed, console
from service.errors import InvalidInput

if TYPE_CHECKING:
    from service.attention.engine import Engine
    from service.layers.catalog import Served

TIMEOUT_S = 60.0
_FOREIGN = "a field of the answer is missing or has another type"


class Reply(NamedTuple):
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

    def report(self, out: Path | None, *, as_json: bool) -> None:
        """Print the answer as JSON or a summary of it; write its arrays to `out` if that is given."""
        if out is not None:
            self._write(out)
        if as_json:
            lists = {name: _lists(array) for name, array in self.arrays.items()}
            typer.echo(orjson.dumps(lists | self.facts).decode())
            return
        screen = console()
        for name, array in self.arrays.items():
            screen.print(f"{name} {_about(array)}")
        screen.print_json(data=self.facts)
        if out is not None:
            what = "the output alone is " if out.suffix == ".npy" and len(self.arrays) > 1 else ""
            screen.print(f"{what}written to {out}", soft_wrap=True)

    def _write(self, out: Path) -> None:
        try:
            with out.open("wb") as file:
                if out.suffix == ".npy":
                    np.save(file, self.arrays["output"], allow_pickle=False)
                else:
                    np.savez(file, allow_pickle=False, **self.arrays)
        except OSError as error:
            raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None


Ask: TypeAlias = Callable[[str | None, dict[str, Any]], Reply]


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
    answers: Any = engine.run([LayerCall(model.loaded, request.call)]).future.result()
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
    return Reply({name: _array(field) for name, field in fields.items()}, facts)


def _array(field: Any) -> np.ndarray:
    """Return a tensor of an answer; raises BadAnswer."""
    match field:
        case {"dtype": str(name), "shape": list(shape), "data": str(data)} if name in VALUES:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                bits = np.frombuffer(pybase64.b64decode(data), bits_dtype(name)).reshape(shape)
                # NumPy has no bfloat16; a float32 with the same upper bits is the same number.
                return (bits.astype("<i4") << 16).view("<f4") if name == "bfloat16" else bits
    raise attention_client.BadAnswer(_FOREIGN)


def _lists(array: np.ndarray) -> Any:
    """Return nested lists; "nan", "inf" and "-inf" stand for numbers that JSON does not have, as in the service's answers."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    return np.where(np.isfinite(array), array.astype(object), array.astype("U8")).tolist()


def _about(array: np.ndarray) -> str:
    about, wide = f"{array.dtype} {list(array.shape)}", array.astype("float64")
    return f"{about}  min {wide.min():.4g}  mean {wide.mean():.4g}  max {wide.max():.4g}" if array.size else about
