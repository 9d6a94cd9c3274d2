"""Arguments: options and files become one request body, and a saved request has the labels of its rows and keys."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from attention_client.cli.arguments import request_body, saved_request, tensor_field
from attention_client.errors import InvalidInput

X = np.ones((3, 2), np.float32)
FIELDS: dict[str, Any] = {"masks": [{"kind": "attend", "axes": "s"}], "weights": "mean"}


def test_the_positions_and_the_past_of_files_are_fields_of_the_body(tmp_path):
    arrays: dict[str, Any] = {"query": X, "positions": np.arange(3), "past_key": X[None], "past_value": X[None]}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: tmp_path / f"{name}.npy" for name in arrays}
    body, options = request_body(
        None, {**files, "key": None}, None, None, None, {"layer_masks": "none", "present": True}
    )
    assert body["positions"] == tensor_field(np.arange(3))
    assert (body["positions"]["dtype"], body["layer_masks"], body["present"]) == ("int64", "none", True)
    assert "key" not in body
    assert options["past_key"] == "--past-key"


def test_a_safetensors_file_is_the_same_request_as_json_and_both_may_have_labels(tmp_path):
    allowed = np.array([True, False, True])
    metadata = {"request": json.dumps(FIELDS), "labels": '["a", " b", "c"]', "format": "np"}
    save_file({"query": X, "masks.0.values": allowed}, tmp_path / "x.safetensors", metadata)
    mask = FIELDS["masks"][0] | {"values": tensor_field(allowed)}
    body = FIELDS | {"query": tensor_field(X), "masks": [mask]}
    (tmp_path / "x.json").write_text(json.dumps({"request": body, "labels": ["a", " b", "c"]}), encoding="utf-8")
    for name in ("x.safetensors", "x.json"):
        assert saved_request(tmp_path / name) == (body, [["a", " b", "c"], None])
    (tmp_path / "plain.json").write_text(json.dumps(body), encoding="utf-8")
    assert saved_request(tmp_path / "plain.json") == (body, [None, None])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"labels": '"abc"'}, "must be lists of texts"),
        ({"key_labels": "[1]"}, "must be lists of texts"),
        ({"labels": "["}, "is not a safetensors file of a request"),
        ({"request": "[]"}, "is not a safetensors file of a request"),
        ({"request": '{"masks": []}'}, "is not a safetensors file of a request"),
        ({"request": '{"lse": true, "lse": true}'}, "duplicate key"),
    ],
)
def test_a_saved_request_that_is_none_is_one_sentence_with_its_path(tmp_path, metadata, words):
    save_file(
        {"query": X, "masks.0.values": X > 0}, tmp_path / "x.safetensors", {"request": json.dumps(FIELDS)} | metadata
    )
    with pytest.raises(InvalidInput, match=words):
        saved_request(tmp_path / "x.safetensors")
