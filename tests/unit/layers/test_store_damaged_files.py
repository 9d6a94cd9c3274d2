"""Store: damaged, forged and foreign files are refused."""

from __future__ import annotations

import json
import pickle
import random as stdlib_random
import re

import pytest
import safetensors.torch
import torch

from service.errors import LayerError
from service.layers.store import Store
from tests.unit.layers.checkpoints import Bomb, raw_file, stored
from tests.unit.layers.refusals import refused_load


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "layers")


def test_f7_pickle_with_our_suffix_is_refused_and_never_run(store):
    """F7: no fallback to torch.load; unpickling it would end this process."""
    store.save(stored("other"))
    path = store.directory / "tiny.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    refused_load(store)
    torch.save({"query.weight": torch.zeros(6, 6)}, path)
    refused_load(store)
    torch.save({"query.weight": torch.zeros(6, 6)}, path, _use_new_zipfile_serialization=False)
    refused_load(store)


def rewritten(store: Store, *, tensors=None, metadata=None, **fields) -> str:
    """Return the refusal of a well-formed file with other tensors, metadata or fields (None removes one)."""
    layer = stored()
    text = {
        **layer.spec.to_json(),
        "source": layer.source,
        "family": layer.family,
        "digest": layer.digest,
        "format_version": 1,
        **fields,
    }
    text = {key: value for key, value in text.items() if value is not None}
    store.directory.mkdir(exist_ok=True)
    content = safetensors.torch.save(
        layer.tensors if tensors is None else tensors,
        metadata={"spec": json.dumps(text)} if metadata is None else metadata,
    )
    (store.directory / "tiny.safetensors").write_bytes(content)
    return refused_load(store)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"digest": "sha256:" + "0" * 64}, "digest does not match the tensors"),
        ({"digest": ""}, "digest does not match the tensors"),
        ({"scale": 0.75}, "digest does not match the tensors"),
        ({"add_zero_attn": True}, "digest does not match the tensors"),
        ({"digest": None}, "has no digest"),
        ({"digest": 5}, "has no digest"),
        ({"source": None}, "has no source"),
        ({"source": "a\u0000b"}, "source must have at most"),
        ({"source": "x" * 1000}, "source must have at most"),
        ({"family": ["bert"]}, "has no family"),
        ({"family": "<script>"}, "the family must be 1 to 64"),
        ({"format_version": 2}, "format_version 2 does not fit"),
        ({"format_version": True}, "format_version 1 and 2 only"),
        ({"format_version": None}, "format_version 1 and 2 only"),
        ({"format_version": [1]}, "format_version 1 and 2 only"),
        ({"scale": None}, "lacks scale"),
        ({"scale": 1}, "scale must be"),
        ({"scale": "0.5"}, "scale must be"),
        ({"num_heads": 0}, "num_heads must be"),
        ({"num_heads": 2.0}, "num_heads must be"),
        ({"num_heads": True}, "num_heads must be"),
        ({"num_heads": 10**18}, "cannot share|expected"),
        ({"query_width": 10**18, "key_width": 10**18, "head_width": 10**18}, "expected"),
        ({"biases": "query"}, "biases must be"),
        ({"biases": ["query", "query"]}, "biases must be"),
        ({"biases": [["query"]]}, "biases must be"),
        ({"biases": ["query", "key", "value"]}, "unknown to the spec: 'output.bias'"),
        ({"has_bias_kv": True}, "missing: 'bias_k', 'bias_v'"),
        ({"has_output": 1}, "must be true or false"),
        ({"more": 1}, "unknown fields 'more'"),
        ({"x" * 10_000: 1}, "unknown fields"),
        ({"\u05d0\u00e9": 1}, r"unknown fields '\\u05d0\\xe9'$"),
    ],
    ids=range(32),
)
def test_a_spec_that_does_not_match_the_tensors_is_refused(store, fields, why):
    """F4, F15: the message names the keys at fault and is bounded however long they are."""
    assert re.search(why, rewritten(store, **fields))


def test_f4_tensors_that_do_not_match_the_spec_are_refused(store):
    """F4: missing, extra, wrong shape, mixed or integer dtypes, each named."""
    tensors = stored().tensors
    lacking = {key: value for key, value in tensors.items() if key != "key.weight"}
    extra = {**tensors, **{f"x{i:05}" * 20: torch.zeros(1) for i in range(99)}}
    assert "missing: 'key.weight'" in rewritten(store, tensors=lacking)
    assert "and 95 more" in rewritten(store, tensors=extra)
    assert "'key.bias' has the shape [5], expected [6]" in rewritten(
        store, tensors={**tensors, "key.bias": torch.zeros(5)}
    )
    assert "mix the dtypes F16, F32" in rewritten(store, tensors={**tensors, "key.bias": torch.zeros(6).half()})
    assert "holds I64" in rewritten(store, tensors={**tensors, "key.bias": torch.zeros(6, dtype=torch.int64)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_f6_non_finite_weights_are_refused(store, value):
    """F6: safetensors does not look at values."""
    tensors = {**stored().tensors, "output.bias": torch.full((6,), value)}
    assert "'output.bias' holds NaN or infinity" in rewritten(store, tensors=tensors)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "the one key spec"),
        ({"format": "pt"}, "the one key spec"),
        ({"spec": "{}", "format": "pt"}, "the one key spec"),
        ({"spec": ""}, "not valid JSON"),
        ({"spec": "[]"}, "must be a JSON object"),
        ({"spec": '{"a": 1, "a": 1}'}, "duplicate key"),
        ({"spec": '{"scale": NaN}'}, "not finite"),
        ({"spec": "[" * 20_000}, "nested too deeply"),
        ({"spec": "x" * 70_000}, "the limit is 65536"),
    ],
    ids=range(9),
)
def test_f15_malformed_metadata_is_refused(store, metadata, why):
    """F15: also duplicate keys, junk and endless depth inside the JSON of the spec."""
    assert why in rewritten(store, metadata=metadata)


def test_a_surrogate_in_the_spec_is_refused(store):
    """A JSON escape can name a character that UTF-8 cannot encode."""
    store.directory.mkdir()
    header = b'{"__metadata__":{"spec":"\\ud800"}}'
    (store.directory / "tiny.safetensors").write_bytes(raw_file(header))
    assert "not valid JSON in UTF-8" in refused_load(store)


def test_a_changed_weight_is_detected_by_the_digest(store):
    """One bit changes, and the value stays finite."""
    path = store.save(stored())
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    assert "the file was changed" in refused_load(store)


def test_f3_bytes_after_the_tensors_are_refused(store):
    """F3: a zip archive hidden behind a layer."""
    path = store.save(stored())
    path.write_bytes(path.read_bytes() + b"PK\x05\x06" + bytes(18))
    assert "end at byte" in refused_load(store)


def test_the_file_name_is_the_name_of_the_layer(store):
    """A renamed file is a layer of the new name, with the same digest."""
    path = store.save(stored())
    path.rename(store.directory / "renamed.safetensors")
    layer = store.load("renamed")
    assert (layer.name, layer.digest) == ("renamed", stored().digest)


def mutated(content: bytes, generator: stdlib_random.Random) -> bytes:
    """Return the content with one damage in header or data: a flipped bit, or changed, lost, doubled or foreign bytes."""
    changed = bytearray(content)
    header_end = 8 + int.from_bytes(content[:8], "little")
    at = generator.randrange(generator.choice([8, header_end, len(content)]))
    damage = generator.randrange(6)
    if damage == 0:
        changed[at] ^= 1 << generator.randrange(8)
    elif damage == 1:
        changed[at] = generator.choice(b'{}[]",:0123456789.eE-+aFnt\\ \x00\xff')
    elif damage == 2:
        del changed[at : at + generator.randrange(1, 40)]
    elif damage == 3:
        changed[at:at] = generator.randbytes(generator.randrange(1, 40))
    elif damage == 4:
        del changed[at:]
    else:
        start = generator.randrange(header_end)
        changed[at:at] = content[start : start + generator.randrange(1, 60)]
    return bytes(changed)


def test_any_damaged_file_is_a_layer_error_or_the_same_layer(store):
    """4,000 damaged files: each raises LayerError or, if only a blank or the source's text changed, is still the same layer."""
    generator = stdlib_random.Random(11)
    layer = stored(num_heads=1, num_kv_heads=1, has_output=False, out_width=3, biases=("query",))
    path = store.save(layer)
    good = path.read_bytes()
    survivors, messages = 0, set()
    for _ in range(4000):
        path.write_bytes(mutated(good, generator))
        try:
            back = store.load("tiny")
        except LayerError as error:
            messages.add(error.message)
        else:
            survivors += 1
            assert back.digest == layer.digest
            assert back.spec == layer.spec
            assert all(torch.equal(back.tensors[key], value) for key, value in layer.tensors.items())
    assert survivors < 400
    assert all(message.startswith('layer "tiny": ') and len(message) <= 500 for message in messages)
