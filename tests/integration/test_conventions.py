"""Conventions through the real service: each gives what its system gives, by torch itself or its definition in float64 NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_client import AsyncClient
from attention_client import conventions as typed_conventions
from tests.conformance.onnx_cases import HOW_TO_INSTALL, onnx_cases, rtol_of
from tests.integration.running import in_service

# mypy counts *arrays as every positional argument.
conventions: Any = typed_conventions
B, H, G, L, S, D = 2, 4, 2, 3, 5, 8
RNG = np.random.default_rng(11)
CASES = onnx_cases()
# A row without keys in the second sequence.
KEEP = RNG.random((B, H, L, S)) < 0.6
KEEP[..., 0] = True
KEEP[1, :, 2] = False


def randn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


async def attended(service, arguments):
    async with AsyncClient("http://service", transport=service.transport) as client:
        return await client.attention(**arguments)


def near(found, expected) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-11)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return found


def definition(query, key, value, *, blocked=-np.inf, keep=True, bias=0.0, scale=None, softcap=None):
    """softmax(cap(query·keyᵀ·scale) + bias)·value of [.., L, d] in float64; the score of a blocked key is `blocked`."""
    group_size = 1 if query.ndim < 4 else query.shape[1] // key.shape[1]
    if group_size > 1:
        key, value = key.repeat(group_size, 1), value.repeat(group_size, 1)
    scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(keep, scores + bias, blocked)
    dead = np.isneginf(scores).all(-1, keepdims=True)
    return np.where(dead, 0.0, softmax(np.where(dead, 0.0, scores))) @ value


def rows_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(1, 2))


def blhd(*arrays: np.ndarray) -> list[np.ndarray]:
    return [rows_first(array) for array in arrays]


def positions(align: str) -> np.ndarray:
    """[L, S]: how far a key is after the position of its query row."""
    return np.arange(S) - np.arange(L)[:, None] - (S - L if align == "bottom_right" else 0)


def bhld(kv_heads: int = H) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return randn(B, H, L, D), randn(B, kv_heads, S, D), randn(B, kv_heads, S, D + 1)


def test_torch_sdpa_is_torch(served):
    float_mask = np.where(KEEP, randn(B, H, L, S), -np.inf)
    calls: list[dict[str, Any]] = [
        dict(attn_mask=torch.from_numpy(KEEP)),
        dict(attn_mask=torch.from_numpy(float_mask), scale=0.3),
        dict(attn_mask=torch.from_numpy(KEEP[0, 0])),
        dict(attn_mask=torch.from_numpy(KEEP[:1, :1])),
        dict(is_causal=True),
        dict(is_causal=True, enable_gqa=True),
    ]

    async def check(service):
        for call in calls:
            q, k, v = map(torch.from_numpy, bhld(G if call.get("enable_gqa") else H))
            found = await attended(service, conventions.torch_sdpa(q, k, v, **call))
            near(found.output, scaled_dot_product_attention(q, k, v, **call))
        q, k, v = (x[0] for x in map(torch.from_numpy, bhld()))
        whole = torch.from_numpy(KEEP[0])
        for tensors, mask in (((q, k, v), whole), ((q[0], k[0], v[0]), whole[0])):
            found = await attended(service, conventions.torch_sdpa(*tensors, mask))
            near(found.output, scaled_dot_product_attention(*tensors, mask))

    served(check)


def identity_module(batch_first: bool) -> torch.nn.MultiheadAttention:
    module = torch.nn.MultiheadAttention(H * D, H, bias=False, batch_first=batch_first, dtype=torch.float64).eval()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(H * D).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(H * D))
    return module.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_mha_is_the_module_with_projections_that_change_nothing(served, batch_first):
    module, shape = identity_module(batch_first), (lambda n: (B, n, H * D) if batch_first else (n, B, H * D))
    query, key, value = (torch.from_numpy(randn(*shape(n))) for n in (L, S, S))
    blocked = torch.from_numpy(~KEEP).clone()
    blocked[1, :, 2, 0] = False
    padding = torch.arange(S) >= torch.tensor([[S], [4]])
    calls: list[dict[str, Any]] = [
        {},
        dict(key_padding_mask=padding),
        dict(attn_mask=blocked[0, 0], need_weights=False),
        dict(attn_mask=blocked.flatten(0, 1), key_padding_mask=padding, average_attn_weights=False),
        dict(attn_mask=torch.from_numpy(randn(B * H, L, S))),
        dict(attn_mask=torch.ones(L, S).triu(1).bool(), is_causal=True),
    ]

    async def check(service):
        for call in calls:
            output, weights = module(query, key, value, **call)
            found = await attended(
                service, conventions.torch_mha(query, key, value, H, batch_first=batch_first, **call)
            )
            near(found.output, output if batch_first else output.transpose(0, 1))
            assert (found.weights is None) == (weights is None)
            if weights is not None:
                np.testing.assert_allclose(found.weights, weights, atol=1e-6)

    served(check)


def test_a_masked_row_is_nan_in_the_module_that_returns_weights_and_zero_here(served):
    x, blocked = torch.from_numpy(randn(L, 1, H * D)), torch.zeros(L, L).bool()
    blocked[1] = True

    async def check(service):
        output, _ = identity_module(False)(x, x, x, attn_mask=blocked)
        without, _ = identity_module(False)(x, x, x, attn_mask=blocked, need_weights=False)
        found = await attended(service, conventions.torch_mha(x, x, x, H, attn_mask=blocked))
        assert output[1].isnan().all()
        assert not without[1].any()
        assert not found.output[0, 1].any()
        near(found.output[0, ::2], output[::2, 0])

    served(check)


def test_onnx_is_its_operator(served):
    q, k, v = bhld(G)
    past = randn(B, G, 4, D), randn(B, G, 4, D + 1)
    whole = [np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True)]
    after_past = np.arange(S + 4) <= np.arange(L)[:, None] + 4
    valid = np.array([5, 3])[:, None, None, None]
    by_row = np.arange(S) <= np.arange(L)[:, None] + valid - L
    mask = KEEP[0, 0].copy()

    async def check(service):
        found = await attended(service, conventions.onnx(q, k, v, None, *past, is_causal=1, softcap=2.0))
        near(found.output, definition(q, *whole, keep=after_past, softcap=2.0))
        near(found.present_key, whole[0])
        found = await attended(service, conventions.onnx(q, k, v, mask[:, :3], scale=0.7))
        near(found.output, definition(q, k, v, keep=mask & (np.arange(S) < 3), scale=0.7))
        found = await attended(service, conventions.onnx(q, k, v, nonpad_kv_seqlen=valid.ravel(), is_causal=1))
        near(found.output, definition(q, k, v, keep=by_row & (np.arange(S) < valid)))
        packed = [rows_first(x).reshape(B, x.shape[2], -1) for x in (q, k, v)]
        found = await attended(
            service, conventions.onnx(*packed, q_num_heads=H, kv_num_heads=G, qk_matmul_output_mode=0)
        )
        near(found.output, rows_first(definition(q, k, v)).reshape(B, L, -1))
        scores = q @ k.repeat(H // G, 1).swapaxes(-1, -2) * D**-0.5
        np.testing.assert_allclose(found.scores, scores, atol=1e-6)

    served(check)


@pytest.mark.skipif(not CASES, reason=HOW_TO_INSTALL)
@in_service()
async def test_every_case_of_the_package_onnx_has_its_outputs(service):
    for case in CASES:
        given = {name: value for name, value in case.attributes.items() if name != "softmax_precision"}
        mode = given.pop("qk_matmul_output_mode", 0) if "qk_matmul_output" in case.outputs else None
        given.pop("qk_matmul_output_mode", None)
        found = await attended(service, conventions.onnx(**case.inputs, **given, qk_matmul_output_mode=mode))
        names = {"Y": "output", "qk_matmul_output": "weights" if mode == 3 else "scores"}
        for name, expected in case.outputs.items():
            answer = getattr(found, names.get(name, name))
            assert answer is not None, f"{case.name} {name}"
            np.testing.assert_allclose(
                answer.astype(np.float64), expected.astype(np.float64),
                rtol=rtol_of(case), atol=case.atol, err_msg=f"{case.name} {name}",
            )  # fmt: skip


def test_keras_is_its_layer(served):
    q, k, v = bhld()
    rows = np.arange(L) < np.array([[3], [2]])
    keys = np.arange(S) < np.array([[5], [3]])
    table, bias = KEEP[:, 0], randn(1, H, L, S)
    keep = table[:, None] & rows[:, None, :, None] & keys[:, None, None] & (positions("top_left") <= 0)

    async def check(service):
        inputs = dict(query=rows_first(q), value=rows_first(v), key=rows_first(k))
        found = await attended(
            service,
            conventions.keras(
                **inputs, attention_mask=table, query_mask=rows, value_mask=keys, is_causal=True, bias=bias, scale=0.4
            ),
        )
        expected = definition(q, k, v, keep=keep, bias=bias, scale=0.4)
        mean = definition(q, k, v, keep=keep, blocked=-1e9, bias=bias, scale=0.4)
        near(found.output, rows_first(expected))
        near(mean[1, :, 2], v[1].mean(1))  # a masked row there
        assert not found.output[1, 2].any()

    served(check)


def test_flax_and_jax_are_their_function(served):
    q, k, v = bhld(G)
    window, ends = np.abs(positions("top_left")) <= 1, np.array([3, 1])
    lengths = np.array([5, 2])[:, None, None, None]
    bias = randn(H, L, S)

    async def check(service):
        arrays = blhd(q, k, v)
        found = await attended(service, conventions.flax(*arrays, bias, KEEP, is_causal=True))
        near(found.output, rows_first(definition(q, k, v, keep=KEEP & (positions("top_left") <= 0), bias=bias)))
        found = await attended(
            service,
            conventions.flax(
                *arrays, query_seq_lengths=ends, key_value_seq_lengths=lengths.ravel(), local_window_size=1
            ),
        )
        inside = np.arange(L)[:, None] < ends[:, None, None, None]
        near(found.output, rows_first(definition(q, k, v, keep=window & (np.arange(S) < lengths) & inside)))
        found = await attended(service, conventions.flax(*(x[0] for x in arrays), mask=KEEP[0]))
        near(found.output, rows_first(definition(q, k, v, keep=KEEP[:1]))[0])

    served(check)


def test_flash_is_its_function(served):
    q, k, v = bhld(G)
    after, slopes = positions("bottom_right"), RNG.random((B, H)).astype(np.float32)

    async def check(service):
        arrays = blhd(q, k, v)
        found = await attended(service, conventions.flash(*arrays, causal=True, softmax_scale=0.5, softcap=3.0))
        near(found.output, rows_first(definition(q, k, v, keep=after <= 0, scale=0.5, softcap=3.0)))
        found = await attended(service, conventions.flash(*arrays, window_size=(1, 1)))
        near(found.output, rows_first(definition(q, k, v, keep=np.abs(after) <= 1)))
        found = await attended(
            service, conventions.flash(*arrays, causal=True, window_size=(2, -1), alibi_slopes=slopes)
        )
        bias = (-slopes[..., None, None] * np.abs(after)).astype(np.float32)
        near(found.output, rows_first(definition(q, k, v, keep=(after <= 0) & (after >= -2), bias=bias)))
        # More query rows than keys: the first rows see no key.
        found = await attended(service, conventions.flash(arrays[1], *(x[:, :L] for x in arrays[1:]), causal=True))
        assert not found.output[:, : S - L].any()

    served(check)


@pytest.mark.parametrize("lens", [None, [5, 2], [[1, 2, 3], [5, 4, 1]]], ids=str)
def test_d2l_is_its_module(served, lens):
    q, k, v = (x[:, 0] for x in bhld())
    keep = True if lens is None else np.arange(S) < np.array(lens).reshape(B, -1, 1)

    async def check(service):
        found = await attended(service, conventions.d2l(q, k, v, None if lens is None else np.array(lens)))
        near(found.output, definition(q, k, v, keep=keep, blocked=-1e6))

    served(check)


@pytest.mark.parametrize("cut", [(), (slice(None), 0), (0, 0)], ids=["bhld", "bld", "ld"])
def test_numpy_article_is_its_code(served, cut):
    q, k, v = (x[cut] for x in bhld())
    keep = KEEP.copy()
    keep[1, :, 2, 1] = True

    async def check(service):
        found = await attended(service, conventions.numpy_article(q, k, v, ~keep[cut]))
        near(found.output, definition(q, k, v, keep=keep[cut], blocked=-1e9))

    served(check)


def test_a_length_of_zero_is_zeros_here_and_the_mean_of_d2l_and_the_articles(served):
    q, k, v = (x[:, 0] for x in bhld())
    keep = np.arange(S) < np.array([[0], [5]])[:, None]

    async def check(service):
        near(definition(q, k, v, keep=keep, blocked=-1e6)[0], np.broadcast_to(v[0].mean(0), (L, D + 1)))
        for arguments in (
            conventions.d2l(q, k, v, [0, 5]),
            conventions.numpy_article(q, k, v, np.broadcast_to(~keep, (B, L, S))),
        ):
            found = await attended(service, arguments)
            assert not found.output[0].any()
            near(found.output[1], definition(q, k, v)[1])

    served(check)
