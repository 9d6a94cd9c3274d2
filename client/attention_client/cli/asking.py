"""Asking: sends the requests of a command to a service, and reports the answer.

Invariants: Arrays travel as base64, so no digit is lost. An error is one sentence.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.highlighter import JSONHighlighter

from attention_client.answer import EXTRAS, PRESENT
from attention_client.arrays import VALUES, bits_dtype
from attention_client.cli.arguments import by_option
from attention_client.cli.terminal import Screen, printable
from attention_client.errors import BadAnswer, ClientError, ConnectionFailed, InvalidInput, ServiceError
from attention_client.options import without_password
from attention_client.sync_client import Client

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0
_REMEDY = " Start one with `attention-service serve`, or give the address of another with --url."
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
        raise BadAnswer(f"the answer lacks {name} of the requested shape")

    def report(self, out: Path | None, *, as_json: bool) -> None:
        """Print the answer as JSON or a summary of it; write its arrays to `out` if that is given."""
        if out is not None:
            self._write(out)
        if as_json:
            lists = {name: _lists(array) for name, array in self.arrays.items()}
            typer.echo(printable(_json_text(lists | self.facts)))
            return
        screen = Screen()
        for name, array in self.arrays.items():
            screen.print(f"{name} {_about(array)}")
        lines = json.dumps(self.facts, indent=2, ensure_ascii=False).split("\n")
        screen.print(JSONHighlighter()("\n".join(map(printable, lines))), soft_wrap=True)
        if out is not None:
            what = "the output alone is " if out.suffix.lower() == ".npy" and len(self.arrays) > 1 else ""
            screen.print(f"{what}written to {out}", soft_wrap=True)

    def _write(self, out: Path) -> None:
        try:
            with out.open("wb") as file:
                if out.suffix.lower() == ".npy":
                    np.save(file, self.arrays["output"], allow_pickle=False)
                else:
                    np.savez(file, allow_pickle=False, **self.arrays)
        except OSError as error:
            raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None


class Ask:
    """Sends one body after another, over one client; layer None is attention on the body's own tensors."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __call__(self, layer: str | None, body: dict[str, Any]) -> Reply:
        return _reply(self._client.attention_json(body) if layer is None else self._client.attend_json(layer, body))

    def of_text(self, model: str, body: dict[str, Any]) -> Reply:
        return _reply(self._client.attend_text_json(model, body))

    def only_model(self) -> str:
        """Return the name of the one model that the service has; raises InvalidInput if it has none or several."""
        names: list[str] = [model["name"] for model in self._client.models()]
        if len(names) != 1:
            there = f"several models, {', '.join(names)}: name one with --model" if names else "no model"
            raise InvalidInput(f"the service has {there}")
        return names[0]


@contextlib.contextmanager
def asking(url: str | None, api_key: str | None = None, options: Mapping[str, str] | None = None) -> Iterator[Ask]:
    """Yield what asks the service at `url`, or that of this machine.

    It raises ClientError with the service's message, or with that of the client, in which `options` replace the fields that
    they gave.
    """
    try:
        # One attempt: a user at a terminal sees the error at once and can retry.
        with Client(url or URL, timeout_s=TIMEOUT_S, attempts=1, api_key=api_key) as client:
            yield Ask(client)
    except BadAnswer as error:
        where = without_password(url or URL)
        raise ClientError(f"{where} does not answer as the service does: {error.message}") from None
    except ServiceError as error:
        known = f"{error.status} {error.code}: " if error.status else ""
        is_nobody_there = isinstance(error, ConnectionFailed) and not error.status and not url
        words = by_option(error.message, {"url": "--url", "api_key": "--api-key", **(options or {})})
        raise ClientError(known + words + (_REMEDY if is_nobody_there else "")) from None


def _reply(found: dict[str, Any]) -> Reply:
    """Return the reply in the JSON object of an answer; raises BadAnswer if another program than the service made it."""
    match found:
        case {"output": output, "weights": {"values": values, "indices": indices, "rest": rest}}:
            fields = {"output": output, "values": values, "indices": indices, "rest": rest}
        case {"output": output, "weights": weights}:
            fields = {"output": output} | ({} if weights is None else {"weights": weights})
        case _:
            raise BadAnswer(_FOREIGN)
    fields |= {name: found[name] for name in (*EXTRAS, *PRESENT) if found.get(name) is not None}
    facts = {name: value for name, value in found.items() if name not in ("output", "weights", *EXTRAS, *PRESENT)}
    try:
        json.dumps(facts, ensure_ascii=False, allow_nan=False, indent=2).encode()
    except (ValueError, RecursionError):  # a number, a text or a depth that the command could not print
        raise BadAnswer(_FOREIGN) from None
    return Reply({name: _array(field) for name, field in fields.items()}, facts)


def _array(field: Any) -> np.ndarray:
    """Return a tensor of an answer; raises BadAnswer."""
    match field:
        case {"dtype": str(name), "shape": list(shape), "data": str(data)} if name in VALUES:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                bits = np.frombuffer(base64.b64decode(data), bits_dtype(name)).reshape(shape)
                if [*bits.shape] != shape:  # NumPy takes -1 for what is left
                    raise BadAnswer(_FOREIGN)
                # NumPy has no bfloat16; a float32 with the same upper bits is the same number.
                return (bits.astype("<i4") << 16).view("<f4") if name == "bfloat16" else bits
    raise BadAnswer(_FOREIGN)


def _json_text(fields: dict[str, Any]) -> str:
    """Return the fields as JSON without blanks; ValueError for a number that JSON lacks."""
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _lists(array: np.ndarray) -> Any:
    """Return nested lists; "nan", "inf" and "-inf" stand for numbers that JSON does not have, as in the service's answers."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    return np.where(np.isfinite(array), array.astype(object), array.astype("U8")).tolist()


def _about(array: np.ndarray) -> str:
    about, wide = f"{array.dtype} {list(array.shape)}", array.astype("float64")
    return f"{about}  min {wide.min():.4g}  mean {wide.mean():.4g}  max {wide.max():.4g}" if array.size else about
