"""Copies between the host and a device keep the values, in the dtype that the reader wants."""

from __future__ import annotations

import pytest
import torch

from service.attention import transfers
from tests.attention_fixtures import DEVICE, randn, same_bits

LIKE = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_a_batch_arrives_on_the_host_in_the_dtype_of_its_callers(dtype):
    x = randn(5, 12).to(torch.bfloat16)
    found = transfers.awaited(x.to(DEVICE)[:3], dtype)
    assert found.device.type == "cpu"
    assert same_bits(found, x[:3].to(dtype))


def test_a_tensor_that_goes_to_the_device_and_back_is_rounded_once():
    x = randn(3, 4)
    found = transfers.to_host(transfers.to_device(x, LIKE))
    transfers.awaited(LIKE, LIKE.dtype)  # what came before has arrived
    assert same_bits(found, x.to(torch.bfloat16))
