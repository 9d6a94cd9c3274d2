"""torch's F.scaled_dot_product_attention over POST /v1/attention: shapes, masks, scale, shared heads, dtypes."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.torch_cases import CASES, DTYPES


def tolerance(dtype: torch.dtype) -> float:
    """1e-12 in float64, 1e-5 elsewhere; a dtype of 16 bits may also differ by one unit in the last place."""
    least = DTYPES[str(dtype).removeprefix("torch.")]
    return least + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=list(DTYPES))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(", ", "-").replace(" ", "-"))
def test_the_output_is_the_one_of_torch_in_float64(attention, case, dtype):
    mask, expected = case.attn_mask(dtype), case.expected(dtype)
    masks = case.masks if mask is None else [{**case.masks[0], "values": mask}]
    found = attention(case.shape.tensors(dtype), masks, **case.fields)["output"]
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance(dtype) * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_has_no_field(attention, dropout):
    """`dropout_p` is of training; a request with it is refused, not answered without it."""
    reply = attention.runner.run(
        attention.service.client.post(
            "/v1/attention", json={"query": [[1.0]], "key": [[1.0]], "value": [[1.0]], "dropout_p": dropout}
        )
    )
    assert (reply.status_code, reply.json()["code"]) == (422, "unknown_field")
