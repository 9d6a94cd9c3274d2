"""The client and the real service, in processes of their own: the same bits as JSON in every dtype; and peers that misbehave."""

import asyncio
import socket
import threading
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pybase64
import pytest
import torch

from attention_client import AsyncClient, BadAnswer, Client, ConnectionFailed, Request, errors, masks
from tests.integration.forms import as_base64

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

RNG = np.random.default_rng(7)
X = RNG.standard_normal((5, 16)).astype(np.float32)
BATCH = RNG.standard_normal((3, 5, 16)).astype(np.float32)


@pytest.fixture
def client(url):
    with Client(url) as client:
        yield client


def in_json(url: str, layer: str, **fields) -> Any:
    answer = httpx2.post(f"{url}/v1/layers/{layer}/attend", json={**fields, "encoding": "base64"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_binary_and_json_give_the_same_bits(url, client, dtype):
    query = BATCH.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    answer = client.attend("small", query, masks=[masks.causal()], weights="heads")
    told = in_json(url, "small", query=as_base64(query), masks=[{"kind": "causal"}], weights={"form": "heads"})
    assert answer.output.dtype == query.dtype
    assert answer.output.tobytes() == pybase64.b64decode(told["output"]["data"])
    assert answer.weights.tobytes() == pybase64.b64decode(told["weights"]["data"])
    as_torch = torch.frombuffer(bytearray(query.tobytes()), dtype=getattr(torch, dtype)).reshape(query.shape)
    found = client.attend("small", as_torch, masks=[masks.causal()], weights="heads")
    assert found.output.dtype == as_torch.dtype
    assert found.output.reshape(-1).view(torch.uint8).numpy().tobytes() == answer.output.tobytes()


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        (masks.attend(np.tri(5, dtype=bool)), {"kind": "attend", "values": np.tri(5, dtype=bool).tolist()}),
        (masks.ignore(np.array([0, 0, 1, 0, 1], np.uint8)), {"kind": "ignore", "values": [0, 0, 1, 0, 1]}),
        (masks.lengths(3), {"kind": "lengths", "values": 3}),
        (masks.lengths(torch.tensor([1, 2, 3, 4, 0])), {"kind": "lengths", "values": [1, 2, 3, 4, 0]}),
        (masks.bias([0.5, float("-inf"), 0, 0, 1]), {"kind": "bias", "values": [0.5, "-inf", 0, 0, 1]}),
        (masks.window(1, 1), {"kind": "window", "left": 1, "right": 1}),
        (masks.causal(offset=-1), {"kind": "causal", "offset": -1}),
    ],
    ids=lambda mask: mask["kind"] if isinstance(mask, dict) else "",
)
def test_each_mask_means_what_it_means_in_json(url, client, mask, fields):
    answer = client.attend("small", X, masks=[mask], weights="mean")
    told = in_json(url, "small", query=X.tolist(), masks=[fields], weights={"form": "mean"})
    assert answer.output.tobytes() == pybase64.b64decode(told["output"]["data"])
    assert answer.weights.tobytes() == pybase64.b64decode(told["weights"]["data"])
    assert answer.masked_rows == told["masked_rows"]


def test_many_requests_keep_their_order_in_shared_batches(client):
    items = [RNG.standard_normal((n % 7 + 1, 16)).astype(np.float32) for n in range(60)]
    alone = [client.attend("small", item).output.tobytes() for item in items]
    assert [answer.output.tobytes() for answer in client.attend_many("small", iter(items), window=16)] == alone
    found = list(client.attend_many("small", [items[0], Request(items[1][:, :3]), items[2]], on_error="yield"))
    assert [type(outcome).__name__ for outcome in found] == ["Answer", "BadShape", "Answer"]


def test_asyncio_gives_the_same_bits(url, client):
    async def main():
        async with AsyncClient(url) as ours:
            assert await ours.is_ready()
            layers = await ours.layers()
            answers = await asyncio.gather(*(ours.attend("small", X) for _ in range(8)))
            many = [answer async for answer in ours.attend_many("small", [X] * 20, window=5)]
            return layers, answers, many

    layers, answers, many = asyncio.run(main())
    assert [layer.name for layer in layers] == ["cross", *(f"minilm-l{n}" for n in range(4)), "small", "zero"]
    assert {answer.output.tobytes() for answer in answers + many} == {client.attend("small", X).output.tobytes()}


class Peer:
    """A socket that answers each connection with these bytes, whatever the request, and then closes it or stays silent."""

    def __init__(self, *answers: bytes, hang_up: bool = True) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.answers, self.hang_up = list(answers), hang_up
        self.gone = threading.Event()
        self.open: list[socket.socket] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def _serve(self) -> None:
        for answer in self.answers:
            connection, _ = self.socket.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)
                if not self.hang_up:
                    while connection.recv(2**16):
                        pass
                    self.gone.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.thread.join(20)
        self.socket.close()


CUT = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\nContent-Length: 1000\r\n\r\nhalf"


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ConnectionFailed),
        (b"SSH-2.0-OpenSSH_9.9\r\n", ConnectionFailed),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, ConnectionFailed),
        (CUT, ConnectionFailed),
        (REDIRECT, BadAnswer),
    ],
)
def test_a_peer_that_is_no_attention_service_is_a_typed_error(answer, kind):
    """Answers of other codes and with other bodies are in `unit/client/`."""
    with Peer(answer) as peer, Client(peer.url, attempts=1) as client, pytest.raises(kind):
        client.attend("small", X)


def test_a_request_on_a_cut_connection_is_retried():
    whole = b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"layers": []}'
    with Peer(CUT, whole) as peer, Client(peer.url) as client:
        assert client.layers() == []


def test_a_peer_that_drips_for_ever_meets_the_deadline_and_is_disconnected():
    with Peer(CUT, hang_up=False) as peer, Client(peer.url) as client:
        with pytest.raises(errors.DeadlineExceeded):
            client.attend("small", X, timeout_s=0.2)
        assert peer.gone.wait(20)
