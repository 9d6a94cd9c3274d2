"""Everything that can be wrong with one request: the code, the form of the answer, and no other request affected."""

import asyncio
import base64
import gc
import gzip
import json
import types

import numpy as np
import pytest
import torch
import zstandard

from tests.integration.running import in_service, in_shared_service

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


# One body of each code; the parser's own tests have the others.
RAW = [
    (b"{", "bad_json"),
    (b'{"query": 1, "query": 2}', "duplicate_key"),
    (b"[" * 100_000, "json_too_deep"),
    (b"[]", "invalid"),
]


WRONG = [
    ({"query": X, "weights": {"form": "heads", SECRET: 1}}, "unknown_field"),
    (masks({"kind": "causal", SECRET: 1}), "unknown_field"),
    ({"query": tensor(extra=1)}, "unknown_field"),
    ({"query": [[True] * 16]}, "bad_dtype"),
    ({"query": SECRET}, "invalid"),
    ({"query": None}, "invalid"),
    ({"query": X[0]}, "bad_shape"),
    ({"query": 3}, "bad_shape"),
    ({"query": [[[X]]]}, "bad_shape"),
    ({"query": []}, "bad_shape"),
    ({"query": [[]]}, "bad_shape"),
    ({"query": [[3.5e38] * 16]}, "non_finite"),
    ({"query": tensor(dtype="complex64")}, "bad_dtype"),
    ({"query": tensor(shape=[2, 17])}, "bad_shape"),
    ({"query": tensor(shape=[])}, "bad_shape"),
    ({"query": tensor(shape=[0, 16], data="")}, "bad_shape"),
    ({"query": tensor(data="AAA")}, "bad_encoding"),
    (masks([[True, False]]), "mask_kind_required"),
    (masks({"values": [True, False]}), "mask_kind_required"),
    (masks({"kind": "padding", "values": []}), "bad_mask"),
    (masks({"kind": "attend"}), "bad_mask"),
    (masks({"kind": "attend", "values": [True]}, {"kind": "attend", "values": [True] * 3}), "bad_mask"),
    (masks({"kind": "causal", "align": "top_left", "offset": 1}), "bad_mask"),
    (masks({"kind": "causal", "align": "middle"}), "bad_mask"),
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
@in_shared_service()
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
@in_shared_service()
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
@in_shared_service()
async def test_the_param_of_a_number_has_no_name_that_may_not_be_echoed(service, size, literal):
    for name, param in (("x" * size, None), ("x y", None), ("Scale_2", "/Scale_2")):
        problem = (await post_whole(service, f'{{"{name}": {literal}}}'.encode())).json()
        assert problem["code"] in ("bad_json", "non_finite", "unknown_field")
        if problem["code"] != "unknown_field":
            assert problem["param"] == param
        assert ("xxx" in str(problem)) is False


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
async def test_a_request_too_expensive_with_weights_is_answered_without_them_T11(service):
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
@in_shared_service()
async def test_of_two_errors_the_first_in_the_order_of_the_contract_is_reported(service, body, code):
    """Unknown fields, then dtypes, then shapes, then masks, whichever tensor they are in."""
    answer = await service.attend(body)
    assert answer.json()["code"] == code, answer.text
