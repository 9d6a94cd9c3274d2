"""The usual masks of torch, Keras and Hugging Face: each gives the same answer as there, or an error with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

# B, H, L, S: B = L, B = H, all equal, all unequal; and each larger.
SIZES = [
    (4, 2, 4, 6),
    (2, 2, 3, 5),
    (3, 3, 3, 3),
    (2, 3, 4, 5),
    (16, 2, 16, 24),
    (8, 8, 12, 20),
    (12, 12, 12, 12),
    (5, 8, 16, 24),
]
LOWEST = torch.finfo(torch.float32).min


def padding(b: int, _h: int, _l: int, s: int) -> torch.Tensor:
    """[B, S], true = a token. Each sequence keeps its first token."""
    return torch.arange(s) < 1 + torch.arange(b)[:, None] % s


def triangle(_b: int, _h: int, length: int, s: int) -> torch.Tensor:
    """[L, S], true = may attend."""
    return torch.ones(length, s).tril().bool()


def each(b: int, h: int, length: int, s: int) -> torch.Tensor:
    """[B, H, L, S], true = may attend, with at least the first key."""
    found = torch.rand(b, h, length, s, generator=torch.Generator().manual_seed(b + s)) < 0.6
    return found | (torch.arange(s) == 0)


def added(may_attend: torch.Tensor, blocked: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(may_attend.shape).masked_fill(~may_attend, blocked)


@dataclasses.dataclass(frozen=True)
class Usual:
    """`sent` makes the mask as its users have it, `means` the same as [B|1, H|1, L|1, S], true = may attend.

    `axes` are the right ones, None for a rank that has one reading.
    """

    name: str
    kind: str
    axes: str | None
    sent: Callable[..., torch.Tensor]
    means: Callable[..., torch.Tensor]


def by_key(*sizes: int) -> torch.Tensor:
    return padding(*sizes)[:, None, None]


def by_row(*sizes: int) -> torch.Tensor:
    return triangle(*sizes)[None, None]


def by_sequence(*sizes: int) -> torch.Tensor:
    return each(*sizes)[:, :1]


USUAL = [
    Usual("torch MHA key_padding_mask", "ignore", "bs", lambda *n: ~padding(*n), by_key),
    Usual("torch MHA key_padding_mask of floats", "bias", "bs", lambda *n: added(padding(*n)), by_key),
    Usual("torch MHA attn_mask [L, S]", "ignore", "ls", lambda *n: ~triangle(*n), by_row),
    Usual("torch generate_square_subsequent_mask", "bias", "ls", lambda *n: added(triangle(*n)), by_row),
    Usual("torch MHA attn_mask [B·H, L, S] as [B, H, L, S]", "ignore", None, lambda *n: ~each(*n), each),
    Usual("torch SDPA attn_mask [L, S]", "attend", "ls", triangle, by_row),
    Usual("torch SDPA attn_mask [B, 1, 1, S]", "attend", None, by_key, by_key),
    Usual("torch SDPA attn_mask [B, H, L, S]", "attend", None, each, each),
    Usual("torch SDPA attn_mask of floats", "bias", None, lambda *n: added(each(*n)), each),
    Usual("Keras attention_mask [B, T, S]", "attend", "bls", lambda *n: each(*n)[:, 0], by_sequence),
    Usual("Keras value_mask [B, S]", "attend", "bs", padding, by_key),
    Usual("Hugging Face attention_mask [B, S] of 0 and 1", "attend", "bs", lambda *n: padding(*n).long(), by_key),
    Usual("Hugging Face extended mask [B, 1, 1, S]", "bias", None, lambda *n: added(by_key(*n), LOWEST), by_key),
    Usual("Hugging Face 4-D mask [B, 1, L, S]", "bias", None, lambda *n: added(by_sequence(*n), LOWEST), by_sequence),
]


def tensors(b: int, h: int, length: int, s: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(length)
    rows = {"query": length, "key": s, "value": s}
    return {name: torch.randn(b, h, n, 8, generator=made) for name, n in rows.items()}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("usual", USUAL, ids=lambda usual: usual.name.replace(" ", "-"))
def test_a_usual_mask_means_what_it_means_there(attention, usual, sizes):
    mask = {"kind": usual.kind, "values": usual.sent(*sizes)} | ({"axes": usual.axes} if usual.axes else {})
    found = attention(tensors(*sizes), [mask])["output"]
    query, key, value = (tensor.double() for tensor in tensors(*sizes).values())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=usual.means(*sizes))
    assert (found.double() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_torchs_mask_of_all_heads_in_one_axis_is_refused_with_the_shapes_that_fit(attention, sizes):
    b, h, length, s = sizes
    mask = {"kind": "ignore", "axes": "bls", "values": (~each(*sizes)).flatten(0, 1).tolist()}
    body = {name: tensor.tolist() for name, tensor in tensors(*sizes).items()} | {"masks": [mask]}
    problem = attention.runner.run(attention.service.client.post("/v1/attention", json=body)).json()
    assert problem["code"] == "bad_mask"
    assert f"[{b}, {h}, {length}, {s}] (axes bhls)" in problem["detail"]
    assert f"got [{b * h}, {length}, {s}]" in problem["detail"]
