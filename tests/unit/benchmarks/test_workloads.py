"""Every subject gets the same layer, requests and answers, each in its own wire format."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save, save_file

from benchmarks.echo import SIZE_HEADER
from benchmarks.packed import HEADS, PackedLayer
from benchmarks.wires import echo_wires, plain_wires, service_wires, triton_wires, write_requests
from benchmarks.workloads import LENGTHS, W1, W2, W3, Workload, correct_answers, of_length
from examples.make_demo_layer import WIDTH, demo_tensors

SMALL = Workload("small", (3, 1, 5))
X = SMALL.inputs()[0]


def torch_module() -> torch.nn.MultiheadAttention:
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=True, batch_first=True).double().eval()
    module.load_state_dict({name: torch.from_numpy(array).double() for name, array in demo_tensors().items()})
    return module


def test_the_workloads_are_fixed():
    assert (len(W1.lengths), set(W1.lengths)) == (64, set(LENGTHS))
    assert W2.tokens_a_request == 16
    assert W3.lengths == W1.lengths
    assert all(a.shape == (n, WIDTH) for a, n in zip(W1.inputs(), W1.lengths, strict=True))


@pytest.mark.parametrize(("length", "num"), [(8, 64), (256, 64), (1024, 16), (4096, 4)])
def test_long_requests_are_fewer(length, num):
    assert of_length(length).lengths == (length,) * num


@torch.inference_mode()
@pytest.mark.parametrize("form", ["binary", "weights", "three"])
def test_the_correct_answer_is_that_of_torch_s_own_module(form):
    work, module = Workload("small", SMALL.lengths, form), torch_module()
    for x, correct in zip(work.inputs(), correct_answers(work), strict=True):
        query = torch.from_numpy(x)[None].double()
        output, weights = module(query, query, query, need_weights=True, average_attn_weights=False)
        parts = [output[0].numpy().ravel()] + ([weights[0].numpy().ravel()] if form == "weights" else [])
        np.testing.assert_allclose(correct, np.concatenate(parts), atol=1e-12)


def test_packed_sequences_do_not_see_each_other(tmp_path):
    save_file(demo_tensors(), tmp_path / "layer.safetensors")
    layer = PackedLayer.load(tmp_path / "layer.safetensors")
    xs = [torch.from_numpy(x) for x in SMALL.inputs()]
    for together, x in zip(layer.forward(xs), xs, strict=True):
        torch.testing.assert_close(together, layer.forward([x])[0])


def test_the_wires_of_the_service_build_its_requests():
    wires = service_wires("bench")
    headers, body = wires["binary"].write(X)
    assert headers == {"Content-Type": "application/vnd.safetensors"}
    assert np.array_equal(load(body)["query"], X)
    answer = save({"output": X, "weights": X[:1]})
    assert np.array_equal(wires["weights"].read(answer, {}), np.concatenate([X.ravel(), X[0]]))
    assert json.loads(wires["lists"].write(X)[1])["query"] == X.tolist()
    assert np.array_equal(wires["lists"].read(json.dumps({"output": X.tolist()}).encode(), {}), X.ravel())


def test_both_routes_take_the_same_tensors():
    wires = service_wires("bench")
    for form, path in (("three", "/v1/layers/bench/attend"), ("sdpa", "/v1/attention")):
        sent = load(wires[form].write(X)[1])
        assert wires[form].path == path
        assert {name: array.tolist() for name, array in sent.items()} == dict.fromkeys(
            ("query", "key", "value"), X.tolist()
        )


def test_attention_without_a_layer_is_of_the_rows_themselves():
    x, (correct, *_) = SMALL.inputs()[0].astype(np.float64), correct_answers(Workload("small", SMALL.lengths, "sdpa"))
    heads = x.reshape(3, HEADS, -1).swapaxes(0, 1)
    powers = np.exp(heads @ heads.swapaxes(1, 2) / np.sqrt(heads.shape[2]))
    expected = powers / powers.sum(-1, keepdims=True) @ heads
    np.testing.assert_allclose(correct, expected.swapaxes(0, 1).ravel(), atol=1e-12)


def test_the_plain_wires_are_bytes_and_lists():
    wires = plain_wires()
    assert wires["binary"].write(X)[1] == X.tobytes()
    assert np.array_equal(wires["binary"].read(X.tobytes(), {}), X.ravel())
    assert np.array_equal(wires["lists"].read(json.dumps({"y": X.tolist()}).encode(), {}), X.ravel())


def test_bytes_for_triton_begin_with_their_length():
    wire = triton_wires("attention")["binary"]
    headers, body = wire.write(X)
    head = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:head])["inputs"][0]["parameters"] == {"binary_data_size": X.nbytes + 4}
    assert body[head:] == struct.pack("<I", X.nbytes) + X.tobytes()
    answer = b"{}" + struct.pack("<I", X.nbytes) + X.tobytes()
    assert np.array_equal(wire.read(answer, {"inference-header-content-length": "2"}), X.ravel())


def test_a_request_to_the_echo_has_as_many_bytes_as_the_numbers_take():
    wires = echo_wires("bench")
    sizes = {form: int(wire.write(X)[0][SIZE_HEADER]) for form, wire in wires.items()}
    assert sizes == {"binary": X.nbytes, "weights": X.nbytes + 4 * HEADS * 3 * 3, "lists": 12 * X.size}
    assert {form: wires[form].read(bytes(size), {}).size for form, size in sizes.items()} == {
        "binary": X.size,
        "weights": X.size + HEADS * 3 * 3,
        "lists": X.size,
    }
    assert wires["binary"].write(X)[1] == service_wires("bench")["binary"].write(X)[1]


def test_requests_are_files_that_can_be_sent_as_they_are(tmp_path):
    requests = write_requests(tmp_path / "requests", plain_wires()["binary"], SMALL.inputs())
    assert sorted(file.name for file in requests.iterdir()) == ["0", "1", "2"]
    body = SMALL.inputs()[2].tobytes()
    lines = (
        "POST /binary HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/octet-stream",
        f"Content-Length: {len(body)}",
    )
    assert (requests / "2").read_bytes() == "\r\n".join((*lines, "", "")).encode() + body
