"""JSON process: parses large JSON bodies for a worker (`python -m service.wire.json_process`).

Standard input is a socket, which carries requests and answers one after another. Invariants: The process does not import torch.
It runs the same `parse` as a worker. An answer is JSON and bytes, not a pickle, so reading it runs no code. When the worker
ends, however it ends, the socket closes and this process ends.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from service.errors import BadJson, CostLimit, DuplicateKey, InvalidInput, JsonTooDeep, NonFinite, ServiceError
from service.wire.json_document import LONG_STRING, Json, parse
from service.wire.number_list import Fault, NumberList

REQUEST = struct.Struct("<QII")
"""Bytes of the body, its maximum depth, its maximum count of numbers."""
ANSWER = struct.Struct("<QQ")
"""Bytes of the answer's JSON, and of the arrays and long strings after it."""
_ERRORS = {kind.code: kind for kind in (BadJson, CostLimit, DuplicateKey, InvalidInput, JsonTooDeep, NonFinite)}


def serve(connection: socket.socket) -> None:
    """Answer requests until the other end closes."""
    with connection, connection.makefile("rb") as requests:
        while head := requests.read(REQUEST.size):
            num_bytes, max_depth, max_numbers = REQUEST.unpack(head)
            text, blobs = _answer(requests.read(num_bytes), max_depth, max_numbers)
            connection.sendall(ANSWER.pack(len(text), sum(map(len, blobs))))
            for data in (text, *blobs):
                connection.sendall(data)


def _answer(body: bytes, max_depth: int, max_numbers: int) -> tuple[bytes, list[bytes]]:
    try:
        return pack(parse(body, max_depth=max_depth, max_numbers=max_numbers))
    except MemoryError:
        fields = [CostLimit.code, "there is not enough memory to parse a body of this size", None]
    except ServiceError as error:  # a name that stays would hold the document: the error's frames lead back to this one
        fields = [error.code, error.message, error.param]
    return json.dumps(fields).encode(), []


def pack(document: dict[str, Json]) -> tuple[bytes, list[bytes]]:
    """Return the JSON of an answer and the bytes of its arrays and long strings; `parts` gives the place of each."""
    parts, blobs = [], []
    for container, name, path in _large(document):
        found = container[name]
        if isinstance(found, str):
            about, data = None, found.encode("utf-8", "surrogatepass")
        else:
            fault = found.fault and (found.fault.index, found.fault.what)
            about = found.shape, found.is_whole, found.first_boolean, found.first_minus_inf, fault
            data = found.values.tobytes()
        parts.append((path, len(data), about))
        blobs.append(data)
        container[name] = None
    return json.dumps({"document": document, "parts": parts}).encode(), blobs


def unpack(text: bytes, blobs: memoryview) -> dict[str, Any]:
    """Return the packed document, or raise the packed ServiceError."""
    answer = json.loads(text)
    if isinstance(answer, list):
        code, message, param = answer
        raise _ERRORS[code](message, param=param)
    document: dict[str, Any] = answer["document"]
    at = 0
    for (*path, name), num_bytes, about in answer["parts"]:
        container: Any = document
        for step in path:
            container = container[step]
        data = blobs[at : at + num_bytes]
        at += num_bytes
        if about is None:
            container[name] = str(data, "utf-8", "surrogatepass")
            continue
        shape, is_whole, first_boolean, first_minus_inf, fault = about
        fault = fault and Fault(tuple(fault[0]), fault[1])
        container[name] = NumberList(np.frombuffer(data), tuple(shape), is_whole, first_boolean, first_minus_inf, fault)
    return document


def _large(container: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any, tuple[str | int, ...]]]:
    """Yield every NumberList and long string: its container, its name there, and the path to it."""
    for name, found in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if isinstance(found, NumberList) or (isinstance(found, str) and len(found) > LONG_STRING):
            yield container, name, (*path, name)
        elif isinstance(found, dict | list):
            yield from _large(found, (*path, name))


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):  # meant for the worker; this process ends when the worker does
        signal.signal(signum, signal.SIG_IGN)
    serve(socket.socket(fileno=0))
