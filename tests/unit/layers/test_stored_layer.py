"""StoredLayer: names, tensors and values are checked, and the digest follows its definition."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from pathlib import Path

import pytest
import torch

from service.attention.spec import WRITTEN_FIELDS
from service.errors import LayerError
from service.layers.directory import check_name
from service.layers.store import Store, StoredLayer, digest
from tests.unit.layers.checkpoints import random, spec, stored

GOOD_NAMES = ["a", "0", "minilm-l0", "a.b_c-d", "a..b", "x" * 64, "0-._"]
BAD_NAMES = [
    "", ".", "..", "../etc", "a/../b", "/etc/passwd", "x/", "\\x", " ..", " a", "a ", "\t", "a\n", "\na", "a\r", "A", "aB",
    "-a", "_a", ".a", "x" * 65, "x" * 10_240, "\u202eabc", "a\u200b", "é", "ａ", "٣", "a\0", "\0", "a:b", "~", "a%2fb",
    "file://a", "http://169.254.169.254/", "a*", "a;b", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_legal_name_is_accepted(name):
    check_name(name)


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_any_other_name_is_refused_without_being_repeated(name):
    with pytest.raises(LayerError, match=r"^a layer's name is 1 to 64 of a-z") as caught:
        check_name(name)
    with pytest.raises(LayerError) as other:
        check_name("!")
    assert caught.value.message == other.value.message


def test_a_layer_with_an_illegal_name_cannot_exist():
    with pytest.raises(LayerError, match="name"):
        dataclasses.replace(stored(), name="../x")


def build(tensors, **changes) -> StoredLayer:
    return StoredLayer("x", spec(**changes), tensors, "here", "bert")


def test_a_layer_has_exactly_the_tensors_of_its_spec():
    """Missing, extra and wrong shape are each named."""
    tensors = stored().tensors
    lacking = {key: value for key, value in tensors.items() if not key.startswith("key.")}
    with pytest.raises(LayerError, match=r"missing: 'key.bias', 'key.weight'"):
        build(lacking)
    with pytest.raises(LayerError, match=r"unknown to the spec: 'bias_k'"):
        build({**tensors, "bias_k": random(6)})
    with pytest.raises(LayerError, match=r"'output.weight' has the shape \[6, 5\], expected \[6, 6\]"):
        build({**tensors, "output.weight": random(6, 5)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_layer_with_one_non_finite_value_is_refused(value, dtype):
    """F6: the tensor is named."""
    tensors = stored(dtype=dtype).tensors
    tensors["value.bias"][-1] = value
    with pytest.raises(LayerError, match=r"'value.bias' holds NaN or infinity"):
        build(tensors)


def test_the_largest_finite_values_are_kept():
    tensors = stored(dtype=torch.float16).tensors
    tensors["value.bias"][:] = torch.finfo(torch.float16).max
    assert build(tensors).dtype == torch.float16


def test_all_tensors_have_one_floating_point_dtype():
    tensors = stored().tensors
    for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(LayerError, match=r"'key.weight' must be a dense CPU tensor of F16, BF16, F32, F64"):
            build({**tensors, "key.weight": torch.zeros(6, 6).to(dtype)})
    with pytest.raises(LayerError, match=r"mix the dtypes BF16, F32"):
        build({**tensors, "key.weight": random(6, 6, dtype=torch.bfloat16)})


def test_tensors_elsewhere_or_sparse_are_refused():
    tensors = stored().tensors
    for odd in (torch.zeros(6, 6, device="meta"), torch.zeros(6, 6).to_sparse()):
        with pytest.raises(LayerError, match="dense CPU"):
            build({**tensors, "key.weight": odd})


@pytest.mark.parametrize("source", ["x" * 201, "a\nb", "a\x1b[31m", "\u202e"], ids=range(4))
def test_a_source_is_a_short_printable_text(source):
    with pytest.raises(LayerError, match="source"):
        dataclasses.replace(stored(), source=source)


def test_a_family_is_a_plain_word():
    with pytest.raises(LayerError, match="family"):
        dataclasses.replace(stored(), family="Bert <b>")


def test_the_digest_follows_its_docstring():
    """A second, literal implementation of the layout."""
    layer = stored(biases=("value", "query"), has_output=False)
    fields = {name: getattr(layer.spec, name) for name in WRITTEN_FIELDS} | {"biases": ["query", "value"]}
    names = ["key.weight", "query.bias", "query.weight", "value.bias", "value.weight"]
    tensors = [[name, "F32", list(layer.tensors[name].shape)] for name in names]
    header = json.dumps({"spec": fields, "tensors": tensors}, sort_keys=True, separators=(",", ":")).encode()
    data = b"".join(layer.tensors[name].numpy().tobytes() for name in names)
    expected = hashlib.sha256(struct.pack("<Q", len(header)) + header + data).hexdigest()
    assert layer.digest == f"sha256:{expected}"


def test_the_digest_never_changes():
    """Golden: clients pin layers by this text."""
    shapes = spec().tensor_shapes().items()
    tensors = {key: (torch.arange(float(math.prod(shape))) - 3.5).reshape(shape) / 8 for key, shape in shapes}
    assert digest(spec(), tensors) == "sha256:8fd016a583aadebbe06229f5bd33702989a898a3219474397f12ca4393fb677d"


def test_a_file_of_the_first_release_loads_and_is_written_again_byte_for_byte(tmp_path):
    """Golden: format_version 1, as written on 2026-11-27."""
    kept = Path(__file__).parent / "files"
    layer = Store(kept).load("small")
    assert layer.digest == "sha256:5308f64c731555b1d795fa62263427a761b851f4d2238593e0f1c4135a59bd0b"
    assert Store(tmp_path).save(layer).read_bytes() == (kept / "small.safetensors").read_bytes()


def test_the_digest_depends_on_the_layer_and_not_its_name():
    """Same for another name, source, family or order; different for one bit, dtype, number or swapped tensors."""
    layer = stored()
    reordered = dict(reversed(layer.tensors.items()))
    strided = {key: value.T.contiguous().T for key, value in layer.tensors.items() if value.ndim == 2}
    same = [
        dataclasses.replace(layer, name="other", source="elsewhere", family="vit"),
        dataclasses.replace(layer, tensors=reordered),
        dataclasses.replace(layer, tensors={**layer.tensors, **strided}),
        dataclasses.replace(layer, spec=spec(biases=("output", "value", "key", "query"))),
    ]
    assert {other.digest for other in same} == {layer.digest}
    flipped = {key: value.clone() for key, value in layer.tensors.items()}
    flipped["key.bias"].view(torch.int32)[0] ^= 1
    swapped = {**layer.tensors, "key.bias": layer.tensors["query.bias"], "query.bias": layer.tensors["key.bias"]}
    halved = {key: value.to(torch.bfloat16) for key, value in layer.tensors.items()}
    different = [
        dataclasses.replace(layer, tensors=flipped),
        dataclasses.replace(layer, tensors=swapped),
        dataclasses.replace(layer, tensors=halved),
        dataclasses.replace(layer, spec=spec(scale=0.25)),
        dataclasses.replace(layer, spec=spec(add_zero_attn=True)),
        dataclasses.replace(layer, spec=spec(num_heads=3, num_kv_heads=3, head_width=2, value_head_width=2)),
    ]
    assert len({layer.digest, *(other.digest for other in different)}) == 1 + len(different)
