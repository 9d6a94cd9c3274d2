"""The Python client: `Client` for plain code, `AsyncClient` for asyncio.

    from service.client import Client, masks

    with Client("http://127.0.0.1:8000") as client:
        answer = client.attend("minilm-l3", x, masks=[masks.causal()], weights="heads")
        answer.output, answer.weights, answer.masked_rows

Lives here: the names that a caller imports; what they are is in `calling/`, which is pure but for `line.py`.
Laws: importing this imports neither torch nor anything of the server.
"""

from __future__ import annotations

from service.calling import masks
from service.calling.answer import Answer, Batch, Layer, Timing, TopK
from service.calling.async_client import AsyncClient
from service.calling.masks import Mask
from service.calling.plain_client import Client
from service.calling.problem import BadAnswer, ClientError, ConnectionFailed
from service.calling.request import Request, Weights
from service.errors import ServiceError

__all__ = [
    "Answer",
    "AsyncClient",
    "BadAnswer",
    "Batch",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "Layer",
    "Mask",
    "Request",
    "ServiceError",
    "Timing",
    "TopK",
    "Weights",
    "masks",
]
