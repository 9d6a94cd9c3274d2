"""Safetensors bodies: the document that comes out of them, and the answer that goes back."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from service.attention.call import Answer, Call, TopK
from service.batching.job import NOTHING, BatchInfo
from service.errors import BadBinary, BadEncoding, BadJson, JsonTooDeep, ServiceError, UnknownField
from service.wire.attend_request import AnswerFacts, CheckedRequest
from service.wire.layouts import Layout
from service.wire.safetensors_codec import MAX_HEADER_BYTES, parse_safetensors, write_safetensors
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import TensorForm, answer_form, decode_tensor

X = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def parse(body: bytes) -> dict:
    return parse_safetensors(bytearray(body), max_depth=32)


def file(header: object, data: bytes = b"", *, pad: int = 0) -> bytes:
    """A file with the given header, however wrong."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: tuple = (2, 3), begin: int = 0, end: int = 24) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def tensor_of(raw: object, kind: TensorKind = TensorKind.FLOAT) -> torch.Tensor:
    return decode_tensor(raw, TensorField("/query", kind))


def test_a_body_of_the_library_gives_the_document_of_the_same_fields():
    request = {"weights": {"form": "heads"}, "masks": [{"kind": "causal"}, {"kind": "attend"}], "positions": [4, 5]}
    mask = torch.ones(2, 2, dtype=torch.bool)
    document = parse(
        save({"query": X, "masks.1.values": mask}, {"request": json.dumps(request), "format": "pt", "labels": "["})
    )
    assert (document["weights"], list(document["positions"])) == ({"form": "heads"}, [4, 5])
    assert document["masks"][0] == {"kind": "causal"}
    assert torch.equal(tensor_of(document["query"]), X)
    assert torch.equal(tensor_of(document["masks"][1]["values"], TensorKind.BOOL), mask)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_a_tensor_is_a_view_of_the_body_where_it_is_aligned_and_equal_where_it_is_not(dtype):
    """B8."""
    for pad in range(9):
        whole = load(save({"query": X.to(dtype)}))["query"]
        size = whole.numel() * whole.element_size()
        header: dict[str, dict] = {"query": entry({2: "F16", 4: "F32", 8: "F64"}[dtype.itemsize], (2, 3), 0, size)}
        if dtype == torch.bfloat16:
            header["query"]["dtype"] = "BF16"
        data = whole.view(torch.uint8).numpy().tobytes()
        body = bytearray(file(header, data, pad=pad))
        document = parse_safetensors(body, max_depth=32)
        query = document["query"]
        found = tensor_of(query)
        assert torch.equal(found, whole)
        assert answer_form(query, None) is TensorForm.BASE64
        start = torch.frombuffer(body, dtype=torch.uint8).data_ptr()
        is_view = start <= found.data_ptr() < start + len(body)
        assert is_view == ((len(body) - size) % dtype.itemsize == 0)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", BadBinary),
        (b"\0" * 7, BadBinary),
        (b"\0" * 8, BadBinary),
        (b"\xff" * 16, BadBinary),
        ((2**31).to_bytes(8, "little") + b"{}", BadBinary),
        ((2**63).to_bytes(8, "little") + b"{}", BadBinary),
        ((3).to_bytes(8, "little") + b"{}", BadBinary),
        (file(b"[]"), BadBinary),
        (file(b" {}"), BadBinary),
        (file(b'{"query":'), BadBinary),
        (file(b"{" * 5000), BadBinary),
        (file(b'{"a":' * 5000), BadBinary),
        (file(b'{"query":\xff}'), BadBinary),
        (file(b'{"query":NaN}'), BadBinary),
        (file({"query": entry()}, b"\0" * 23), BadBinary),
        (file({"query": entry()}, b"\0" * 25), BadBinary),
        (file({"query": entry("F31")}, b"\0" * 24), BadBinary),
        (file({"query": entry(shape=(2, -3))}, b"\0" * 24), BadBinary),
        (file({"query": entry(shape=(2, 3.0))}, b"\0" * 24), BadBinary),
        (file({"query": entry(shape=(2**32, 2**32))}, b"\0" * 24), BadBinary),
        (file({"query": entry(shape=(10**19,))}, b"\0" * 24), BadBinary),
        (file({"query": entry(shape=(1,) * 300)}, b"\0" * 24), BadBinary),
        (file({"query": entry(end=20)}, b"\0" * 24), BadBinary),
        (file({"query": entry(begin=24, end=0)}, b"\0" * 24), BadBinary),
        (file({"query": entry(), "key": entry()}, b"\0" * 24), BadBinary),
        (file({"query": entry(), "key": entry(begin=12, end=36)}, b"\0" * 36), BadBinary),
        (file({"query": entry(), "key": entry(begin=28, end=52)}, b"\0" * 52), BadBinary),
        (file({"query": {**entry(), "more": 1}}, b"\0" * 24), BadBinary),
        (file({"query": {"dtype": "F32"}}, b"\0" * 24), BadBinary),
        (file(b'{"query":1,"query":2}'), BadBinary),
        (file({"__metadata__": {"request": {}}}), BadBinary),
        (file({"__metadata__": []}), BadBinary),
        (file({"__metadata__": {"request": "{"}}), BadJson),
        (file({"__metadata__": {"request": ""}}), BadJson),
        (file({"__metadata__": {"request": '{"a":NaN}'}}), BadJson),
        (file({"__metadata__": {"request": '{"a":' + "[" * 40 + "]" * 40 + "}"}}), JsonTooDeep),
        (file({"__metadata__": {"request": "[]"}}), ServiceError),
        (file({"__metadata__": {"response": "{}"}}), UnknownField),
        (file({"output": entry()}, b"\0" * 24), UnknownField),
        (file({"masks.0.values": entry()}, b"\0" * 24), UnknownField),
        (file({"masks.00.values": entry(), "__metadata__": {"request": '{"masks":[{}]}'}}, b"\0" * 24), UnknownField),
        (file({"masks.1.values": entry(), "__metadata__": {"request": '{"masks":[{}]}'}}, b"\0" * 24), UnknownField),
        (file({"masks.0.values": entry(), "__metadata__": {"request": '{"masks":5}'}}, b"\0" * 24), UnknownField),
        (file({"__metadata__": {"request": '{"query":[[1]]}'}}), UnknownField),
        (file({"__metadata__": {"request": '{"masks":[{"kind":"attend","values":[true]}]}'}}), UnknownField),
        (file({"positions": entry(), "__metadata__": {"request": '{"positions":[1]}'}}, b"\0" * 24), UnknownField),
    ],
)
def test_a_malformed_body_is_refused_with_its_code(body, error):
    """B1, B2, B3, B6, B13."""
    with pytest.raises(error) as caught:
        parse(body)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("name", "words"),
    [("Q", 'unknown tensor "Q" in the request; '), ("K", 'here it is "key"'), ("é", "unknown tensor in")],
)
def test_a_tensor_of_an_unknown_name_is_named_with_the_names_that_exist(name, words):
    with pytest.raises(UnknownField) as caught:
        parse(file({name: entry()}, b"\0" * 24))
    assert words in caught.value.message
    assert "the tensors are query, key, value," in caught.value.message


def test_a_header_above_its_limit_is_refused_before_it_is_read():
    with pytest.raises(BadBinary, match=str(MAX_HEADER_BYTES)):
        parse((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"\0" * (MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a":NaN}', '{"a":1e999}', '{"a":1,"a":2}', '{"a":[' + "{}," * 2**15 + "1]}"]
)
def test_an_error_of_the_metadata_says_that_it_is_there(text):
    with pytest.raises(ServiceError, match=r"^__metadata__\.request: "):
        parse(file({"__metadata__": {"request": text}}))


def test_no_message_repeats_a_name_of_the_caller():
    headers: list[dict[str, dict]] = [{"secret": entry(end=20)}, {"secret": {}}, {"secret": entry("F31")}]
    for header in headers:
        with pytest.raises(BadBinary) as caught:
            parse(file(header, b"\0" * 24))
        assert "secret" not in caught.value.message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_without_another_error(body):
    with pytest.raises((BadBinary, BadEncoding, UnknownField)):
        parse(body)


def tensors_of(answer: Answer, axes: str) -> dict[str, torch.Tensor]:
    call, cost = Call(answer.output, None, None), NOTHING
    return CheckedRequest(call, cost, Layout(axes), TensorForm.BASE64).tensors(answer)


def without_batch(answer: Answer) -> dict[str, torch.Tensor]:
    return tensors_of(answer, "ld")


FACTS = AnswerFacts(2, "small", "sha256:0", BatchInfo(3, 4, 5), lambda: {"total": 1.5})


def test_the_library_reads_an_answer_and_every_tensor_of_it_is_aligned(tmp_path):
    values = torch.rand(1, 2, 3, 1, dtype=torch.float32)
    top = TopK(values, torch.zeros(1, 2, 3, 1, dtype=torch.int32), torch.rand(1, 2, 3))
    output = torch.rand(1, 3, 5).to(torch.float16)
    body = b"".join(write_safetensors(without_batch(Answer(output, top)), FACTS))
    path = tmp_path / "answer.safetensors"
    path.write_bytes(body)
    with safe_open(path, "pt") as found:
        assert set(found.keys()) == {"output", "weights.values", "weights.indices", "weights.rest"}
        assert torch.equal(found.get_tensor("output"), output[0])
        assert torch.equal(found.get_tensor("weights.values"), values[0])
        facts = json.loads(found.metadata()["response"])
    assert facts == {
        "masked_rows": 2,
        "layer": {"name": "small", "digest": "sha256:0"},
        "batch": {"requests": 3, "sequences": 4, "tokens": 5},
        "timing_ms": {"total": 1.5},
    }
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    for name, told in header.items():
        if name != "__metadata__":
            size = {"F16": 2, "F32": 4, "I32": 4}[told["dtype"]]
            assert (8 + length + told["data_offsets"][0]) % size == 0


def test_an_answer_is_encoded_without_a_copy():
    output = torch.rand(2, 3, 5)
    _, piece = write_safetensors(tensors_of(Answer(output), "bld"), FACTS)
    assert np.frombuffer(piece, np.float32).ctypes.data == output.data_ptr()


def test_nan_bits_of_an_answer_are_preserved():
    output = torch.tensor([[[float("nan"), float("inf"), -0.0, 1e-45]]])
    body = b"".join(write_safetensors(without_batch(Answer(output)), FACTS))
    assert load(body)["output"].view(torch.int32).tolist() == output[0].view(torch.int32).tolist()
