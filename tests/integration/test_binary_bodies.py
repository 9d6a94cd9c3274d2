"""Safetensors and Open Inference bodies over HTTP: the form of the answer, and the refusals of damaged bodies."""

import gzip
import json
import threading
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from safetensors import deserialize
from safetensors.numpy import save

from tests.integration.forms import (
    BINARY,
    DATATYPES,
    DTYPES,
    SHORT,
    Request,
    as_base64,
    as_inference,
    as_safetensors,
    read_inference,
    read_json,
    read_safetensors,
)
from tests.integration.running import in_service

ATTEND = "/v1/layers/small/attend"
INFER = "/v2/models/small/infer"
ATTEND_MASK = '{"masks":[{"kind":"attend"}]}'
X = np.random.default_rng(3).standard_normal((2, 16)).astype(np.float32)
BODY = as_safetensors(Request(X))


async def post(service, content: bytes, path: str = ATTEND, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await service.client.post(path, content=content, headers={"content-type": BINARY, **named})


def test_a_body_that_is_much_larger_than_its_tensors_counts_in_the_queue(served):
    """The query is a view of the body, so all of it waits with the request."""
    x = np.zeros((200, 16), np.float32)

    async def story(service):
        for dtype, status in ((np.bool_, 200), (np.int64, 413)):
            content = save({"query": x, "masks.0.values": np.ones((200, 200), dtype)}, {"request": ATTEND_MASK})
            answer = await post(service, content, accept="application/json")
            assert answer.status_code == status, answer.text
        assert "bytes of decoded tensors" in answer.json()["detail"]

    served(story, queue_bytes=200_000)


@in_service()
async def test_the_answer_has_the_form_of_the_request_or_of_accept(service):
    json_body = json.dumps(Request(X).fields(as_base64)).encode()
    wanted = read_json((await service.attend(json.loads(json_body))).json())["output"]
    for content, came, accept, goes in (
        (BODY, BINARY, "*/*", BINARY),
        (BODY, BINARY, "application/json", "application/json"),
        (BODY, BINARY, "application/json;q=0.2, application/*;q=0.9", BINARY),
        (json_body, "application/json", BINARY, BINARY),
        (json_body, "application/json", "*/*", "application/json"),
    ):
        answer = await post(service, content, content_type=came, accept=accept)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == goes
        assert int(answer.headers["content-length"]) == len(answer.content)
        read = read_safetensors(answer.content) if goes == BINARY else read_json(answer.json())
        assert read["output"].tobytes() == wanted.tobytes()
    assert (await post(service, BODY, accept="application/json")).json()["output"]["data"] == as_base64(wanted)["data"]
    refused = await post(service, BODY, accept="text/html")
    assert (refused.status_code, refused.json()["code"]) == (406, "not_acceptable")
    assert refused.headers["content-type"] == "application/problem+json"


@in_service()
async def test_the_other_fields_of_an_answer_are_in_its_metadata(service):
    answer = await post(service, BODY)
    length = int.from_bytes(answer.content[:8], "little")
    facts = json.loads(json.loads(answer.content[8 : 8 + length])["__metadata__"]["response"])
    assert facts["masked_rows"] == 0
    assert facts["layer"]["name"] == "small"
    assert facts["batch"] == {"requests": 1, "sequences": 1, "tokens": 2}
    assert set(facts["timing_ms"]) == {"decode", "queue", "compute", "total"}
    assert "server-timing" in answer.headers


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_a_query_of_a_dtype_that_is_no_float_is_bad_dtype(served, dtype):
    short = {"uint8": "U8", "int32": "I32", "bool": "BOOL"}[dtype]
    data = np.zeros((2, 16), dtype).tobytes()
    header = json.dumps({"query": {"dtype": short, "shape": [2, 16], "data_offsets": [0, len(data)]}}).encode()

    async def story(service):
        answer = await post(service, len(header).to_bytes(8, "little") + header + data)
        assert (answer.status_code, answer.json()["code"]) == (422, "bad_dtype")

    served(story)


def test_a_malformed_tensor_is_the_same_error_in_every_form(served):
    bad = X.copy()
    bad[1, 3] = np.nan
    cases = [
        (Request(bad), "non_finite"),
        (Request(X[:, :5]), "bad_shape"),
        (Request(np.zeros((0, 16), np.float32)), "bad_shape"),
        (Request(X, key=X[:1], value=X), "bad_shape"),
        (Request(X, masks=[({"kind": "attend"}, np.ones((3, 3), bool))]), "bad_mask"),
        (Request(X, masks=[({"kind": "lengths"}, np.array([3, 1]))]), "bad_mask"),
        (Request(X, masks=[({"kind": "bias"}, np.array([np.inf, 0], np.float32))]), "non_finite"),
        (Request(X, masks=[({"kind": "causal", "align": "top_left"}, np.ones(2, bool))]), "unknown_field"),
        (Request(X, masks=[({"kind": "attend"}, None)]), "bad_mask"),
    ]

    async def story(service):
        for request, code in cases:
            as_json = await service.attend(request.fields(as_base64))
            as_bytes = await post(service, as_safetensors(request))
            assert as_bytes.json()["code"] == as_json.json()["code"] == code, as_bytes.text
            assert as_bytes.json()["param"] == as_json.json()["param"]

    served(story)


@pytest.mark.long
@in_service()
async def test_a_truncated_body_is_refused_and_a_flipped_bit_is_refused_or_answered_correctly(service):
    """Every cut and every bit of a whole small body."""
    for end in range(len(BODY)):
        answer = await post(service, BODY[:end])
        assert 400 <= answer.status_code < 500, end
    for at in range(len(BODY) * 8):
        flipped = bytearray(BODY)
        flipped[at // 8] ^= 1 << at % 8
        answer = await post(service, bytes(flipped))
        if answer.status_code == 200:
            assert _outputs(answer) == await _outputs_of_json(service, bytes(flipped)), at
        else:
            assert 400 <= answer.status_code < 500, (at, answer.status_code)


def _outputs(answer) -> bytes:
    return read_safetensors(answer.content)["output"].tobytes()


async def _outputs_of_json(service, body: bytes) -> bytes:
    """What the JSON form answers to the tensor that the library reads in the body."""
    ((name, told),) = deserialize(body)
    assert name == "query"
    dtypes = {short: DTYPES[name] for name, short in SHORT.items()}
    query = np.frombuffer(bytes(told["data"]), dtypes[told["dtype"]]).reshape(told["shape"])
    return read_json((await service.attend({"query": as_base64(query)})).json())["output"].tobytes()


@pytest.mark.long
def test_a_truncated_inference_body_is_refused_and_a_flipped_bit_is_refused_or_answered_correctly(served):
    body, head = as_inference(Request(X), binary=True)

    async def story(service):
        for end in range(len(body)):
            answer = await post(service, body[:end], INFER, inference_header_content_length=str(head))
            assert answer.status_code == 400, end
            assert set(answer.json()) == {"error"}
        for length in (*range(head), *range(head + 1, len(body) + 2)):
            answer = await post(service, body, INFER, inference_header_content_length=str(length))
            assert answer.status_code == 400, length
        for at in range(len(body) * 8):
            flipped = bytearray(body)
            flipped[at // 8] ^= 1 << at % 8
            answer = await post(service, bytes(flipped), INFER, inference_header_content_length=str(head))
            if answer.status_code == 200:
                found = read_inference(answer.content, answer.headers.get("inference-header-content-length"))
                assert found["output"].tobytes() == await _output_of(service, bytes(flipped), head), at
            else:
                assert answer.status_code == 400, (at, answer.status_code)
                assert set(answer.json()) == {"error"}

    served(story)


async def _output_of(service, body: bytes, head: int) -> bytes:
    told = json.loads(body[:head])["inputs"][0]
    dtypes = {datatype: DTYPES[name] for name, datatype in DATATYPES.items()}
    query = np.frombuffer(body[head:], dtypes[told["datatype"]]).reshape(told["shape"])
    return read_json((await service.attend({"query": as_base64(query)})).json())["output"].tobytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_inference_accepts_and_returns_compressed_bodies(served, coding, binary):
    pack = PACKERS[coding]
    many = np.random.default_rng(4).standard_normal((1, 40, 16)).astype(np.float32)
    body, head = as_inference(Request(many), binary=binary)
    length = {"inference_header_content_length": str(head)} if binary else {}

    async def story(service):
        plain = await post(service, body, INFER, **length)
        packed = await post(service, pack(body), INFER, content_encoding=coding, accept_encoding=coding, **length)
        assert packed.headers["content-encoding"] == coding
        assert "content-encoding" not in plain.headers
        name = "inference-header-content-length"
        # The client library has opened the body already.
        found = read_inference(packed.content, packed.headers.get(name))
        assert found["output"].tobytes() == read_inference(plain.content, plain.headers.get(name))["output"].tobytes()
        other = await post(service, body, INFER, content_encoding="zstd", **length)
        assert (other.status_code, set(other.json())) == (415, {"error"})

    served(story)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("accept", [BINARY, "application/json"])
def test_attend_accepts_and_returns_compressed_bodies(served, coding, accept):
    pack = PACKERS[coding]
    many = np.random.default_rng(4).standard_normal((900, 16)).astype(np.float32)
    body = as_safetensors(Request(many, weights={"form": "heads"}))

    async def story(service):
        plain = await post(service, body, accept=accept, accept_encoding="identity")
        packed = await post(service, pack(body), accept=accept, content_encoding=coding, accept_encoding=coding)
        assert packed.headers["content-encoding"] == coding
        read = read_safetensors if accept == BINARY else lambda content: read_json(json.loads(content))
        # The client library opens gzip by itself.
        content = (
            zstandard.ZstdDecompressor().decompressobj().decompress(packed.content)
            if coding == "zstd"
            else packed.content
        )
        assert read(content)["weights"].tobytes() == read(plain.content)["weights"].tobytes()
        offered = await post(service, body, accept=accept, accept_encoding="gzip, deflate, br, zstd")
        assert "content-encoding" not in offered.headers

    served(story)


@in_service(compress_offers=True)
async def test_answers_are_compressed_where_a_setting_enables_it(service):
    many = as_safetensors(Request(np.zeros((90, 16), np.float32)))
    answer = await post(service, many, accept_encoding="gzip, deflate")
    assert answer.headers["content-encoding"] == "gzip"
    small = await post(service, BODY, accept_encoding="gzip")
    assert "content-encoding" not in small.headers, "a small answer is not worth it"


def as_binary_inference(request: Request) -> tuple[bytes, dict[str, str]]:
    body, head = as_inference(request, binary=True)
    return body, {"inference_header_content_length": str(head)}


def checking_threads() -> set[str]:
    """The identities of this process's threads that check bodies: other services of the session have their own."""
    return {str(thread.ident) for thread in threading.enumerate() if thread.name.startswith("checking")}


@pytest.mark.parametrize(
    ("path", "write"),
    [(ATTEND, lambda request: (as_safetensors(request), {})), (INFER, as_binary_inference)],
    ids=["safetensors", "open inference"],
)
def test_only_large_bodies_are_decoded_off_the_event_loop(served, path, write):
    before = checking_threads()

    async def story(service):
        for request, is_large in ((Request(X), False), (Request(np.repeat(X, 200, 0)), True)):
            body, headers = write(request)
            answer = await post(service, body, path, **headers)
            assert answer.status_code == 200, answer.text
            assert bool(checking_threads() - before) == is_large

    served(story, decode_off_loop_bytes=8192)
    assert checking_threads() <= before, "it ends with the service"


@pytest.mark.parametrize("route", [ATTEND, "/v1/attention"])
def test_a_long_header_is_read_off_the_event_loop_however_small_the_body(served, route):
    """One of 256 KiB takes 35 ms if it, or the JSON in it, holds many small values."""
    before = checking_threads()

    async def story(service):
        for count, is_long in ((10_000, False), (40_000, True)):
            content = save({"query": X}, {"request": '{"masks":[' + "0," * count + "0]}"})
            assert len(content) < service.service.settings.decode_off_loop_bytes
            assert (await post(service, content, route)).status_code == 422
            assert bool(checking_threads() - before) == is_long

    served(story)
