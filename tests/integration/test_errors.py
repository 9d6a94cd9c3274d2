"""Everything that can be wrong with one request: the code, the form of the answer, and no other request affected."""

import asyncio
import base64
import gc
import gzip
import json
import struct
import types

import numpy as np
import pytest
import torch
import zstandard

from tests.integration.forms import as_base64
from tests.integration.running import in_service

X = [[0.5] * 16, [0.25] * 16]
SECRET = "s3cret-marker"


def b64(values, dtype="float32") -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def tensor(**changed) -> dict:
    return {"dtype": "float32", "shape": [2, 16], "data": b64(X), **changed}


def masks(*found) -> dict:
    return {"query": X, "masks": list(found)}


async def post_whole(service, content: bytes, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    path = "/v1/layers/small/attend"
    return await service.client.post(path, content=content, headers={"content-type": "application/json", **named})


NAN_BITS = base64.b64encode(struct.pack("<f", float("nan")) * 32).decode()

RAW = [
    (b"", "bad_json"),
    (b"{", "bad_json"),
    (b'{"query": [[1,2],]}', "bad_json"),
    (b"{'query': 1}", "bad_json"),
    (b'{"query": 1} // x', "bad_json"),
    (b'{"query": [[NaN]]}', "bad_json"),
    (b'{"query": 1, "other": Infinity}', "bad_json"),
    (b'\xff{"query": 1}', "bad_json"),
    (b'\xef\xbb\xbf{"query": 1}', "bad_json"),
    ('{"query": 1}'.encode("utf-16"), "bad_json"),
    (b'{"query": 1, "query": 2}', "duplicate_key"),
    (b'{"query": {"shape": [1], "shape": [1]}}', "duplicate_key"),
    (b'{"query": ' + b"[" * 33 + b"]" * 33 + b"}", "json_too_deep"),
    (b'{"unknown": ' + b"[" * 16_000, "json_too_deep"),
    (b"[" * 16_000, "json_too_deep"),
    (b"[" * 100_000, "cost_limit"),
    (b'{"query": [[' + b"9" * 4301 + b"]]}", "bad_json"),
    (b"null", "invalid"),
    (b"[]", "invalid"),
    (b'"x"', "invalid"),
    (b"1", "invalid"),
    (b"{}", "invalid"),
]

WRONG = [
    ({"query": X, SECRET: 1}, "unknown_field"),
    ({"query": X, "maskz": []}, "unknown_field"),
    ({"query": X, "weights": {"form": "heads", SECRET: 1}}, "unknown_field"),
    (masks({"kind": "causal", SECRET: 1}), "unknown_field"),
    ({"query": tensor(extra=1)}, "unknown_field"),
    ({"query": [[True] * 16]}, "bad_dtype"),
    ({"query": [["1.5"] * 16]}, "bad_dtype"),
    ({"query": [[None] * 16]}, "bad_dtype"),
    ({"query": [[{}] * 16]}, "bad_dtype"),
    ({"query": SECRET}, "invalid"),
    ({"query": None}, "invalid"),
    ({"query": X[0]}, "bad_shape"),
    ({"query": 3}, "bad_shape"),
    ({"query": [[[X]]]}, "bad_shape"),
    ({"query": []}, "bad_shape"),
    ({"query": [[]]}, "bad_shape"),
    ({"query": [X[0], X[0][:-1]]}, "bad_shape"),
    ({"query": [X[0], 1]}, "bad_shape"),
    ({"query": [[0.5] * 15]}, "bad_shape"),
    ({"query": [[3.5e38] * 16]}, "non_finite"),
    ({"query": tensor(dtype="float16", data=[70000] * 32)}, "non_finite"),
    ({"query": tensor(data=NAN_BITS)}, "non_finite"),
    ({"query": tensor(dtype="complex64")}, "bad_dtype"),
    ({"query": tensor(dtype="float32 ")}, "bad_dtype"),
    ({"query": tensor(dtype="int32")}, "bad_dtype"),
    ({"query": tensor(dtype=3)}, "bad_dtype"),
    ({"query": tensor(shape=[2, 17])}, "bad_shape"),
    ({"query": tensor(shape=[-2, -16])}, "bad_shape"),
    ({"query": tensor(shape=[2.0, 16])}, "bad_shape"),
    ({"query": tensor(shape=["2", 16])}, "bad_shape"),
    ({"query": tensor(shape=[True, 16])}, "bad_shape"),
    ({"query": tensor(shape=[2, 16, None])}, "bad_shape"),
    ({"query": tensor(shape=[1] * 64)}, "bad_shape"),
    ({"query": tensor(shape=[])}, "bad_shape"),
    ({"query": tensor(shape=[0, 16], data="")}, "bad_shape"),
    ({"query": tensor(data="AAA")}, "bad_encoding"),
    ({"query": tensor(data="AA-_")}, "bad_encoding"),
    ({"query": tensor(data=b64(X)[:-4] + "AAB=")}, "bad_encoding"),
    ({"query": tensor(data=b64(X) + "\n")}, "bad_encoding"),
    ({"query": X, "key": [[0.5] * 15]}, "bad_shape"),
    ({"query": X, "key": [X]}, "bad_shape"),
    ({"query": [X], "key": [X, X]}, "bad_shape"),
    ({"query": X, "key": X, "value": [X[0]]}, "bad_shape"),
    (masks([[True, False]]), "mask_kind_required"),
    (masks({"values": [True, False]}), "mask_kind_required"),
    (masks({"kind": "padding", "values": []}), "bad_mask"),
    (masks({"kind": "attend"}), "bad_mask"),
    (masks({"kind": "attend", "values": [True]}, {"kind": "attend", "values": [True] * 3}), "bad_mask"),
    (masks({"kind": "attend", "values": [2, 0]}), "bad_mask"),
    (masks({"kind": "attend", "values": [0.5, 1]}), "bad_mask"),
    (masks({"kind": "attend", "values": ["true", 1]}), "bad_mask"),
    (masks({"kind": "bias", "values": ["inf", 1]}), "bad_dtype"),
    (masks({"kind": "bias", "values": [[3.5e38, 0]]}), "non_finite"),
    (masks({"kind": "lengths", "values": 3}), "bad_mask"),
    (masks({"kind": "lengths", "values": -1}), "bad_mask"),
    (masks({"kind": "lengths", "values": [1]}), "bad_mask"),
    (masks({"kind": "lengths", "values": 10**30}), "bad_mask"),
    (masks({"kind": "causal", "align": "top_left", "offset": 1}), "bad_mask"),
    (masks({"kind": "causal", "align": "middle"}), "bad_mask"),
    (masks({"kind": "causal", "offset": 1.5}), "bad_mask"),
    (masks({"kind": "window", "left": -1}), "bad_mask"),
    (masks(*[{"kind": "causal"}] * 17), "invalid"),
    ({"query": X, "masks": {}}, "invalid"),
    ({"query": X, "key": [X[0]] * 3, "masks": [{"kind": "causal"}]}, "causal_align_required"),
    ({"query": X, "weights": True}, "invalid"),
    ({"query": X, "weights": {"form": "all"}}, "invalid"),
    ({"query": X, "weights": {"form": "top_k"}}, "invalid"),
    ({"query": X, "weights": {"form": "top_k", "k": 3}}, "invalid"),
    ({"query": X, "weights": {"form": "top_k", "k": 0}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "k": 1}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "heads": [4]}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "heads": [0, 0]}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "heads": []}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "queries": [-1]}}, "invalid"),
    ({"query": X, "weights": {"form": "heads", "dtype": "float64"}}, "invalid"),
    ({"query": X, "masked_rows": "nan"}, "invalid"),
    ({"query": X, "encoding": "hex"}, "invalid"),
    ({"query": tensor(shape=[2**32, 2**32])}, "cost_limit"),
    ({"query": tensor(shape=[2**63, 2])}, "cost_limit"),
    ({"query": [X] * 5}, "cost_limit"),
]

STATUS = {"bad_json": 400, "duplicate_key": 400, "json_too_deep": 400, "bad_encoding": 400, "cost_limit": 413}


def check_problem(answer, codes) -> None:
    codes = (codes,) if isinstance(codes, str) else codes
    problem = answer.json()
    assert problem["code"] in codes, problem
    assert answer.status_code == problem["status"] == STATUS.get(problem["code"], 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(problem) == {"type", "title", "status", "detail", "code", "param", "request_id"}
    assert len(answer.content) <= 4096
    assert SECRET not in answer.text
    assert problem["request_id"] == answer.headers["x-request-id"]


@in_service(max_sequences=4)
async def test_wrong_bodies_get_their_code_and_harm_no_other_request(service):
    """All at once beside a steady good request, whose answer never changes by a bit."""
    good = await service.attend({"query": X})
    for body, codes in WRONG:
        refused, beside = await asyncio.gather(service.attend(body), service.attend({"query": X}))
        check_problem(refused, codes)
        assert beside.json()["output"] == good.json()["output"]
    for raw, code in RAW:
        headers = {"content-type": "application/json"}
        refused = await service.client.post("/v1/layers/small/attend", content=raw, headers=headers)
        check_problem(refused, code)
    samples = await service.samples()
    answered = sum(value for name, value in samples.items() if name.startswith("attention_requests_total"))
    rejected = sum(value for name, value in samples.items() if name.startswith("attention_rejected_total"))
    assert samples["attention_received_total"] == answered == 1 + 2 * len(WRONG) + len(RAW)
    assert rejected == len(WRONG) + len(RAW)
    assert samples["attention_in_flight_requests"] == samples["attention_queued_requests"] == 0


async def _fail_in_all_ways(service) -> None:
    """Wrong bodies, a batch that fails, a deadline in the queue."""
    for body, _ in WRONG:
        await service.attend(body)
    for raw, _ in RAW:
        headers = {"content-type": "application/json"}
        await service.client.post("/v1/layers/small/attend", content=raw, headers=headers)
    service.engine.wrong = lambda call: True
    assert (await service.attend({"query": X})).status_code == 500
    service.engine.wrong = lambda call: False
    service.engine.gate.clear()
    assert (await service.attend({"query": X}, headers={"x-request-timeout-ms": "30"})).status_code == 504
    service.engine.gate.set()
    assert (await service.attend({"query": X})).status_code == 200


@in_service()
async def test_a_request_that_fails_leaves_nothing_to_the_garbage_collection(service):
    """A worker freezes its objects, so full collections are rare: a cycle would keep the request's body and tensors."""
    await _fail_in_all_ways(service)  # what is kept for later requests is there now
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        await _fail_in_all_ways(service)
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        frames = [found.f_code.co_qualname for found in gc.garbage if isinstance(found, types.FrameType)]
        tensors = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert (frames, tensors) == ([], [])


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"is_causal": True}, "/is_causal", 'unknown field "is_causal" in the request'),
        ({"is_causal": True}, "/is_causal", 'here it is "masks": [{"kind": "causal"}]'),
        ({"attn_mask": [[0.0]]}, "/attn_mask", '"bias" (added)'),
        ({"key_padding_mask": [[False]]}, "/key_padding_mask", '"kind": "ignore", "axes": "bs"'),
        ({"need_weights": True}, "/need_weights", '"weights": "mean"'),
        ({"hidden_states": X}, "/hidden_states", 'here it is "query"'),
        ({"Q": X}, "/Q", 'here it is "query"'),
        ({"K": X}, "/K", 'here it is "key"'),
        ({"V": X}, "/V", 'here it is "value"'),
        ({"wieghts": "mean"}, "/wieghts", 'did you mean "weights"?'),
        ({"masks": [{"kind": "causal", "alignment": 1}]}, "/masks/0/alignment", 'did you mean "align"?'),
        ({"weights": {"form": "mean", "Q": 1}}, "/weights/Q", 'unknown field "Q" in'),
        ({"a" * 32: 1}, "/" + "a" * 32, f'unknown field "{"a" * 32}"'),
        ({"a" * 33: 1}, "", "unknown field in the request"),
        ({"_x": 1}, "", "unknown field in the request"),
        ({"x\n": 1}, "", "unknown field in the request"),
        ({"\u0661x": 1}, "", "unknown field in the request"),
    ],
)
@in_service()
async def test_an_unknown_field_is_named_if_it_is_an_identifier_and_translated_if_another_library_has_it(
    service, rows, fields, param, words
):
    problem = (await service.attend({"query": X[:1] * rows, **fields})).json()
    assert (problem["code"], problem["param"]) == ("unknown_field", param)
    assert words in problem["detail"]


@in_service()
async def test_a_selection_of_millions_is_one_short_error(service):
    for body in (
        {"heads": [1] * 100_000},
        {"queries": {"dtype": "int32", "shape": [10**6], "data": "AAAA" * 1333333}},
    ):
        answer = await service.attend({"query": X, "weights": {"form": "heads", **body}})
        assert answer.status_code in (400, 422)
        assert len(answer.content) <= 4096
    many = await service.attend({"query": X, **{str(i): 0 for i in range(8_000)}})
    assert (many.status_code, many.json()["code"]) == (422, "unknown_field")


@pytest.mark.parametrize("count", [8191, 40_000])
@in_service()
async def test_many_wrong_elements_are_one_short_error(service, count):
    answer = await service.attend({"query": ["x"] * count})
    assert answer.status_code == 422
    assert len(answer.content) <= 4096


@pytest.mark.parametrize(
    ("layer", "status"),
    [
        ("nobody", 404),
        ("..%2Fetc", 404),
        ("small%00", 404),
        ("SMALL", 404),
        ("%E2%80%AEsmall", 404),
        ("x" * 10_000, 404),
    ],
)
@in_service()
async def test_a_layer_that_is_not_served_is_not_found_and_never_a_label(service, layer, status):
    """T25, J10."""
    answer = await service.client.post(f"/v1/layers/{layer}/attend", json={"query": X})
    assert answer.status_code == status
    assert answer.json()["code"] in ("layer_not_found", "not_found")
    assert "nobody" not in (await service.client.get("/metrics")).text


@in_service()
async def test_unknown_routes_and_methods_are_errors_of_their_own(service):
    missing = await service.client.get("/v3/" + SECRET)
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert SECRET not in missing.text
    for method in ("GET", "PUT", "DELETE", "TRACE", "FOO"):
        wrong = await service.client.request(method, "/v1/layers/small/attend")
        assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "OPTIONS, POST"
    options = await service.client.options("/v1/layers/small/attend")
    assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
    head = await service.client.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")
    slash = await service.client.get("/v1/layers/", headers={"host": "evil.example"})
    assert slash.status_code == 404
    assert (await service.client.post("/healthz")).headers["allow"] == "GET, HEAD, OPTIONS"


def test_media_types_and_sizes_are_checked_before_the_body_is_read(served):
    async def post(service, content: bytes, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await service.client.post("/v1/layers/small/attend", content=content, headers=named)
        return answer.status_code, answer.json().get("code")

    async def story(service):
        body = json.dumps({"query": X}).encode()
        assert await post(service, body, content_type="text/plain") == (415, "unsupported_media_type")
        assert await post(service, body) == (415, "unsupported_media_type")
        kind = "application/json"
        assert await post(service, body, content_type=kind, accept="image/png") == (406, "not_acceptable")
        wrong = await post(service, body, content_type=kind, content_encoding="br")
        assert wrong == (415, "unsupported_content_encoding")
        assert await post(service, body, content_type=kind, content_encoding="gzip") == (400, "bad_encoding")
        for pack, name in ((gzip.compress, "gzip"), (zstandard.compress, "zstd")):
            assert (await post(service, pack(body), content_type=kind, content_encoding=name))[0] == 200
            bomb = pack(b" " * 5000)
            too_large = await post(service, bomb, content_type=kind, content_encoding=name)
            assert too_large == (413, "decompressed_too_large")
        assert await post(service, b" " * 4097, content_type=kind) == (413, "body_too_large")
        assert (await post(service, body.ljust(4096), content_type=kind))[0] == 200

    served(story, max_body_bytes=4096)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "ten", "", "00"])
@in_service()
async def test_a_malformed_timeout_is_invalid(service, value):
    answer = await service.attend({"query": X}, headers={"x-request-timeout-ms": value})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert (await service.attend({"query": X}, headers={"x-request-timeout-ms": "9" * 40})).status_code == 200


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize(
    ("where", "literal", "code", "words"),
    [
        ("query", "NaN", "bad_json", "query has NaN at index [1][3]; it is no number of JSON"),
        ("query", "Infinity", "bad_json", "query has Infinity at index [1][3]"),
        (
            "query",
            "-Infinity",
            "bad_json",
            'query has -Infinity at index [1][3]; only a bias may have -inf, as the string "-inf"',
        ),
        ("query", '"-inf"', "bad_dtype", 'query has the string "-inf" at index [1][3], expected a number'),
        ("query", "1e999", "non_finite", "at index [1][3], expected a number"),
        ("bias", "NaN", "bad_json", "masks[0].values has NaN at index [1][1]"),
        (
            "bias",
            "-Infinity",
            "bad_json",
            "masks[0].values has -Infinity at index [1][1]; only a bias may have -inf, as the string",
        ),
        ("bias", '"nan"', "bad_dtype", 'masks[0].values has a string at index [1][1], expected a number or "-inf"'),
    ],
)
@in_service()
async def test_what_is_not_finite_in_json_is_refused_with_its_index(service, rows, where, literal, code, words):
    query, bias = [["0.5"] * 16 for _ in range(rows)], [["0"] * rows for _ in range(rows)]
    (query if where == "query" else bias)[1][3 if where == "query" else 1] = literal
    lists = ["[" + ",".join("[" + ",".join(row) + "]" for row in table) + "]" for table in (query, bias)]
    body = '{{"query": {}, "masks": [{{"kind": "bias", "values": {}}}]}}'.format(*lists)
    problem = (await post_whole(service, body.encode())).json()
    assert (problem["code"], problem["param"]) == (code, "/query" if where == "query" else "/masks/0/values")
    assert words in problem["detail"]


@pytest.mark.parametrize("size", [33, 10_000])
@pytest.mark.parametrize("literal", ["NaN", "1e999", "123456789012345678901234567890e300"])
@in_service()
async def test_the_param_of_a_number_has_no_name_that_may_not_be_echoed(service, size, literal):
    for name, param in (("x" * size, None), ("x y", None), ("Scale_2", "/Scale_2")):
        problem = (await post_whole(service, f'{{"{name}": {literal}}}'.encode())).json()
        assert problem["code"] in ("bad_json", "non_finite", "unknown_field")
        if problem["code"] != "unknown_field":
            assert problem["param"] == param
        assert ("xxx" in str(problem)) is False


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@in_service()
async def test_what_is_not_finite_in_base64_is_refused_with_its_index(service, rows, value):
    values = np.full((rows, 16), 0.5, np.float32)
    values[1, 3] = float(value)
    problem = (await service.attend({"query": as_base64(values)})).json()
    name = "NaN" if value == "nan" else value
    assert (problem["code"], problem["param"]) == ("non_finite", "/query")
    assert problem["detail"] == f"query has {name} at index [1][3], expected a number"


@pytest.mark.parametrize("limit", [4096, 65_536])
def test_the_refusal_of_a_body_above_its_limit_names_its_size_the_setting_and_a_cheaper_form(served, limit):
    async def story(service):
        detail = (await post_whole(service, b" " * (limit + 1))).json()["detail"]
        assert detail.startswith(
            f"the body has {limit + 1:,} bytes, expected at most {limit:,} (ATTENTION_MAX_BODY_BYTES); "
        )
        assert "safetensors or in base64" in detail
        bomb = gzip.compress(b" " * (limit + 1))
        detail = (await post_whole(service, bomb, content_encoding="gzip")).json()["detail"]
        assert detail.startswith(f"the decompressed body has more than {limit:,} bytes (ATTENTION_MAX_BODY_BYTES); ")

    served(story, max_body_bytes=limit)


@pytest.mark.parametrize("numbers", [16, 4_000])
def test_the_refusal_of_too_many_numbers_names_their_count_the_setting_and_a_cheaper_form(served, numbers):
    async def story(service):
        problem = (await service.attend({"query": [X[0]] * (numbers // 16 + 1)})).json()
        assert problem["code"] == "cost_limit"
        assert (
            f"{(numbers // 16 + 1) * 16:,} numbers written as text, expected at most {numbers:,}" in problem["detail"]
        )
        assert problem["detail"].endswith(
            f"(ATTENTION_MAX_TEXT_NUMBERS is {numbers:,}); tensors in base64 or safetensors have no such limit"
        )

    served(story, max_text_numbers=numbers)


@in_service(max_request_tokens=8, max_request_cells=255)
async def test_an_expensive_request_is_refused_with_its_cost(service):
    for body, words in [
        (
            {"query": [X[0]] * 9},
            "9 query and key rows, expected at most 8 (ATTENTION_MAX_REQUEST_TOKENS); send the sequences in several",
        ),
        ({"query": [X[0]] * 8}, "256 attention scores"),
        ({"query": X * 3, "weights": {"form": "heads"}}, None),
    ]:
        answer = await service.attend(body)
        if words is None:
            assert answer.status_code == 200
            continue
        assert (answer.status_code, answer.json()["code"]) == (413, "cost_limit")
        assert words in answer.json()["detail"]


@in_service(max_weights_bytes=1024)
async def test_returned_weights_are_bounded(service):
    rows = [X[0]] * 10
    refused = await service.attend({"query": rows, "weights": {"form": "heads"}})
    assert refused.status_code == 413
    assert "1,600 bytes of returned weights" in refused.json()["detail"]
    assert (await service.attend({"query": rows, "weights": {"form": "mean"}})).status_code == 200
    assert (await service.attend({"query": rows})).status_code == 200


OBJECT = {"dtype": "float32", "shape": [1, 16], "data": [0.5] * 16}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"query": {**OBJECT, "dtype": "int8"}, "key": {**OBJECT, "colour": 1}}, "unknown_field"),
        ({"query": {**OBJECT, "shape": [2, 16]}, "key": {**OBJECT, "dtype": "int8"}}, "bad_dtype"),
        (
            {
                "query": {**OBJECT, "shape": [4, 4]},
                "masks": [{"kind": "bias", "values": {"dtype": "bool", "shape": [1], "data": [1]}}],
            },
            "bad_dtype",
        ),
        ({"query": {**OBJECT, "shape": [2, 16]}, "masks": [{"kind": "attend", "values": [[1, 2, 3]]}]}, "bad_shape"),
    ],
)
@in_service()
async def test_of_two_errors_the_first_in_the_order_of_the_contract_is_reported(service, body, code):
    """Unknown fields, then dtypes, then shapes, then masks, whichever tensor they are in."""
    answer = await service.attend(body)
    assert answer.json()["code"] == code, answer.text


@in_service(max_body_bytes=4096)
async def test_a_malformed_deadline_is_reported_after_errors_of_the_body(service):
    headers = {"content-type": "application/json", "x-request-timeout-ms": "soon"}
    path = "/v1/layers/small/attend"
    assert (await service.client.post(path, content=b"x" * 5000, headers=headers)).status_code == 413
    assert (await service.client.post(path, content=b"{}", headers=headers)).json()["code"] == "invalid"


@in_service(max_table_bytes=6399)
async def test_mask_tables_are_bounded_before_they_are_allocated(service):
    """Two small biases whose sum is a table of every head: 413 that says how much; alone neither needs one."""
    rows = [X[0]] * 20
    by_row, by_key = ({"kind": "bias", "values": v} for v in ([[[0.0]] * 20] * 4, [0.0] * 20))
    refused = await service.attend({"query": rows, "masks": [by_row, by_key]})
    assert (refused.status_code, refused.json()["code"]) == (413, "cost_limit")
    assert "the request needs 6,400 bytes of tables" in refused.json()["detail"]
    assert (await service.attend({"query": rows, "masks": [by_key, {"kind": "causal"}]})).status_code == 200
    assert (await service.attend({"query": rows})).status_code == 200
