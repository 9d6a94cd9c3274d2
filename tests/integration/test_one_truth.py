"""Every form of the same request gives the same bits: JSON lists and base64, safetensors, Open Inference JSON and binary."""

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.forms import (
    BINARY,
    DTYPES,
    HEADS,
    WIDTH,
    Request,
    as_base64,
    as_inference,
    as_list,
    as_nested,
    as_safetensors,
    read_inference,
    read_json,
    read_safetensors,
)


@st.composite
def requests(draw) -> Request:
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = draw(st.sampled_from([None, 1, 2, 3]))
    lead = () if sequences is None else (sequences,)
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = DTYPES[draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))]

    def rows(count: int) -> np.ndarray:
        return numbers.standard_normal((*lead, count, WIDTH)).astype(np.float32).astype(dtype)

    is_cross = draw(st.booleans())
    keys = keys if is_cross else queries
    kinds = draw(st.lists(st.sampled_from(["attend", "ignore", "bias", "lengths", "causal", "window"]), unique=True))
    masks = [_mask(draw, numbers, kind, (lead, queries, keys)) for kind in kinds]
    forms = st.sampled_from(
        [{"form": "heads"}, {"form": "mean"}, {"form": "top_k", "k": 1}, {"form": "heads", "heads": [2, 0]}]
    )
    return Request(
        query=rows(queries),
        key=rows(keys) if is_cross else None,
        value=rows(keys) if is_cross and draw(st.booleans()) else None,
        masks=masks,
        weights=draw(st.none() | forms),
    )


def _mask(draw, numbers, kind: str, sizes) -> tuple[dict, np.ndarray | None]:
    lead, queries, keys = sizes
    if kind == "causal":
        return {"kind": kind, "align": draw(st.sampled_from(["top_left", "bottom_right"]))}, None
    if kind == "window":
        return {"kind": kind, "left": draw(st.integers(0, 3)), "right": None, "align": "top_left"}, None
    if kind == "lengths":
        shape = (*lead, queries) if draw(st.booleans()) or not lead else lead
        return {"kind": kind}, numbers.integers(0, keys + 1, shape)
    shape = draw(st.sampled_from([(keys,), (queries, keys), (HEADS, queries, keys), (1, queries, 1)]))
    chosen = numbers.random((*lead, *shape)) < 0.7
    if kind == "bias":
        return {"kind": kind}, np.where(chosen, numbers.standard_normal(chosen.shape), -np.inf).astype(np.float32)
    return {"kind": kind}, chosen


async def answers(service, request: Request) -> dict[str, dict[str, np.ndarray]]:
    """What came back, by the form in which it was asked."""
    found = {}
    writers = {"a flat list": as_list, "base64": as_base64}
    if request.query.dtype == np.float32:
        writers["nested lists"] = as_nested
    for name, write in writers.items():
        answer = await service.attend(request.fields(write))
        assert answer.status_code == 200, answer.text
        found[name] = read_json(answer.json())
    path = "/v1/layers/small/attend"
    for pad in (0, 3):
        body = as_safetensors(request, pad)
        answer = await service.client.post(path, content=body, headers={"content-type": BINARY})
        assert answer.status_code == 200, answer.text
        found[f"safetensors, {pad}"] = read_safetensors(answer.content)
    if not request.has_inference_form:
        return found
    for binary in (True, False) if request.query.dtype in (np.float32, np.float64) else (True,):
        body, head = as_inference(request, binary=binary)
        headers = {"inference-header-content-length": str(head)} if binary else {}
        answer = await service.client.post("/v2/models/small/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        read = read_inference(answer.content, answer.headers.get("inference-header-content-length"))
        if request.query.ndim == 2:
            read = {name: array[0] for name, array in read.items()}
        found[f"open inference, {binary}"] = read
    return found


def check(found: dict[str, dict[str, np.ndarray]]) -> None:
    wanted = found["base64"]
    for form, tensors in found.items():
        assert tensors.keys() == wanted.keys(), form
        for name, array in tensors.items():
            assert array.dtype == wanted[name].dtype or form == "nested lists", (form, name)
            assert array.astype(wanted[name].dtype).tobytes() == wanted[name].tobytes(), (form, name)


@pytest.mark.parametrize("off_loop_bytes", [1, 2**20], ids=["in the decoding thread", "on the loop"])
def test_every_form_of_a_random_request_gives_the_same_bits(served, off_loop_bytes):
    """B16: 240 requests in six to eight forms each."""

    async def story(service):
        loop = asyncio.get_running_loop()

        @settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(requests())
        def compare(request):
            check(asyncio.run_coroutine_threadsafe(answers(service, request), loop).result(30))

        await asyncio.to_thread(compare)

    served(story, decode_off_loop_bytes=off_loop_bytes)
