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
from tests.integration.running import in_service

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
    *[(ATTEND, name, "there is no dropout: leave it out") for name in ("dropout", "dropout_p", "training")],
    *[(ATTEND, name, "a layer keeps no past: send the rows of all") for name in ("past_key_values", "kv_cache", "use_cache")],
    *[(ATTEND, name, "a layer has its own scale; only attention without") for name in ("scale", "temperature", "softmax_scale")],
    *[(ATTEND, name, "a layer has its own heads") for name in ("num_heads", "nhead", "num_key_value_heads")],
    *[(ATTEND, name, '"masks": [{"kind": "causal"}]') for name in ("is_causal", "causal", "use_causal_mask")],
    *[(ATTEND, name, '"weights": "mean" or "weights": "heads"') for name in ("need_weights", "return_attention_scores")],
    *[(ATTEND, name, "POST /v1/attention") for name in ("softcap", "sinks", "layout", "lse", "past_key")],
    (ATTEND, "input_ids", 'send their embeddings as "query"'),
    (ATTEND, "key_padding_mask", '"kind": "ignore", "axes": "bs"'),
    (ATTEND, "head_mask", '"kind": "attend", "axes": "hls"'),
    (ATTEND, "attn_bias", '"masks": [{"kind": "bias"'),
    (ATTEND, "sliding_window", '"kind": "window"'),
    (ATTEND, "enable_gqa", "leave it out"),
    (ATTEND, "position_ids", "no positions are applied"),
    (ATTEND, "dtype", 'each tensor has its own, as {"dtype"'),
    (ATTENTION, "past_key_values", 'here it is "past_key" and "past_value"'),
    (ATTENTION, "temperature", 'here it is "scale", the factor of query·key'),
    (ATTENTION, "heads", '"num_heads" and "num_kv_heads" with layout "packed"'),
    (ATTENTION, "dropout_p", "there is no dropout: leave it out"),
    *[(ATTENTION, name, HERE(field)) for name, field in (("softCap", "softcap"), ("sink", "sinks"), ("return_lse", "lse"))],
    (ATTENTION, "masked_row", 'did you mean "masked_rows"?'),
    (ATTENTION, "wieghts", 'did you mean "weights"?'),
    (INFER, "scale", "a layer has its own scale"),
    (INFER, "attn_mask", 'it is an input: "attend_mask"'),
    (INFER, "valid_lens", 'it is an input: "lengths"'),
    (INFER, "dropout_p", "there is no dropout: leave it out"),
    (SDPA, "softmax_scale", HERE("scale")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "words"), NAMES, ids=[f"{path}-{name}" for path, name, _ in NAMES])
@in_service()
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


FORMS = 'must be "heads", "mean" or an object whose form is heads, mean or top_k, got '
PAD = 'mask the padding with {"kind": "lengths"}, or send one request a sequence'
ROW = "it needs at least one row, as [["
# The path, the body, the status, the code, and what the detail says.
VALUES = [
    *[(ATTEND, {"query": X, "weights": value}, 422, "invalid", FORMS + got) for value, got in (
        (True, "true"), (False, "false"), (1, "a number"), ([], "a list"), (["heads"], "a list"))],
    (ATTEND, {"query": X, "weights": "all"}, 422, "invalid", "one of 'heads', 'mean' or 'top_k', got \"all\""),
    (ATTEND, {"query": X, "weights": {"form": "Mean"}}, 422, "invalid", 'got "Mean"; did you mean "mean"?'),
    (ATTENTION, {**OWN, "scores": True}, 422, "invalid", "whose stage is scaled, capped or masked, got true"),
    (INFER, {"inputs": [INPUT], "parameters": {"weights": True}}, 400, "invalid", "'heads' or 'mean', got true"),
    (ATTEND, {"query": tensor(data=lines(DATA))}, 400, "bad_encoding", "a line break or white space at character 76"),
    (ATTEND, {"query": tensor(data=DATA + "\r\n\t ")}, 400, "bad_encoding", "a line break or white space at character 172"),
    (ATTEND, {"query": tensor(data="data:;base64," + DATA)}, 400, "bad_encoding", 'leave out the "data:" and what follows'),
    (ATTEND, {"query": tensor(data=DATA.replace("A", "_"))}, 400, "bad_encoding", 'write "+" for "-" and "/" for "_"'),
    (ATTEND, {"query": tensor(data=DATA.rstrip("="))}, 400, "bad_encoding", 'pad it with "="'),
    (ATTEND, {"query": tensor(data=str(base64.b64encode(b"x" * 128)))}, 400, "bad_encoding", "Python's print of bytes"),
    (ATTEND, {"query": tensor(data=DATA[:4] + "!" + DATA[5:])}, 400, "bad_encoding", "character 4 is none of its alphabet"),
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
    (ATTEND, {"query": tensor(dtype="BF16")}, 422, "bad_dtype", 'got "BF16"; did you mean "bfloat16"?'),
    (ATTEND, {"query": tensor(dtype="double")}, 422, "bad_dtype", 'got "double"; did you mean "float64"?'),
    (ATTEND, {"query": tensor(dtype=None)}, 422, "bad_dtype", "float64, got null"),
    (ATTEND, {"query": tensor(dtype="x" * 40)}, 422, "bad_dtype", "float64, got a string"),
    (ATTEND, {"query": tensor(type="float32")}, 422, "unknown_field", 'members are dtype, shape and data; did you mean "dtype"?'),
    (INFER, inputs(datatype="float32"), 400, "bad_dtype", 'got "float32"; did you mean "FP32"?'),
    (INFER, inputs(datatype="F64"), 400, "bad_dtype", 'got "F64"; did you mean "FP64"?'),
    (INFER, inputs(name="attention_mask"), 400, "unknown_field", 'here it is "attend_mask" (true: may attend)'),
    (INFER, inputs(data=DATA), 400, "invalid", "the data of query must be a list, got a string"),
    (ATTEND, b'{"query": [[1]], "query": [[2]]}', 400, "duplicate_key", 'has the key "query" twice'),
    (ATTEND, b'{"s3cret-1": 1, "s3cret-1": 2}', 400, "duplicate_key", "has a duplicate key"),
    (ATTEND, [[1]], 422, "invalid", 'must be a JSON object, such as {"query": [[0.5]]}, got a list'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "words"), VALUES)
@in_service()
async def test_a_value_that_does_not_fit_is_answered_with_what_came_and_what_fits(
    service, path, body, status, code, words
):
    found = await answer_to(service, path, body)
    assert found[:2] == (status, code)
    assert words in found[2]


ONCE = "compress the body at most once, and name that in Content-Encoding"


@pytest.mark.parametrize(
    ("pack", "name"),
    [(gzip.compress, "gzip"), (zstandard.compress, "zstd"), (zlib.compress, "deflate")],
    ids=["gzip", "zstd", "deflate"],
)
@pytest.mark.parametrize("repeats", [1, 400_000])
@in_service()
async def test_a_compressed_body_without_its_header_is_named_in_every_form(service, pack, name, repeats):
    noise = np.random.default_rng(3).bytes(3 * repeats)  # which does not shrink
    for path, content, headers, code in (
        (ATTEND, json.dumps(OWN).encode(), JSON, "bad_json"),
        (ATTEND, safetensors(), BINARY, "bad_binary"),
        (INFER, json.dumps(inputs()).encode(), JSON, "bad_json"),
        (INFER, json.dumps(inputs()).encode(), {"inference-header-content-length": "99999999"}, "bad_binary"),
    ):
        found = await answer_to(service, path, pack(content + noise), headers)
        assert found == (400, code, f"the body is compressed with {name}; {ONCE}")
    twice = {**JSON, "content-encoding": "gzip"}
    found = await answer_to(service, ATTEND, gzip.compress(pack(json.dumps(OWN).encode())), twice)
    assert found == (400, "bad_json", f"the body is compressed with {name}; {ONCE}")


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@in_service()
async def test_a_plain_body_whose_header_names_a_coding_says_so(service, coding):
    found = await answer_to(service, ATTEND, OWN, {**JSON, "content-encoding": coding})
    assert found == (400, "bad_encoding", f"the body is damaged, or is not compressed with {coding}")


OTHER_FORMS = [
    (ATTEND, safetensors(), JSON, "bad_json", "is a safetensors file; its Content-Type is application/vnd.safetensors"),
    (ATTEND, b'{"query": [[0.5]]}', BINARY, "bad_binary", "looks like JSON; its Content-Type is application/json"),
    (ATTEND, json.dumps(OWN).encode("utf-16"), JSON, "bad_json", "is UTF-16 or UTF-32; JSON is UTF-8"),
    (ATTEND, json.dumps(OWN).encode("utf-16-be"), JSON, "bad_json", "is UTF-16 or UTF-32; JSON is UTF-8"),
    (ATTEND, json.dumps(OWN).encode("utf-8-sig"), JSON, "bad_json", "byte order mark: send UTF-8 without one"),
    (ATTEND, safetensors(dtype="U32"), BINARY, "bad_dtype", 'bfloat16, float32, float64, got "U32"'),
    (ATTEND, safetensors(name="attn_mask"), BINARY, "unknown_field", 'here it is the tensor "masks.0.values"'),
    (ATTEND, safetensors(name="hidden_states"), BINARY, "unknown_field", 'here it is "query"'),
    (ATTEND, b"\x93NUMPY\x01\x00", JSON, "bad_json", "is a .npy file; send its numbers as JSON or as safetensors"),
    (ATTEND, b"\x93NUMPY\x01\x00", BINARY, "bad_binary", "is a .npy file; send its numbers as JSON or as safetensors"),
    (ATTEND, b"PK\x03\x04\x14\x00\x00\x00", JSON, "bad_json", "is a zip, .npz or .pt file"),
    (ATTEND, b"\x80\x04\x95\x10\x00\x00", JSON, "bad_json", "is a pickle"),
]


@pytest.mark.parametrize(("path", "content", "headers", "code", "words"), OTHER_FORMS)
@in_service()
async def test_a_body_of_another_form_or_with_other_tensors_is_named(service, path, content, headers, code, words):
    status, found, detail = await answer_to(service, path, content, headers)
    assert (status, found) == (400 if code in ("bad_json", "bad_binary") else 422, code)
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
    ("POST", "/v1/layers/small/Attend/", "POST /v1/layers/{layer}/attend"),
    ("POST", f"/v1/layer/{'a' * 64}/attention", "POST /v1/layers/{layer}/attend"),
    ("POST", "/layers/small/attend", "POST /v1/layers/{layer}/attend"),
    ("POST", "/v1/Attention", "POST /v1/attention"),
    ("POST", "/V2/models/small/infer", "POST /v2/models/{layer}/infer"),
    ("GET", "/v2/health", "GET /v2/health/live"),
    ("GET", "/openapi.yaml", "GET /openapi.json"),
]


@pytest.mark.parametrize(("method", "path", "words"), PATHS, ids=[f"{method}-{path}"[:40] for method, path, _ in PATHS])
@in_service()
async def test_a_path_that_does_not_exist_suggests_the_one_that_does(service, method, path, words):
    answer = await service.client.request(method, f"http://service{path}", json={})
    assert answer.status_code == 404
    detail = answer.json().get("detail") or answer.json()["error"].removesuffix(" (not_found)")
    assert detail.startswith("nothing is served at that path; GET /openapi.json lists what is; ")
    assert detail.endswith(f"did you mean {words}?")


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/layers/small", "GET, HEAD, OPTIONS, PUT; POST fits /v1/layers/{layer}/attend"),
        ("POST", "/v1/layers", "this path allows GET, HEAD, OPTIONS; POST fits /v1/layers/{layer}/attend"),
        ("POST", "/v2/models/small", "POST fits /v2/models/{layer}/infer"),
        ("PUT", "/v1/layers", "PUT fits /v1/layers/{layer}"),
        ("GET", ATTEND, "this path allows OPTIONS, POST"),
    ],
)
@in_service()
async def test_a_method_that_a_path_does_not_take_names_what_fits(service, method, path, words):
    answer = await service.client.request(method, path)
    assert answer.status_code == 405
    assert words in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/" * 300, "/%00", "/é" * 99, "/v3/s3cret", "/s3cret" * 60, "/{layer}", "/v1/s3cret/{x}/*"]
)
@in_service()
async def test_a_path_of_any_text_is_a_404_that_repeats_nothing_of_it(service, path):
    answer = await service.client.post(f"http://service{path}", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "s3cret" not in answer.text
    assert len(answer.content) < 500


def under_a_prefix(service, prefix: str):
    """Return the service as an ASGI host serves it below `prefix`."""

    async def application(scope, receive, send):
        await service.application({**scope, "root_path": prefix, "path": prefix + scope["path"]}, receive, send)

    return application


@in_service()
async def test_a_suggested_path_has_the_prefix_under_which_the_service_is_mounted(service):
    transport = type(service.transport)(app=under_a_prefix(service, "/nlp"))
    async with type(service.client)(transport=transport, base_url="http://service") as client:
        assert (await client.get("/v1/layers")).status_code == 200
        assert "did you mean GET /nlp/healthz?" in (await client.get("/health")).text
        assert "POST fits /nlp/v1/layers/{layer}/attend" in (await client.post("/v1/layers/small")).text


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
        assert detail.endswith(f"(byte 31): a comma has no value before it; {SHOWN}25, 0.125,, 0.25, 0.")
    for _ in range(3):
        await service.client.get("/healthz")
    text = log.getvalue().decode()
    assert text.count("a comma has no value before it") == 3
    assert SHOWN not in text
    assert "0.125" not in text


def test_a_413_advises_a_form_that_is_smaller_than_the_one_that_came(served):
    async def story(service):
        large = b" " * 5000
        *_, detail = await answer_to(service, ATTEND, large)
        assert (
            "numbers take fewer bytes as safetensors or in base64, base64 as safetensors, or send the sequences"
            in detail
        )
        for headers in (BINARY, {**BINARY, "content-encoding": "gzip"}):
            content = gzip.compress(large) if "content-encoding" in headers else large
            status, _, detail = await answer_to(service, ATTEND, content, headers)
            assert status == 413
            assert "send the sequences in several requests, or as float16" in detail
            assert "safetensors" not in detail
        *_, detail = await answer_to(service, INFER, large)
        assert "numbers take fewer bytes with binary_data_size" in detail
        *_, detail = await answer_to(service, INFER, large, {"inference-header-content-length": "10"})
        assert "binary_data_size" not in detail
        assert "safetensors" not in detail

    served(story, max_body_bytes=4096)


@in_service(max_text_numbers=16)
async def test_a_413_for_text_advises_no_form_that_came(service):
    numbers = {"weights": {"form": "heads", "queries": [0] * 17}}
    status, _, detail = await answer_to(service, ATTEND, safetensors(json.dumps(numbers)), BINARY)
    assert status == 413
    assert detail.startswith("__metadata__.request: the body has 17 numbers")
    assert "safetensors" not in detail
    *_, detail = await answer_to(service, INFER, inputs())
    assert detail.endswith("inputs with binary_data_size have no such limit")
