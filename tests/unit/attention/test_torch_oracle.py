"""The oracle: torch.nn.MultiheadAttention with the same tensors, with every option and mask that it has."""

from __future__ import annotations

import itertools

import pytest
import torch

from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import Added, Allowed, CombinedMask, Mask, Sizes, causal, ignore
from service.attention.spec import LayerSpec
from tests.attention_fixtures import DEVICE, full_weights, randn

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2}
WIDTH, HEADS, B, L = 24, 3, 2, 5


def both(
    dtype: torch.dtype, *, width: int = WIDTH, heads: int = HEADS, **options
) -> tuple[torch.nn.MultiheadAttention, Layer]:
    """Return torch's module and the layer made of its tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = torch.nn.MultiheadAttention(width, heads, batch_first=True, **options).to(torch.float64).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(
            parameter, std=1.5 * width**-0.5, generator=torch.Generator().manual_seed(parameter.numel())
        )
    module = module.to(dtype)
    state, extras = module.state_dict(), module.bias_k is not None
    names = ("query", "key", "value")
    if "in_proj_weight" in state:
        weights = state["in_proj_weight"].chunk(3)
    else:
        weights = tuple(state[f"{name[0]}_proj_weight"] for name in names)
    tensors = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    tensors["output.weight"] = state["out_proj.weight"]
    if module.in_proj_bias is not None:
        chunks = state["in_proj_bias"].chunk(3)
        tensors |= {f"{name}.bias": chunk for name, chunk in zip(names, chunks, strict=True)}
        tensors["output.bias"] = state["out_proj.bias"]
    if extras:
        tensors |= {"bias_k": state["bias_k"].flatten(), "bias_v": state["bias_v"].flatten()}
    spec = LayerSpec(
        query_width=width,
        key_width=weights[1].shape[1],
        value_width=weights[2].shape[1],
        out_width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_width=width // heads,
        value_head_width=width // heads,
        scale=(width // heads) ** -0.5,
        biases=(*names, "output") if module.in_proj_bias is not None else (),
        has_bias_kv=extras,
        add_zero_attn=module.add_zero_attn,
    )
    return module, Layer(spec, tensors, dtype=dtype, device=DEVICE)


def compare(module, layer: Layer, inputs, masks: list[Mask], **torch_masks) -> None:
    """Compare output and weights with torch's, and the output with that of torch's other path, which returns no weights."""
    dtype, (query, key, value) = layer.dtype, inputs
    sizes = Sizes(query.shape[0], layer.spec.num_heads, query.shape[1], key.shape[1])
    mask = CombinedMask(sizes, tuple(masks)) if masks else None
    wide = torch.promote_types(dtype, torch.float32)
    answer = layer.forward([Call(query, key, value, mask, WeightsWanted("heads", dtype=wide))])[0]
    with torch.inference_mode():
        output, weights = module(query, key, value, average_attn_weights=False, **torch_masks)
        alone, _ = module(query, key, value, need_weights=False, **torch_masks)
    for found, expected in ((answer.output, output), (answer.output, alone), (full_weights(answer), weights)):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], check_dtype=False)


def random_inputs(layer: Layer, keys: int = L) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spec, dtype = layer.spec, layer.dtype
    return (
        randn(B, L, spec.query_width, seed=1, dtype=dtype),
        randn(B, keys, spec.key_width, seed=2, dtype=dtype),
        randn(B, keys, spec.value_width, seed=3, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("widths", [{}, {"kdim": 10}, {"vdim": 7}, {"kdim": 9, "vdim": 13}], ids=str)
@pytest.mark.parametrize(
    ("bias_on", "add_bias_kv", "add_zero_attn"), list(itertools.product([True, False], repeat=3)), ids=str
)
def test_every_layer_variant_matches_torch(dtype, widths, bias_on, add_bias_kv, add_zero_attn):
    """Widths, biases and appended columns, over more and fewer keys than queries."""
    module, layer = both(dtype, bias=bias_on, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, **widths)
    for keys in (1, L, 9):
        compare(module, layer, random_inputs(layer, keys), [])


def blocked(*shape: int) -> torch.Tensor:
    """Return random blocked pairs; the first key is always allowed."""
    found = torch.rand(shape, generator=torch.Generator().manual_seed(8)) < 0.5
    found[..., 0] = False
    return found


def additive(where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(where, -torch.inf, randn(*where.shape, seed=4).double()).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("attn", ["none", "bool", "float", "bool per head", "float per head", "is_causal"])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
def test_every_mask_matches_torch(dtype, extras, attn, padding):
    """torch's booleans are `ignore`, its floats `bias`, its is_causal `causal` from the top left."""
    module, layer = both(dtype, **extras)
    where = blocked(L, L) if "head" not in attn else blocked(B * HEADS, L, L)
    masks: list[Mask] = []
    given: dict = {}
    if attn.startswith("bool"):
        given["attn_mask"] = where
        masks.append(ignore(where.view(-1, HEADS if "head" in attn else 1, L, L)))
    elif attn.startswith("float"):
        given["attn_mask"] = additive(where, dtype)
        masks.append(Added(given["attn_mask"].view(-1, HEADS if "head" in attn else 1, L, L)))
    elif attn == "is_causal":
        # With appended columns and no weights, torch's is_causal also masks those columns: there only the mask is passed.
        given |= {"attn_mask": torch.triu(torch.ones(L, L, dtype=torch.bool), 1), "is_causal": not extras}
        masks.append(causal(Sizes(B, HEADS, L, L), 0))
    keys = blocked(B, L)
    if padding == "bool":
        given["key_padding_mask"] = keys
        masks.append(ignore(keys.view(B, 1, 1, L)))
    elif padding == "float":
        given["key_padding_mask"] = additive(keys, dtype)
        masks.append(Added(given["key_padding_mask"].view(B, 1, 1, L)))
    kinds = {given[name].dtype for name in ("attn_mask", "key_padding_mask") if name in given}
    if len(kinds) > 1:
        # torch takes both masks in one dtype: a boolean becomes the float that means the same.
        for name in ("attn_mask", "key_padding_mask"):
            if given[name].dtype == torch.bool:
                given[name] = torch.zeros_like(given[name], dtype=dtype).masked_fill(given[name], -torch.inf)
    compare(module, layer, random_inputs(layer), masks, **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "heads"), [(1, 1), (6, 6), (10, 2), (33, 3), (128, 4), (384, 12)])
def test_every_width_matches_torch(dtype, width, heads):
    module, layer = both(dtype, width=width, heads=heads)
    compare(module, layer, random_inputs(layer, 40), [])
    query = randn(B, 3, width, dtype=dtype)
    compare(module, layer, (query, query, query), [])


def test_only_a_fully_masked_row_differs_from_torch():
    """torch answers NaN or not depending on whether weights were requested (its issues 160064, 152028); ours is zero."""
    module, layer = both(torch.float32)
    where = torch.zeros(L, L, dtype=torch.bool)
    where[2] = True
    query, key, value = random_inputs(layer)
    with torch.inference_mode():
        output, weights = module(query, key, value, attn_mask=where)
    assert torch.isnan(output[:, 2]).all()
    assert torch.isnan(weights[:, 2]).all()
    sizes = Sizes(B, HEADS, L, L)
    for mask in (ignore(where[None, None]), Allowed(~where[None, None])):
        call = Call(query, key, value, CombinedMask(sizes, (mask,)), WeightsWanted("mean"))
        answer = layer.forward([call])[0]
        assert torch.equal(answer.output[:, 2], module.out_proj.bias.detach().expand(B, WIDTH))
        assert not full_weights(answer)[:, 2].any()
        torch.testing.assert_close(answer.output[:, [0, 1, 3, 4]], output[:, [0, 1, 3, 4]], rtol=2e-6, atol=2e-6)
