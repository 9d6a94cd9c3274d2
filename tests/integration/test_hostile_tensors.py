"""Cases of the catalogue (groups J, T, B) that need a whole service: each with the other values that the same rule covers."""

import asyncio
import json
import sys

import numpy as np
import pytest

from tests.integration.forms import BINARY, Request, as_base64, as_inference, as_safetensors
from tests.integration.running import in_service, in_shared_service

X = [[0.5] * 16, [0.25] * 16]
ATTEND, INFER = "/v1/layers/small/attend", "/v2/models/small/infer"
STATUS = {"bad_json": 400, "cost_limit": 413}


def nan_at(place: int, rows: int = 2) -> dict:
    values = np.full((rows, 16), 0.5, np.float32)
    values.ravel()[place] = np.nan
    return as_base64(values)


CASES = {
    "J10": [
        ({"query": X, "\0": 1}, "unknown_field"),
        ({"query": X, "que\x1bry": 1}, "unknown_field"),
        ({"query": X, "weights": {"form": "heads\0"}}, "invalid"),
        ({"query": X, "encoding": "\0list"}, "invalid"),
        ({"query": X, "masks": [{"kind": "causal\x7f"}]}, "bad_mask"),
    ],
    "J13": [
        ({"query": X, "mask": []}, "unknown_field"),
        ({"query": X, "Query": X}, "unknown_field"),
        ({"query": X, "": 1}, "unknown_field"),
        ({"query": X, "weights": {"form": "mean", "head": [1]}}, "unknown_field"),
        ({"query": X, "masks": [{"kind": "window", "lef": 1}]}, "unknown_field"),
    ],
    "T6": [
        ({"query": [[0.5] * 15]}, "bad_shape"),
        ({"query": [[0.5] * 17]}, "bad_shape"),
        ({"query": X, "key": [[0.5] * 12], "value": [[0.5] * 16]}, "bad_shape"),
        ({"query": [[[0.5] * 8]]}, "bad_shape"),
    ],
    "T7": [
        ({"query": [X], "key": [X, X]}, "bad_shape"),
        ({"query": [X, X], "key": [X]}, "bad_shape"),
        ({"query": X, "key": [X]}, "bad_shape"),
        ({"query": [X], "key": X}, "bad_shape"),
        ({"query": X, "key": X, "value": X[:1]}, "bad_shape"),
        ({"query": X, "value": [*X, *X]}, "bad_shape"),
    ],
    "T22": [
        *[({"query": X, "scale": scale}, "unknown_field") for scale in (0, 1e40, -1, None, "1", [1])],
        ({"query": X, "dropout": 0.5}, "unknown_field"),
        ({"query": X, "num_heads": 3}, "unknown_field"),
        ({"query": X, "weights": {"form": "heads", "heads": [0, 4]}}, "invalid"),
    ],
}


@pytest.mark.parametrize("case", CASES)
@in_shared_service()
async def test_a_wrong_body_gets_its_code(service, case):
    for body, code in CASES[case]:
        answer = await service.attend(body)
        assert (answer.status_code, answer.json()["code"]) == (STATUS.get(code, 422), code), body
        if case == "T6":
            assert "16" in answer.json()["detail"]


@pytest.mark.parametrize("field", ["query", "key", "value"])
@in_service()
async def test_one_nan_is_refused_at_any_index_and_other_requests_keep_their_bits_T14(service, field):
    good = [(await service.attend({"query": [[n / 8] * 16] * (n + 1)})).json()["output"] for n in range(6)]
    for place in (0, 7, 31):
        bad = service.attend({"query": X, "key": X, "value": X, field: nan_at(place)})
        beside = [service.attend({"query": [[n / 8] * 16] * (n + 1)}) for n in range(6)]
        refused, *answers = await asyncio.gather(bad, *beside)
        assert (refused.status_code, refused.json()["code"]) == (422, "non_finite")
        assert refused.json()["param"].startswith(f"/{field}")
        assert [answer.json()["output"] for answer in answers] == good


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_the_limit_of_sequences_is_inclusive_T13(served, limit):
    async def story(service):
        row = [[0.5] * 16]
        answer = await service.attend({"query": [row] * limit})
        assert (answer.status_code, answer.json()["batch"]["sequences"]) == (200, limit)
        refused = await service.attend({"query": [row] * (limit + 1)})
        assert (refused.status_code, refused.json()["code"]) == (413, "cost_limit")
        assert f"{limit + 1:,}" in refused.json()["detail"]

    served(story, max_sequences=limit)


NAMES = [
    "..%2Fetc", "a%2F..%2Fb", "%2Fetc%2Fpasswd", "small%2F", "%20..", "%09", "x" * 65, "x" * 10_000, "%E2%80%AEsmall", "small%00",
    "~", "SMALL", ".small", "-x", "%C3%A9", "nobody",
]  # fmt: skip


class Opened:
    """The files that Python opens while it listens; an audit hook cannot be removed, only switched off."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.listens = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if self.listens and event == "open":
            self.paths.append(str(args[0]))


def test_no_name_of_a_layer_reaches_the_file_system_T25(served):
    opened = Opened()

    async def story(service):
        opened.listens = True
        for name in NAMES:
            layer = f"/v1/layers/{name}"
            for method, path in (("POST", f"{layer}/attend"), ("GET", layer), ("PUT", layer), ("DELETE", layer)):
                answer = await service.client.request(method, path, json={"query": X})
                assert answer.json()["code"] in ("layer_not_found", "not_found", "method_not_allowed"), (method, name)
            infer = await service.client.post(f"/v2/models/{name}/infer", json={"query": X})
            assert infer.status_code == 404, name
        opened.listens = False
        assert [path for path in opened.paths if "etc" in path or ("layers" in path and "nobody" not in path)] == []

    served(story, admin=True)


def binary(query) -> bytes:
    return as_safetensors(Request(np.asarray(query, np.float32)))


async def send(service, body: bytes, path: str = ATTEND, **headers: str):
    told = {"content-type": BINARY, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await service.client.post(path, content=body, headers=told)


@pytest.mark.parametrize(
    "body",
    [
        b"OIP1" + binary(X),
        json.dumps({"query": X}).encode(),
        b"\x93NUMPY\x01\x00" + bytes(100),
        b"PK\x03\x04" + binary(X),
        b"\x80\x04\x95" + bytes(100),
    ],
    ids=["B1-magic", "B1-json", "B1-npy", "B1-zip", "B1-pickle"],
)
@in_shared_service()
async def test_another_format_under_our_media_type_is_bad_binary(service, body):
    answer = await send(service, body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_binary")


@in_service()
async def test_big_endian_dtypes_are_unknown_B7(service):
    """Neither protocol has a flag or a dtype for them, so an invented one is refused."""
    for flag in ({"byteorder": "big"}, {"endian": ">"}):
        answer = await service.attend({"query": {"dtype": "float32", "shape": [2, 16], "data": [0.5] * 32, **flag}})
        assert (answer.status_code, answer.json()["code"]) == (422, "unknown_field")
    for dtype in (">f4", "float32be", "F32BE"):
        answer = await service.attend({"query": {"dtype": dtype, "shape": [2, 16], "data": [0.5] * 32}})
        assert (answer.status_code, answer.json()["code"]) == (422, "bad_dtype")


def inference(*names: str, data_of: int | None = None, outputs: list | None = None) -> tuple[bytes, dict[str, str]]:
    """A binary request with these inputs and the data of the first `data_of` of them."""
    values = np.full((1, 2, 16), 0.5, np.float32)
    size = {"binary_data_size": values.nbytes}
    inputs = [{"name": name, "shape": [1, 2, 16], "datatype": "FP32", "parameters": size} for name in names]
    head = json.dumps({"inputs": inputs, **({} if outputs is None else {"outputs": outputs})}).encode()
    data = values.tobytes() * (len(names) if data_of is None else data_of)
    return head + data, {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(inference("query", "key", data_of=1), id="B12-one-of-two"),
        pytest.param(inference("query", data_of=2), id="B12-two-of-one"),
        pytest.param(inference("query", data_of=0), id="B12-none"),
        pytest.param(inference("query", "query"), id="B13-twice"),
        pytest.param(inference("query", "other"), id="B13-extra"),
        pytest.param(inference("query", outputs=[{"name": f"o{i}"} for i in range(100_000)]), id="B14-many"),
        pytest.param(inference("query", outputs=[{"name": "output"}] * 2), id="B14-twice"),
        pytest.param(inference("query", outputs=[{"name": "other"}]), id="B14-unknown"),
    ],
)
def test_inputs_and_outputs_that_do_not_add_up_are_refused(served, given):
    body, headers = given

    async def story(service):
        answer = await service.client.post(INFER, content=body, headers=headers)
        assert answer.status_code in (400, 413), answer.text
        assert list(answer.json()) == ["error"]
        assert len(answer.content) <= 4096
        good, told = as_inference(Request(np.full((1, 2, 16), 0.5, np.float32)), binary=True)
        again = await service.client.post(INFER, content=good, headers={"inference-header-content-length": str(told)})
        assert again.status_code == 200

    served(story)
