"""The same layer, requests and answers for everybody, and the wires on which they travel."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from benchmarks import workloads
from benchmarks.bodies import write_bodies
from benchmarks.echo import SIZE_HEADER
from benchmarks.packed import HEADS, PackedLayer
from benchmarks.wires import plain_wires, service_wires, triton_wires
from benchmarks.workloads import LENGTHS, W1, W2, W3, Workload, of_length, right_answers
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
@pytest.mark.parametrize("form", ["binary", "weights"])
def test_the_right_answer_is_that_of_torch_s_own_module(form):
    work, module = Workload("small", SMALL.lengths, form), torch_module()
    for x, right in zip(work.inputs(), right_answers(work), strict=True):
        query = torch.from_numpy(x)[None].double()
        output, weights = module(query, query, query, need_weights=True, average_attn_weights=False)
        parts = [output[0].numpy().ravel()] + ([weights[0].numpy().ravel()] if form == "weights" else [])
        np.testing.assert_allclose(right, np.concatenate(parts), atol=1e-12)


def test_packed_sequences_do_not_see_each_other(tmp_path):
    workloads.save_layer(tmp_path / "layer.safetensors")
    layer = PackedLayer.load(tmp_path / "layer.safetensors")
    xs = [torch.from_numpy(x) for x in SMALL.inputs()]
    for together, x in zip(layer.outputs(xs), xs, strict=True):
        torch.testing.assert_close(together, layer.outputs([x])[0])


def test_the_wires_of_the_service_build_its_requests():
    wires = service_wires("bench")
    headers, body = wires["binary"].write(X)
    assert headers == {"Content-Type": "application/vnd.safetensors"}
    assert np.array_equal(load(body)["query"], X)
    answer = save({"output": X, "weights": X[:1]})
    assert np.array_equal(wires["weights"].read(answer, {}), np.concatenate([X.ravel(), X[0]]))
    assert json.loads(wires["lists"].write(X)[1])["query"] == X.tolist()
    assert np.array_equal(wires["lists"].read(json.dumps({"output": X.tolist()}).encode(), {}), X.ravel())


def test_the_plain_wires_are_bytes_and_lists():
    wires = plain_wires()
    assert wires["binary"].write(X)[1] == X.tobytes()
    assert np.array_equal(wires["binary"].read(X.tobytes(), {}), X.ravel())
    assert np.array_equal(wires["lists"].read(json.dumps({"y": X.tolist()}).encode(), {}), X.ravel())


def test_triton_s_bytes_have_their_length_in_front():
    wire = triton_wires()["binary"]
    headers, body = wire.write(X)
    head = int(headers["Inference-Header-Content-Length"])
    assert json.loads(body[:head])["inputs"][0]["parameters"] == {"binary_data_size": X.nbytes + 4}
    assert body[head:] == struct.pack("<I", X.nbytes) + X.tobytes()
    answer = b"{}" + struct.pack("<I", X.nbytes) + X.tobytes()
    assert np.array_equal(wire.read(answer, {"inference-header-content-length": "2"}), X.ravel())


def test_bodies_are_files_and_the_echo_s_name_the_size_of_their_answer(tmp_path):
    bodies = write_bodies(tmp_path / "own", plain_wires()["binary"], SMALL)
    assert bodies.request(2) == ({"Content-Type": "application/octet-stream"}, SMALL.inputs()[2].tobytes())
    sized = bodies.asking_for([7, 8, 9], tmp_path / "sized")
    assert sized.request(1)[0][SIZE_HEADER] == "8"
    assert sized.request(1)[1] == bodies.request(1)[1]
