"""The companion file: what is saved is loaded, and whatever else lies there is one sentence."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.errors import LayerError, LayerMissing
from service.layers.directory import LayerExists
from service.layers.store import Store
from service.models.stored_model import ModelStore
from tests.unit.models.encoders import CONFIGS, checkpoint, imported


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    """The bytes of a stored model, and the model."""
    directory = tmp_path_factory.mktemp(request.param)
    model, _ = imported(checkpoint(directory / "source", request.param))
    return ModelStore(directory).save(model).read_bytes(), model


def damaged(path, raw: bytes, max_bytes: int | None = None) -> str:
    path.mkdir(exist_ok=True)
    (path / "tiny.model").write_bytes(raw)
    with pytest.raises(LayerError) as raised:
        ModelStore(path, max_bytes).load("tiny")
    assert raised.value.message.startswith('model "tiny": ')
    assert len(raised.value.message) <= 500
    return raised.value.message


def rewritten(raw: bytes, change) -> bytes:
    """The file with another header; `change` gets the header and the model's metadata, and may change both."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    about = json.loads(header["__metadata__"]["model"])
    change(header, about)
    if header.get("__metadata__"):
        header["__metadata__"]["model"] = json.dumps(about)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def test_a_saved_model_is_loaded_with_every_bit(tmp_path, saved):
    raw, model = saved
    (tmp_path / "tiny.model").write_bytes(raw)
    store = ModelStore(tmp_path, len(raw))
    loaded, about = store.load("tiny"), store.about("tiny")
    for found in (loaded, about):
        for field in ("name", "family", "source", "digest", "layers", "options"):
            assert getattr(found, field) == getattr(model, field)
    assert loaded.tokenizer == model.tokenizer
    assert loaded.tensors.keys() == model.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in model.tensors.items())
    assert store.names() == ["tiny"]
    assert Store(tmp_path).names() == []


def test_the_digest_is_of_the_contents_and_not_of_the_name(tmp_path, saved):
    _, model = saved
    again, _ = imported(checkpoint(tmp_path / "source", model.family), "other")
    assert again.digest == model.digest


def test_another_model_is_replaced_only_where_that_is_asked_for(tmp_path, saved):
    _, model = saved
    ModelStore(tmp_path).save(model, replace=False)
    with pytest.raises(LayerExists):
        ModelStore(tmp_path).save(model, replace=False)
    ModelStore(tmp_path).save(model)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(LayerMissing, match='model "tiny": the layer directory has no file of that name'):
        ModelStore(tmp_path).load("tiny")


def test_a_link_out_of_the_directory_is_refused(tmp_path, saved):
    (tmp_path / "outside").write_bytes(saved[0])
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "tiny.model").symlink_to(tmp_path / "outside")
    with pytest.raises(LayerError, match="outside the layer directory"):
        ModelStore(tmp_path / "layers").about("tiny")


def test_a_file_above_the_limit_is_refused(tmp_path, saved):
    assert "(ATTENTION_MAX_LAYER_BYTES)" in damaged(tmp_path, saved[0], len(saved[0]) - 1)


def options(**changes):
    return lambda _, about: about["options"].update(changes)


def swapped(header, _):
    one, other = header["0.inner.weight"], header["0.outer.weight"]
    one["shape"], other["shape"] = other["shape"], one["shape"]


def two_axes(header, _):
    header["tokenizer"]["shape"].append(1)


def without(*path):
    def change(header, about):
        place = {"__metadata__": header["__metadata__"], "model": about}[path[0]]
        for name in path[1:-1]:
            place = place[name]
        del place[path[-1]]

    return change


def about_is(**changes):
    return lambda _, about: about.update(changes)


DAMAGE = {
    "wrong digest": (about_is(digest="sha256:" + "0" * 64), "digest does not match"),
    "no digest": (without("model", "digest"), "lacks a field"),
    "digest that is none": (about_is(digest=""), "digest is not one"),
    "digest that is no text": (about_is(digest=7), "must be texts"),
    "another eps": (options(eps=1e-3), "digest does not match"),
    "another activation": (options(activation="relu6"), "activation must be one of"),
    "activation that is no text": (options(activation=["gelu"]), "activation must be one of"),
    "eps of NaN": (options(eps=float("nan")), "finite"),
    "width of 0": (options(width=0), "width must be a whole number of at least 1"),
    "width as text": (options(width="8"), "width must be a whole number of at least 1"),
    "huge width": (options(inner_width=2**62), "has the shape"),
    "no positions": (options(position_offset=40), "no position for a token"),
    "unknown option": (options(rope=True), "lacks a field or has an unknown one"),
    "options that are none": (about_is(options=[1]), "lacks a field or has an unknown one"),
    "unknown field": (about_is(rope="1"), "lacks a field or has an unknown one"),
    "no layers": (about_is(layers=[]), "layers must be names"),
    "fewer layers": (lambda _, about: about["layers"].pop(), "unknown to the spec"),
    "layers that are none": (about_is(layers=[{"name": "x"}] * 2), "lacks a field or has an unknown one"),
    "layers of numbers": (about_is(layers=[{"name": 1, "digest": 2}] * 2), "must be texts"),
    "layers above the directory": (about_is(layers=[{"name": "../x", "digest": "sha256:" + "0" * 64}] * 2), "names"),
    "another version": (about_is(format_version=2), "format_version 1 only"),
    "source with a line break": (about_is(source="a\nb"), "all printable"),
    "swapped shapes": (swapped, "has the shape"),
    "no metadata": (lambda header, _: header.pop("__metadata__"), "one key model"),
    "tokenizer of two axes": (
        lambda header, _: header["tokenizer"].update(shape=[1, *header["tokenizer"]["shape"]]),
        "no tokenizer",
    ),
    "tokenizer of another dtype": (lambda header, _: header["tokenizer"].update(dtype="I8"), "expected one of U8"),
}


@pytest.mark.parametrize(("change", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_header_is_one_sentence(tmp_path, saved, change, reason):
    assert re.search(reason, damaged(tmp_path, rewritten(saved[0], change)))


def test_metadata_that_is_no_json_is_one_sentence(tmp_path, saved):
    raw = rewritten(saved[0], lambda header, _: header.update(__metadata__={"model": "{"}))
    text = raw.replace(b'"__metadata__": {"model": ', b'"__metadata__": {"other": ')
    assert "one key model" in damaged(tmp_path, text)


@pytest.mark.parametrize("saved", ["bert"], indirect=True)
@given(data=st.data())
def test_no_damage_to_the_bytes_passes(tmp_path_factory, saved, data):
    """Truncated, extended, or with other bytes anywhere: the digest covers what the header's own checks do not."""
    raw, path = saved[0], tmp_path_factory.getbasetemp() / "damaged"
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["cut", "longer", "byte"]))
    byte = bytes([data.draw(st.integers(0, 255))])
    broken = {"cut": raw[:at], "longer": raw + byte, "byte": raw[:at] + byte + raw[at + 1 :]}[kind]
    if broken == raw:
        return
    path.mkdir(exist_ok=True)
    (path / "tiny.model").write_bytes(broken)
    try:
        loaded = ModelStore(path).load("tiny")
    except LayerError as error:
        assert error.message.startswith('model "tiny": ')  # noqa: PT017 (not all damage is an error)
    else:  # the name of a layer or the source
        assert loaded.digest == saved[1].digest
