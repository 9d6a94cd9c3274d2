"""Mistakes of the second hour: the status, the code, and a detail that says what came, what fits and the remedy."""

import base64
import gzip
import io
import json
import zlib

import numpy as np
import pytest
import zstandard

from service.observability.logs import configure_logs
from tests.integration.running import in_service, in_shared_service

X = [[0.5] * 16, [0.25] * 16]
DATA = base64.b64encode(np.asarray(X, np.float32).tobytes()).decode()
ATTEND, ATTENTION, INFER = "/v1/layers/small/attend", "/v1/attention", "/v2/models/small/infer"
SDPA = "/v2/models/sdpa/infer"
JSON, BINARY = {"content-type": "application/json"}, {"content-type": "application/vnd.safetensors"}
OWN = {"query": X, "key": X, "value": X}
INPUT = {"name": "query", "datatype": "FP32", "shape": [1, 2, 16], "data": [0.5] * 32}


def tensor(**changed) -> dict:
    return {"dtype": "float32", "shape": [2, 16], "data": DATA, **changed}


def safetensors(request: str = "{}", dtype: str = "F32", name: str = "query") -> bytes:
    entry = {"dtype": dtype, "shape": [2, 16], "data_offsets": [0, 128]}
    header = json.dumps({"__metadata__": {"request": request}, name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + base64.b64decode(DATA)


async def answer_to(service, path, body, headers=JSON):
    """Return the status, the code and the detail of the answer to a POST, and check its form."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await service.client.post(path, content=content, headers=headers)
    assert len(answer.content) < 1500
    problem = answer.json()
    if path.startswith("/v2"):
        detail, _, code = problem["error"].rpartition(" (")
        return answer.status_code, code.removesuffix(")"), detail
    return answer.status_code, problem["code"], problem["detail"]


HERE = 'here it is "{}"'.format
PARAMETERS = {"inputs": [INPUT]}
# The field of another library, where it is sent, and what the answer says of it.
NAMES = [
    *[(ATTEND, name, '"masks" with the kind "attend" (true: may attend)') for name in ("attention_mask", "mask", "attnMask")],
    *[(ATTEND, name, '"masks": [{"kind": "lengths", "values": [...]}]') for name in ("valid_lens", "valid_len", "SeqLens")],
    *[(ATTEND, name, HERE("query")) for name in ("q", "queries", "inputs", "hidden_states", "x", "Query_States")],
    *[(ATTEND, name, HERE("key")) for name in ("k", "K", "keys")],
    *[(ATTEND, name, HERE("value")) for name in ("v", "V", "values")],
    *[(ATTEND, name, "there is no dropout: leave it out") for name in ("dropout", "dropout_p", "attention_dropout")],
    *[(ATTEND, name, '"past_key" and "past_value"; "present"') for name in ("past_key_values", "kv_cache", "use_cache")],
    *[(ATTEND, name, "a layer has its own scale; only attention without") for name in ("scale", "temperature", "softmax_scale")],
    *[(ATTEND, name, '"masks": [{"kind": "causal"}]') for name in ("is_causal", "causal", "use_causal_mask")],
    *[(ATTEND, name, '"weights": "mean" or "weights": "heads"') for name in ("need_weights", "return_attention_scores")],
    *[(ATTEND, name, "says the heads: leave it out") for name in ("num_heads", "n_head", "enable_gqa")],
    *[(ATTEND, name, "only attention without a layer takes it") for name in ("softcap", "sinks", "layout")],
    (ATTENTION, "position_ids", "no positions are applied"),
    *[(ATTEND, name, 'here it is "positions", and for the keys') for name in ("position_ids", "cache_position")],
    (ATTENTION, "enable_gqa", "says the heads: leave it out"),
    (ATTEND, "key_padding_mask", '"kind": "ignore", "axes": "bs"'),
    (ATTEND, "attn_bias", '"masks": [{"kind": "bias"'),
    (ATTEND, "sliding_window", '"kind": "window"'),
    (ATTENTION, "past_key_values", 'here it is "past_key" and "past_value"'),
    (ATTENTION, "temperature", 'here it is "scale", the factor of query·key'),
    (ATTENTION, "dropout_p", "there is no dropout: leave it out"),
    (ATTENTION, "masked_row", 'did you mean "masked_rows"?'),
    (ATTENTION, "wieghts", 'did you mean "weights"?'),
    (INFER, "scale", "a layer has its own scale"),
    (INFER, "dropout_p", "there is no dropout: leave it out"),
    (SDPA, "softmax_scale", HERE("scale")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "words"), NAMES, ids=[f"{path}-{name}" for path, name, _ in NAMES])
@in_shared_service()
async def test_the_name_of_another_library_is_translated(service, path, name, words):
    body = {"inputs": [INPUT], "parameters": {name: 1}} if path.startswith("/v2") else {**OWN, name: 1}
    status, code, detail = await answer_to(service, path, body)
    assert (status, code) == (400 if path.startswith("/v2") else 422, "unknown_field")
    assert f'"{name}"' in detail
    assert words in detail


def masks(**mask) -> dict:
    return {"query": X, "masks": [mask]}


def inputs(**changed) -> dict:
    return {"inputs": [{**INPUT, **changed}]}


def lines(text: str) -> str:
    return "\n".join(text[i : i + 76] for i in range(0, len(text), 76))


FORMS = 'must be "heads", "mean", "contributions" or an object whose form is one of them or top_k, got '
PAD = 'mask the padding with {"kind": "lengths"}, or send one request a sequence'
ROW = "it needs at least one row, as [["
# The path, the body, the status, the code, and what the detail says.
VALUES = [
    *[(ATTEND, {"query": X, "weights": value}, 422, "invalid", FORMS + got) for value, got in (
        (True, "true"), (False, "false"), (1, "a number"), ([], "a list"), (["heads"], "a list"))],
    (ATTEND, {"query": X, "weights": "all"}, 422, "invalid", "'heads', 'mean', 'top_k' or 'contributions', got \"all\""),
    (ATTEND, {"query": X, "weights": {"form": "Mean"}}, 422, "invalid", 'got "Mean"; did you mean "mean"?'),
    (INFER, {"inputs": [INPUT], "parameters": {"weights": True}}, 400, "invalid", "'mean' or 'contributions', got true"),
    (ATTEND, {"query": tensor(data=lines(DATA))}, 400, "bad_encoding", "it has line breaks or other white space"),
    (ATTEND, {"query": tensor(data=DATA + "\r\n\t ")}, 400, "bad_encoding", "it has line breaks or other white space"),
    *[(ATTEND, {"query": tensor(data=start + DATA)}, 400, "bad_encoding", 'leave out the "data:" and what follows')
      for start in ("data:;base64,", "DATA:image/png;base64,")],
    (ATTEND, {"query": tensor(data=DATA.replace("A", "_"))}, 400, "bad_encoding", 'write "+" for "-" and "/" for "_"'),
    (ATTEND, {"query": []}, 422, "bad_shape", "got [0]; " + ROW),
    (ATTEND, {"query": [[]]}, 422, "bad_shape", "got [1, 0]; " + ROW),
    (ATTEND, {"query": X[0]}, 422, "bad_shape", "got [16]; " + ROW),
    (ATTENTION, {**OWN, "query": []}, 422, "bad_shape", ROW),
    (ATTENTION, {**OWN, "layout": "ld", "query": []}, 422, "bad_shape", ROW),
    (ATTEND, {"query": "a text"}, 422, "invalid", "or an object with dtype, shape and data, got a string"),
    (ATTEND, {"query": [X[0], X[0][:15]]}, 422, "bad_shape", "query has a list of 15 (the first is a list of 16) at index [1]; "),
    (ATTEND, {"query": [X[0], X[0][:15]]}, 422, "bad_shape", PAD),
    (ATTEND, {"query": [X, X[:1]]}, 422, "bad_shape", "query has a list of 1 (the first is a list of 2) at index [1]; "),
    (ATTEND, {"query": [X, X[:1]]}, 422, "bad_shape", PAD),
    (ATTEND, {"query": [X, [X[0], [1.0]]]}, 422, "bad_shape", "a list of 1 (the first is a list of 16) at index [1][1]; "),
    (ATTEND, {"query": [X[0], 0.5]}, 422, "bad_shape", "query has a number (the first is a list of 16) at index [1]; "),
    (ATTENTION, {**OWN, "key": [X[0], X[0] * 2]}, 422, "bad_shape", "key has a list of 32 (the first is a list of 16) at index"),
    (INFER, inputs(data=[[X[0], X[0][1:]]]), 400, "bad_shape", PAD),
    (ATTEND, masks(kind="ignore", values=[[True, False], [True]]), 422, "bad_shape", "(the first is a list of 2) at index [1]"),
    (ATTEND, masks(kind="padding"), 422, "bad_mask", 'one of attend, ignore, lengths, bias, causal, window, got "padding"'),
    (ATTEND, masks(kind="Causal"), 422, "bad_mask", 'got "Causal"; did you mean "causal"?'),
    (ATTEND, masks(kind="causal", align="bottom"), 422, "bad_mask", 'got "bottom"; did you mean "bottom_right"?'),
    (ATTEND, masks(kind="causal", align="top-left"), 422, "bad_mask", 'got a string; did you mean "top_left"?'),
    (ATTEND, masks(kind="attend", axes="BS", values=[[1]]), 422, "bad_mask", 'got "BS"; did you mean "bs"?'),
    (ATTEND, masks(kind="attend", axes="bs", values=[[1]]), 422, "bad_mask", "because query is one sequence [L, d], got bs"),
    (ATTEND, masks(kind="attend", axes=["l", "s"], values=[[1]]), 422, "bad_mask", "'bls' or 'bhls', got a list"),
    (ATTENTION, {**OWN, "layout": "BSHD"}, 422, "invalid", 'got "BSHD"; did you mean "blhd"?'),
    (ATTENTION, {**OWN, "layout": "l,d"}, 422, "invalid", "'blhd' or 'packed', got a string"),
    (ATTEND, {"query": tensor(dtype="int8")}, 422, "bad_dtype", 'must be one of float16, bfloat16, float32, float64, got "int8"'),
    (ATTEND, {"query": tensor(dtype="torch.float32")}, 422, "bad_dtype", 'got a string; did you mean "float32"?'),
    (ATTEND, {"query": tensor(dtype="float")}, 422, "bad_dtype", 'one of float16, bfloat16, float32, float64, got "float"'),
    (ATTEND, {"query": tensor(dtype=None)}, 422, "bad_dtype", "float64, got null"),
    (ATTEND, {"query": tensor(dtype="x" * 40)}, 422, "bad_dtype", "float64, got a string"),
    (INFER, inputs(name="attention_mask"), 400, "unknown_field", 'here it is "attend_mask" (true: may attend)'),
    (INFER, inputs(data=DATA), 400, "invalid", "the data of query must be a list, got a string"),
    (ATTEND, b'{"query": [[1]], "query": [[2]]}', 400, "duplicate_key", 'has the key "query" twice'),
    (ATTEND, b'{"s3cret-1": 1, "s3cret-1": 2}', 400, "duplicate_key", "has a duplicate key"),
    (ATTEND, [[1]], 422, "invalid", 'must be a JSON object, such as {"query": [[0.5]]}, got a list'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "words"), VALUES)
@in_shared_service()
async def test_a_value_that_does_not_fit_is_answered_with_what_came_and_what_fits(
    service, path, body, status, code, words
):
    found = await answer_to(service, path, body)
    assert found[:2] == (status, code)
    assert words in found[2]


@pytest.mark.parametrize(
    ("pack", "name"),
    [(gzip.compress, "gzip"), (zstandard.compress, "zstd"), (zlib.compress, "deflate")],
    ids=["gzip", "zstd", "deflate"],
)
@pytest.mark.parametrize("repeats", [1, 400_000])
@in_shared_service()
async def test_a_compressed_body_without_its_header_is_named_in_every_form(service, pack, name, repeats):
    noise = np.random.default_rng(3).bytes(3 * repeats)  # which does not shrink
    for path, content, headers, code in (
        (ATTEND, json.dumps(OWN).encode(), JSON, "bad_json"),
        (ATTEND, safetensors(), BINARY, "bad_binary"),
        (INFER, json.dumps(inputs()).encode(), JSON, "bad_json"),
        (INFER, json.dumps(inputs()).encode(), {"inference-header-content-length": "99999999"}, "bad_binary"),
    ):
        found = await answer_to(service, path, pack(content + noise), headers)
        assert found == (400, code, f"the body is compressed with {name}, which Content-Encoding must say")


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@in_shared_service()
async def test_a_plain_body_whose_header_names_a_coding_says_so(service, coding):
    found = await answer_to(service, ATTEND, OWN, {**JSON, "content-encoding": coding})
    assert found == (400, "bad_encoding", f"the body is damaged, or is not compressed with {coding}")


TENSORS = [
    (safetensors(dtype="U32"), "bad_dtype", 'bfloat16, float32, float64, got "U32"'),
    (safetensors(name="hidden_states"), "unknown_field", 'here it is "query"'),
]


@pytest.mark.parametrize(("content", "code", "words"), TENSORS)
@in_shared_service()
async def test_a_tensor_of_safetensors_that_does_not_fit_is_named(service, content, code, words):
    status, found, detail = await answer_to(service, ATTEND, content, BINARY)
    assert (status, found) == (422, code)
    assert words in detail


PATHS = [
    ("GET", "/V1/Layers", "GET /v1/layers"),
    ("GET", "/v1/layers/", "GET /v1/layers"),
    ("GET", "//v1//layers", "GET /v1/layers"),
    ("GET", "/api/v1", "GET /v1/layers"),
    ("GET", "/api/v1/layers", "GET /v1/layers"),
    ("GET", "/health", "GET /healthz"),
    ("GET", "/healthz/", "GET /healthz"),
    ("GET", "/ready", "GET /readyz"),
    ("POST", "/v1/layer/small/attend", "POST /v1/layers/{layer}/attend"),
    ("POST", "/v1/layers/small/attention", "POST /v1/layers/{layer}/attend"),
    ("POST", "/v1/layers//attend", "POST /v1/layers/{layer}/attend"),
    ("POST", "/attend", "POST /v1/layers/{layer}/attend"),
    ("POST", "/v1/layers/small/Attend/", "POST /v1/layers/{layer}/attend"),
    ("POST", f"/v1/layer/{'a' * 64}/attention", "POST /v1/layers/{layer}/attend"),
    ("POST", "/layers/small/attend", "POST /v1/layers/{layer}/attend"),
    ("POST", "/v1/Attention", "POST /v1/attention"),
    ("POST", "/V2/models/small/infer", "POST /v2/models/{layer}/infer"),
    ("GET", "/v2/health", "GET /v2/health/live"),
    ("GET", "/openapi.yaml", "GET /openapi.json"),
]


@pytest.mark.parametrize(("method", "path", "words"), PATHS, ids=[f"{method}-{path}"[:40] for method, path, _ in PATHS])
@in_shared_service()
async def test_a_path_that_does_not_exist_suggests_the_one_that_does(service, method, path, words):
    answer = await service.client.request(method, f"http://service{path}", json={})
    assert answer.status_code == 404
    detail = answer.json().get("detail") or answer.json()["error"].removesuffix(" (not_found)")
    assert detail.startswith("nothing is served at that path; GET /openapi.json lists what is; ")
    assert detail.endswith(f"did you mean {words}?")


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/layers/small", "GET, HEAD, OPTIONS, PUT; did you mean POST /v1/layers/{layer}/attend?"),
        ("POST", "/v1/layers", "this path allows GET, HEAD, OPTIONS; did you mean POST /v1/layers/{layer}/attend?"),
        ("POST", "/v2/models/small", "did you mean POST /v2/models/{layer}/infer?"),
        ("PUT", "/v1/layers", "did you mean PUT /v1/layers/{layer}?"),
        ("GET", ATTEND, "this path allows OPTIONS, POST"),
    ],
)
@in_shared_service()
async def test_a_method_that_a_path_does_not_take_names_what_fits(service, method, path, words):
    answer = await service.client.request(method, path)
    assert answer.status_code == 405
    assert words in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/" * 300, "/%00", "/é" * 99, "/v3/s3cret", "/s3cret" * 60, "/{layer}", "/v1/s3cret/{x}/*"]
)
@in_shared_service()
async def test_a_path_of_any_text_is_a_404_that_repeats_nothing_of_it(service, path):
    answer = await service.client.post(f"http://service{path}", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "s3cret" not in answer.text
    assert len(answer.content) < 500


SHOWN = "around it: "


@in_service()
async def test_the_characters_around_a_fault_are_in_the_answer_and_not_in_the_log(service):
    log = io.BytesIO()
    configure_logs("info", log)
    body = b'{"query": [[0.125, 0.25, 0.125,, 0.25, 0.125, 0.25]]}'
    for path, content, headers in (
        (ATTEND, body, JSON),
        (INFER, body, JSON),
        (ATTEND, safetensors(body.decode()), BINARY),
    ):
        *_, detail = await answer_to(service, path, content, headers)
        assert detail.endswith(f"true, false or null; {SHOWN}25, 0.125,, 0.25, 0.")
        assert "(byte 31): expected a value" in detail
    for _ in range(3):
        await service.client.get("/healthz")
    text = log.getvalue().decode()
    assert text.count("expected a value") == 3
    assert SHOWN not in text
    assert "0.125" not in text


def test_a_413_from_bytes_does_not_advise_the_form_that_came(served):
    async def story(service):
        large = b" " * 5000
        for path, headers in (
            (ATTEND, BINARY),
            (ATTEND, {**BINARY, "content-encoding": "gzip"}),
            (INFER, {"inference-header-content-length": "10"}),
        ):
            content = gzip.compress(large) if "content-encoding" in headers else large
            status, _, detail = await answer_to(service, path, content, headers)
            assert status == 413
            assert detail.endswith("(ATTENTION_MAX_BODY_BYTES); send the sequences in several requests")
        *_, detail = await answer_to(service, ATTEND, large)
        assert detail.endswith(
            "send the sequences in several requests; tensors take fewer bytes as safetensors or in base64"
        )

    served(story, max_body_bytes=4096)


@in_service(max_text_numbers=16)
async def test_a_413_for_the_text_of_a_safetensors_file_does_not_advise_safetensors(service):
    numbers = {"weights": {"form": "heads", "queries": [0] * 17}}
    status, _, detail = await answer_to(service, ATTEND, safetensors(json.dumps(numbers)), BINARY)
    words = "17 numbers written as text, expected at most 16 (ATTENTION_MAX_TEXT_NUMBERS is 16)"
    assert (status, detail) == (413, f"__metadata__.request: the body has {words}")
