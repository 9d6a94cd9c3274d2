"""RequestTemplates: a request with a cached header gives the same Call as a full decode."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from service.attention.spec import LayerSpec
from service.errors import BadShape, CostLimit, NonFinite, UnknownField
from service.wire import safetensors_codec
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.safetensors_codec import (
    MAX_REMEMBERED_BYTES,
    NUM_REMEMBERED,
    RequestTemplate,
    RequestTemplates,
    parse_safetensors,
    read_header,
)
from tests.attention_fixtures import make_spec

SPEC = make_spec(8, 4)
DEPTH = 32
PLENTY = RequestLimits(*(2**62,) * 5)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def body_of(seed: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, **fields: Any) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return save(tensors, {"request": json.dumps(fields)} if fields else None)


def query(seed: int = 0, rows: int = 3, **fields: Any) -> bytes:
    return body_of(seed, {"query": (rows, 8)}, **fields)


def read(
    templates: RequestTemplates, body: bytes, name: str = "a", digest: str = "d", spec: LayerSpec = SPEC
) -> CheckedRequest:
    return templates.read(bytearray(body), name, digest, spec)


def whole_way(body: bytes | bytearray, name: str = "a") -> CheckedRequest:
    def go() -> CheckedRequest:
        return check_request(parse_safetensors(bytearray(body), max_depth=DEPTH), name, SPEC, PLENTY)

    return go()


def assert_same(found: CheckedRequest, expected: CheckedRequest) -> None:
    assert found[1:] == expected[1:]
    for got, right in zip(found.call, expected.call, strict=True):
        if isinstance(right, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert (got.dtype, got.shape) == (right.dtype, right.shape)
            assert torch.equal(got, right)
        else:
            assert got == right


def test_a_template_has_every_field_of_its_request():
    """Fields that come later too: each but the tensors is the same object."""
    body = bytearray(body_of(0, {"query": (3, 8), "key": (2, 8)}))
    request = whole_way(body)
    tensors = {name for name, value in request.call._asdict().items() if isinstance(value, torch.Tensor)}
    marks: dict[str, Any] = {name: object() for name in request.call._fields if name not in {*tensors, "mask"}}
    others: dict[str, Any] = {name: object() for name in request._fields if name != "call"}
    request = request._replace(call=request.call._replace(**marks), **others)
    template = RequestTemplate.of(request, read_header(body).tensors)
    assert template is not None
    found = template.read(body)
    assert {name: getattr(found.call, name) for name in marks} == marks
    assert {name: getattr(found, name) for name in others} == others
    assert_same(found, request)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("has_tensor", [True, False])
def test_a_field_whose_values_are_more_than_finite_gives_no_template(dtype, has_tensor):
    """A field that comes later: its tensor is in the call, or the call has something else that was made of it."""
    tensors = {"query": torch.ones(3, 8), "value": torch.ones(3, dtype=dtype)}
    request = whole_way(bytearray(body_of(0, {"query": (3, 8)})))
    changed: dict[str, Any] = {"value": tensors["value"] if has_tensor else None}
    request = request._replace(call=request.call._replace(**changed))
    assert RequestTemplate.of(request, read_header(bytearray(save(tensors))).tensors) is None


@pytest.fixture
def counted(monkeypatch):
    """How often a body went the whole way."""
    calls = []

    def parse(body: bytearray, **limits: int) -> dict[str, object]:
        calls.append(len(body))
        return parse_safetensors(body, **limits)

    monkeypatch.setattr(safetensors_codec, "parse_safetensors", parse)
    return calls


@given(
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (2,)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([("query",), ("query", "key"), ("query", "key", "value")]),
)
def test_a_template_reads_the_same_request_as_the_full_parse(data, dtype, batch, rows, names):
    shapes = {name: (*batch, rows[name != "query"], 8) for name in names}
    keys = rows[len(names) > 1]
    wanted = [{"form": "mean"}, {"form": "top_k", "k": keys, "heads": [3, 0]}, {"form": "heads", "queries": [0]}]
    fields = data.draw(st.fixed_dictionaries({}, optional={"weights": st.sampled_from(wanted)}))
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for seed in range(3):
        body = body_of(seed, shapes, dtype, **fields)
        assert_same(read(templates, body), whole_way(body))
    assert len(templates.known) == 1


def test_only_the_first_request_of_a_template_is_fully_parsed(counted):
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for seed in range(3):
        read(templates, query(seed))
    read(templates, query(rows=4))
    assert counted == [len(query()), len(query(rows=4))]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_every_value_of_every_request_is_checked_and_reported_by_its_index(bad, shape):
    templates, tensor = RequestTemplates(PLENTY, DEPTH, 2**20), torch.zeros(shape)
    read(templates, save({"query": tensor}))
    tensor.view(-1, 8)[2, 5] = bad
    with pytest.raises(NonFinite) as found:
        read(templates, save({"query": tensor}))
    with pytest.raises(NonFinite) as expected:
        whole_way(save({"query": tensor}))
    assert (found.value.message, found.value.param) == (expected.value.message, expected.value.param)


def test_an_unaligned_body_is_read():
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    header = json.dumps({"query": {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, 32]}}).encode()
    for pad in range(4):
        text = header + b" " * pad
        for seed in range(2):
            rows = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
            body = len(text).to_bytes(8, "little") + text + rows.numpy().tobytes()
            assert torch.equal(read(templates, body).call.query[0], rows)


def test_a_template_belongs_to_one_version_of_one_layer(counted):
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for num_checked, name in enumerate(("a", "b", "a", "b"), start=1):
        read(templates, query(), name, "d")
        assert len(counted) == min(num_checked, 2)
    with pytest.raises(BadShape):
        read(templates, query(), "a", "another", make_spec(12, 4))
    assert len(counted) == 3


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (query(odd=1), UnknownField),
        (body_of(0, {"query": (3, 9)}), BadShape),
        (save({"query": torch.full((3, 8), torch.nan)}), NonFinite),
    ],
)
def test_a_refused_request_leaves_no_template_and_is_refused_again(body, error, counted):
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for _ in range(2):
        with pytest.raises(error):
            read(templates, body)
    assert len(counted) == 2
    assert len(templates.known) == 0


def test_a_too_expensive_request_is_refused_every_time():
    templates = RequestTemplates(dataclasses.replace(PLENTY, max_tokens=3), DEPTH, 2**20)
    read(templates, query(rows=3))
    for _ in range(2):
        with pytest.raises(CostLimit):
            read(templates, query(rows=4))


def test_masks_are_checked_in_every_request():
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for allowed in (True, False, True):
        mask = torch.full((3,), allowed)
        body = save(
            {"query": torch.zeros(3, 8), "masks.0.values": mask}, {"request": '{"masks": [{"kind": "attend"}]}'}
        )
        assert read(templates, body).masked_rows == (0 if allowed else 3)
    assert len(templates.known) == 0


def test_a_template_keeps_no_reference_to_a_body():
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for seed in range(2):
        body = bytearray(query(seed))
        request = templates.read(body, "a", "d", SPEC)
        with pytest.raises(BufferError):
            body.append(0)
        del request
        body.append(0)  # nothing refers to its memory any more


def test_the_number_of_templates_is_bounded():
    templates = RequestTemplates(PLENTY, DEPTH, 2**20)
    for rows in range(1, NUM_REMEMBERED + 10):
        assert read(templates, query(rows=rows)).call.query.shape[1] == rows
        assert len(templates.known) <= NUM_REMEMBERED
    before = len(templates.known)
    read(templates, save({"query": torch.zeros(3, 8)}, {"request": "{}" + " " * MAX_REMEMBERED_BYTES}))
    assert len(templates.known) == before


@pytest.mark.parametrize(("dtype", "is_body"), [(torch.bool, False), (torch.int64, True)])
def test_a_request_whose_tensors_hold_a_much_larger_body_counts_with_the_body(dtype, is_body):
    """Each value of the mask becomes one byte, but the query is a view that holds the whole body."""
    tensors = {"query": torch.zeros(200, 8), "masks.0.values": torch.ones(200, 200, dtype=dtype)}
    body = bytearray(save(tensors, {"request": json.dumps({"masks": [{"kind": "attend"}]})}))
    request = RequestTemplates(PLENTY, DEPTH, 2**20).read(body, "layer", "digest", SPEC)
    decoded = 200 * 8 * 4 + 200 * 200
    assert request.cost.input_bytes == decoded
    assert request.holding(len(body)).cost.input_bytes == (len(body) if is_body else decoded)
    assert request.holding(len(body)).call is request.call
