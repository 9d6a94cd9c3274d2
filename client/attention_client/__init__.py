"""Python client of the attention service: `Client` for synchronous code, `AsyncClient` for asyncio.

    from attention_client import Client, masks

    with Client("http://127.0.0.1:8000") as client:
        answer = client.attend("minilm-l3", x, masks=[masks.causal()], weights="heads")
        answer.output, answer.weights, answer.masked_rows

The names below are the public API. Only `http_transport.py` does network I/O.
Invariant: the package imports neither torch nor the service.
"""

from __future__ import annotations

from attention_client import conventions, masks
from attention_client.answer import Answer, AttentionAnswer, Batch, Layer, States, TextAnswer, Timing, Token, TopK
from attention_client.async_client import AsyncClient
from attention_client.errors import BadAnswer, ClientError, ConnectionFailed, ServiceError
from attention_client.masks import Mask
from attention_client.request import Request, Weights
from attention_client.sync_client import Client

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AsyncClient",
    "AttentionAnswer",
    "BadAnswer",
    "Batch",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "Layer",
    "Mask",
    "Request",
    "ServiceError",
    "States",
    "TextAnswer",
    "Timing",
    "Token",
    "TopK",
    "Weights",
    "conventions",
    "masks",
]
