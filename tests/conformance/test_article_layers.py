"""The articles' modules with projections (rows 2, 4, 7, 8, examples a and d), compared with a stored layer; the legend's picture.

Their masks say 0 = blocked in torch's code and True = blocked in NumPy's. What needs no projection is in `test_articles.py`.
"""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from attention_client.cli import heat_map
from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, ignore
from tests.attention_fixtures import DEVICE, full_weights, identity_layer, make_spec, randn

wanted = WeightsWanted("heads", dtype=torch.float64)
NAMES = ("query", "key", "value", "output")


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed, dtype=torch.float64)


def blocked(*shape: int) -> torch.Tensor:
    """True = blocked; the first key of a row never is."""
    found = doubles(*shape, seed=7) > 0.3
    found[..., 0] = False
    return found


def article(weights, biases, num_heads: int, query, key, value, mask=None):
    """The articles' multi-head attention: x @ W + b, heads side by side, softmax(q·kᵀ/√d_k), -inf where the mask blocks."""
    projected = [x @ w + b for x, w, b in zip((query, key, value), weights, biases, strict=False)]
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in projected)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores.masked_fill(mask.unsqueeze(1), -torch.inf)
    heads = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return heads @ weights[3] + biases[3] if len(weights) > 3 else heads, scores.softmax(-1)


def layer_of(weights, biases, num_heads: int) -> Layer:
    """x @ W of the articles is x @ W.T of a torch Linear; without a bias it is zero there."""
    width, d_k, d_v = len(weights[0]), weights[0].shape[1] // num_heads, weights[2].shape[1] // num_heads
    names = NAMES[: len(weights)]
    spec = make_spec(
        width, num_heads, biases=names, has_output=len(weights) > 3, head_width=d_k, value_head_width=d_v,
        out_width=width if len(weights) > 3 else num_heads * d_v, scale=d_k**-0.5,
    )  # fmt: skip
    tensors = {f"{name}.weight": w.T.contiguous() for name, w in zip(names, weights, strict=True)}
    tensors |= {f"{name}.bias": b for name, b in zip(names, biases, strict=True)}
    return Layer(spec, tensors, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize(
    ("width", "num_heads", "d_k", "d_v", "has_bias", "has_output"),
    [(24, 3, 8, 8, True, True), (25, 3, 8, 8, True, True), (20, 2, 5, 11, True, True), (20, 2, 64, 1, True, True),
     (24, 4, 6, 6, False, True), (12, 1, 12, 12, False, False)],
    ids=["row-2", "row-2-of-a-width-not-shared-evenly", "row-4", "row-4-wide-keys", "row-7", "row-8"],
)  # fmt: skip
@pytest.mark.parametrize("rows_of_mask", [None, 1, 4])
def test_a_module_of_the_articles_is_a_layer(width, num_heads, d_k, d_v, has_bias, has_output, rows_of_mask):
    sizes = [(width, num_heads * d) for d in (d_k, d_k, d_v)] + [(num_heads * d_v, width)] * has_output
    weights = [doubles(*size, seed=seed) * 0.3 for seed, size in enumerate(sizes)]
    biases = [doubles(size[1], seed=9) * has_bias for size in sizes]
    query, key, value = (doubles(2, n, width, seed=n) for n in (4, 7, 7))
    mask = None if rows_of_mask is None else blocked(2, rows_of_mask, 7)
    lowered = None if mask is None else CombinedMask(Sizes(2, num_heads, 4, 7), (ignore(mask.unsqueeze(1)),))
    (answer,) = layer_of(weights, biases, num_heads).forward([Call(query, key, value, lowered, wanted)])
    output, attn = article(weights, biases, num_heads, query, key, value, mask)
    torch.testing.assert_close(answer.output, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(full_weights(answer), attn, rtol=1e-12, atol=1e-12)


def test_example_a_through_projections_from_width_3_to_width_2():
    """d_k is the projected width, 2, and not the model width, 3."""
    weights = [[[2, 0], [1, 1], [0, 0]], [[0, 2], [1, 1], [0, 0]], [[2, 1], [1, 1], [0, 0]]]
    layer = layer_of([torch.tensor(w, dtype=torch.float64) for w in weights], [torch.zeros(2)] * 3, 1)
    x = torch.tensor([[[1, 0, 1], [0, 1, 0]]], dtype=torch.float64)
    answer = layer.forward([Call(x, weights=wanted)])[0]
    np.testing.assert_allclose(full_weights(answer)[0, 0], [[0.195570, 0.804430], [0.5, 0.5]], atol=5e-7)
    np.testing.assert_allclose(answer.output[0], [[1.195570, 1.0], [1.5, 1.0]], atol=5e-7)


def test_example_d_the_second_demo_768_wide_in_12_heads():
    """Projections of 0.02 x unit normals, made before the input from one stream."""
    rng = np.random.RandomState(42)
    weights = [torch.from_numpy(rng.randn(768, 768) * 0.02) for _ in range(4)]
    layer = layer_of(weights, [torch.zeros(768)] * 4, 12)
    answer = layer.forward([Call(torch.from_numpy(rng.randn(2, 10, 768)), weights=wanted)])[0]
    found = full_weights(answer)
    assert float(found.min()) == pytest.approx(0.034150, abs=5e-7)
    assert float(found.max()) == pytest.approx(0.254741, abs=5e-7)
    assert float(answer.output.std(correction=0)) == pytest.approx(0.108416, abs=5e-7)


def article_legend(weight: float) -> str:
    return "*" if weight > 0.5 else "+" if weight > 0.2 else "." if weight > 0.05 else " "


def test_row_9_the_picture_has_a_row_for_each_token_with_the_marks_of_its_weights():
    """The bounds themselves belong to the weaker mark."""
    for weight in (0.0, 0.05, 0.2, 0.5, 1.0, math.nextafter(0.5, 1)):
        assert heat_map.legend_mark(weight) == article_legend(weight)
    tokens = ["[CLS]", "the", "cat", "eats", "the", "fish", "[SEP]"]
    weights = full_weights(identity_layer(4, scale=2.0).forward([Call(doubles(1, 7, 4), weights=wanted)])[0])[
        0, 0
    ].numpy()
    console = Console(file=io.StringIO(), width=120)
    console.print(heat_map.draw(weights, tokens, tokens, title="head 0", use_legend=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for token, row in zip(tokens, weights, strict=True):
        best = f"{tokens[row.argmax()]} {row.max():.3f}"
        line = next(line for line in lines if line.strip().startswith(token) and line.rstrip().endswith(best))
        marks = line.strip().removeprefix(token).rstrip().removesuffix(best)
        assert "".join(marks.split()) == "".join(article_legend(weight) for weight in row).replace(" ", "")
