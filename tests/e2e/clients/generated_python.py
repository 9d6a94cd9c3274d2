"""The client that openapi-python-client writes from /openapi.json, on PYTHONPATH: python generated_python.py HOST:PORT."""

import base64

import numpy as np
from attention_service_client import Client
from attention_service_client.api.admin import delete_layer, put_layer
from attention_service_client.api.attention import attention
from attention_service_client.api.layers import attend, get_layer, list_layers
from attention_service_client.api.models import attend_text, get_model, list_models, states
from attention_service_client.api.open_inference_protocol import infer, model_metadata
from attention_service_client.api.operations import healthz
from attention_service_client.models import (
    Align,
    Answer,
    AttendMask,
    AttendRequest,
    AttentionAnswer,
    AttentionRequest,
    Axes,
    BiasMask,
    CausalMask,
    Dtype,
    Health,
    IgnoreMask,
    InferAnswer,
    InferenceError,
    InferInput,
    InferRequest,
    Layer,
    LayerList,
    LayoutName,
    LengthsMask,
    Model,
    ModelAnswer,
    ModelAttendRequest,
    ModelList,
    ModelMetadata,
    Problem,
    Scores,
    ShortWeights,
    Stage,
    StatesAnswer,
    StatesRequest,
    TensorObject,
    TopK,
    Weights,
    WeightsForm,
    WindowMask,
)
from expected import LAYER, MASK, WIDTH, X, run
from expected import attend as expected_attend

MODEL = "minilm"


def client(url: str) -> Client:
    return Client(base_url=f"http://{url}")


def base64_of(array: np.ndarray) -> TensorObject:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return TensorObject(dtype=Dtype(array.dtype.name), shape=list(array.shape), data=data)


def array_of(tensor: object) -> np.ndarray:
    assert isinstance(tensor, TensorObject)
    assert isinstance(tensor.data, str)
    return np.frombuffer(base64.b64decode(tensor.data), np.dtype(tensor.dtype.value)).reshape(tensor.shape)


def the_layers_are_listed_and_described(url: str) -> None:
    found = list_layers.sync(client=client(url))
    assert isinstance(found, LayerList)
    assert LAYER in [layer.name for layer in found.layers]
    layer = get_layer.sync(LAYER, client=client(url))
    assert isinstance(layer, Layer)
    assert (layer.query_width, layer.num_heads, layer.numerics.device) == (WIDTH, 4, "cpu")
    assert isinstance(healthz.sync(client=client(url)), Health)


def tensors_as_base64_give_the_bits_of_any_client(url: str) -> None:
    mask = AttendMask(kind="attend", axes=Axes.BLS, values=base64_of(MASK))
    body = AttendRequest(query=base64_of(X), masks=[mask], weights=Weights(form=WeightsForm.HEADS))
    answer = attend.sync(LAYER, client=client(url), body=body)
    assert isinstance(answer, Answer)
    plain = {"kind": "attend", "axes": "bls", "values": MASK.tolist()}
    wanted = expected_attend(url, query=X, masks=[plain], weights="heads")
    assert np.array_equal(array_of(answer.output), wanted["output"])
    assert np.array_equal(array_of(answer.weights), wanted["weights"])


def a_text_becomes_attention_and_states(url: str) -> None:
    found = list_models.sync(client=client(url))
    assert isinstance(found, ModelList)
    assert [model.name for model in found.models] == [MODEL]
    model = get_model.sync(MODEL, client=client(url))
    assert isinstance(model, Model)
    assert model.fault is None
    asked = ModelAttendRequest(text="the animal", layer=1, weights=Weights(form=WeightsForm.HEADS), entropy=True)
    answer = attend_text.sync(MODEL, client=client(url), body=asked)
    assert isinstance(answer, ModelAnswer)
    assert [(token.text, token.offsets) for token in answer.tokens[:2]] == [("[CLS]", None), ("the", [0, 3])]
    rows = states.sync(MODEL, client=client(url), body=StatesRequest(tokens=["it"], layers=[0]))
    assert isinstance(rows, StatesAnswer)
    assert np.shape(rows.states) == (1, 1, model.width)
    missing = get_model.sync("none", client=client(url))
    assert isinstance(missing, Problem)
    assert missing.code == "model_not_found"


def every_kind_of_mask_and_form_of_weights_is_taken(url: str) -> None:
    masks = [
        AttendMask(kind="attend", axes=Axes.BLS, values=MASK.tolist()),
        IgnoreMask(kind="ignore", axes=Axes.BS, values=[[False] * 5] * 2),
        BiasMask(kind="bias", axes=Axes.LS, values=[[0.0] * 4 + ["-inf"]] * 5),
        LengthsMask(kind="lengths", values=[5, 4]),
        CausalMask(kind="causal", align=Align.TOP_LEFT),
        WindowMask(kind="window", left=2, right=0, offset=[0, 0]),
    ]
    body = AttendRequest(query=X.tolist(), masks=masks, weights=Weights(form=WeightsForm.TOP_K, k=2, heads=[0]))
    answer = attend.sync(LAYER, client=client(url), body=body)
    assert isinstance(answer, Answer)
    assert isinstance(answer.weights, TopK)
    assert np.shape(answer.weights.values) == np.shape(answer.weights.indices) == (2, 1, 5, 2)
    assert np.shape(answer.output) == X.shape
    mean = attend.sync(LAYER, client=client(url), body=AttendRequest(query=X[0].tolist(), weights=ShortWeights.MEAN))
    assert isinstance(mean, Answer)
    assert np.shape(mean.weights) == (5, 5)
    assert (mean.layer.name, mean.batch.sequences, mean.masked_rows) == (LAYER, 1, 0)


def attention_without_a_layer_returns_what_is_asked_for(url: str) -> None:
    rows = np.ones((2, 3, 4)).tolist()
    body = AttentionRequest(
        query=rows,
        key=rows,
        value=rows,
        layout=LayoutName.HLD,
        masks=[CausalMask(kind="causal")],
        scores=Scores(stage=Stage.SCALED),
        lse=True,
    )
    answer = attention.sync(client=client(url), body=body)
    assert isinstance(answer, AttentionAnswer)
    assert np.shape(answer.scores) == (2, 3, 3)
    assert np.shape(answer.lse) == (2, 3)
    assert answer.weights is None
    assert not answer.present_key, "what was not asked for is unset"


def an_error_is_a_problem(url: str) -> None:
    narrow = attend.sync_detailed(LAYER, client=client(url), body=AttendRequest(query=[[0.5]]))
    assert isinstance(narrow.parsed, Problem)
    assert (narrow.status_code, narrow.parsed.code, narrow.parsed.param) == (422, "bad_shape", "/query")
    for found in (
        get_layer.sync("nobody", client=client(url)),
        attend.sync("nobody", client=client(url), body=AttendRequest(query=[[0.5]])),
    ):
        assert isinstance(found, Problem)
        assert found.code == "layer_not_found"
    for change in (put_layer, delete_layer):
        found = change.sync(LAYER, client=client(url))
        assert isinstance(found, Problem)
        assert found.code == "forbidden"


def the_inference_protocol_is_there_too(url: str) -> None:
    query = InferInput(name="query", datatype="FP32", shape=list(X.shape), data=X.ravel().tolist())
    answer = infer.sync(LAYER, client=client(url), body=InferRequest(inputs=[query], id="42"))
    assert isinstance(answer, InferAnswer)
    assert (answer.id, [output.name for output in answer.outputs]) == ("42", ["output"])
    assert isinstance(model_metadata.sync(LAYER, client=client(url)), ModelMetadata)
    assert isinstance(infer.sync("nobody", client=client(url), body=InferRequest(inputs=[query])), InferenceError)


if __name__ == "__main__":
    run(
        [
            the_layers_are_listed_and_described,
            a_text_becomes_attention_and_states,
            tensors_as_base64_give_the_bits_of_any_client,
            every_kind_of_mask_and_form_of_weights_is_taken,
            attention_without_a_layer_returns_what_is_asked_for,
            an_error_is_a_problem,
            the_inference_protocol_is_there_too,
        ]
    )
