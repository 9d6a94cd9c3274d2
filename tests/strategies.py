"""Hypothesis strategies for attention: widths, lengths, masks, weights wanted, calls.

They draw the structure and a seed; the numbers come from the seed, so examples shrink to small shapes and not to zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st

from service.attention.call import Call, WeightsWanted
from service.attention.masks import Sizes
from service.attention.spec import LayerSpec, Layout, Norm, NormKind, NormOver, RelativeBias, Rotary, Window
from tests import oracle
from tests.attention_fixtures import engine_mask, make_spec, randn, windowed

seeds = st.integers(0, 2**31 - 1)
# Short ones mostly, where rounding rules bite; some around the blocks of kernels.
lengths = st.one_of(
    st.integers(1, 4), st.integers(1, 20), st.integers(21, 70), st.sampled_from([127, 128, 129, 131, 200, 257])
)
short_lengths = st.one_of(st.integers(1, 4), st.integers(1, 20))
widths = st.one_of(st.integers(1, 12), st.integers(1, 70), st.sampled_from([96, 127, 128, 130, 255, 256, 300, 384]))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call and the masks it was made from."""

    call: Call
    masks: tuple[oracle.Mask, ...]


@st.composite
def specs(draw: st.DrawFn, *, width=widths, has_extras: bool = True) -> LayerSpec:
    """Layers of every make: shared key/value heads, unequal widths, with and without biases and appended columns."""
    kv_heads, shared = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 1, 2, 3]))
    query_width = draw(width)
    is_one_width = draw(st.booleans())
    head_width = draw(st.integers(1, 33))
    names = [name for name in ("query", "key", "value", "output") if draw(st.booleans())]
    return make_spec(
        query_width,
        kv_heads * shared,
        num_kv_heads=kv_heads,
        key_width=query_width if is_one_width else draw(width),
        value_width=query_width if is_one_width else draw(width),
        out_width=draw(width),
        head_width=head_width,
        value_head_width=draw(st.one_of(st.just(head_width), st.just(head_width), st.integers(1, 33))),
        scale=draw(st.sampled_from([head_width**-0.5, 1.0, 0.07])),
        biases=tuple(names),
        has_output=draw(st.sampled_from([True, True, True, False])),
        has_bias_kv=has_extras and draw(st.sampled_from([False, False, True])),
        add_zero_attn=has_extras and draw(st.sampled_from([False, False, True])),
    )


@st.composite
def specs_with_parts(draw: st.DrawFn, *, width=widths) -> LayerSpec:
    """Layers of every make with any of the parts of newer models."""
    spec = draw(specs(width=width))
    kinds: tuple[NormKind, ...] = ("rms", "layer")
    wholes: tuple[NormOver, ...] = ("head", "head", "width")
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    parts: dict[str, Any] = {
        "norm": Norm(
            draw(st.sampled_from(kinds)),
            over := draw(st.sampled_from(wholes)),
            draw(st.sampled_from([1e-6, 1e-5, 0.1])),
            plus_one=draw(st.booleans()),
            has_bias=draw(st.booleans()),
            has_head_weights=over == "head" and draw(st.booleans()),
        ),
        "relative_bias": draw(
            st.sampled_from([RelativeBias(32, 128, True), RelativeBias(32, 128, False), RelativeBias(4, 3, True)])
        ),
        "window": draw(st.sampled_from([Window(None, 0), Window(2, 0), Window(5, 5), Window(0, None)])),
        "softcap": draw(st.sampled_from([1.0, 20.0])),
        "has_sinks": True,
    }
    if spec.head_width > 1:
        pairs = draw(st.integers(1, spec.head_width // 2))
        frequencies = tuple(1e4 ** (-j / pairs) for j in range(pairs))
        parts["rotary"] = Rotary(draw(st.sampled_from(layouts)), frequencies, draw(st.sampled_from([1.0, 1.2])))
    chosen = draw(st.sets(st.sampled_from(sorted(parts)), min_size=1))
    return dataclasses.replace(spec, **{name: parts[name] for name in sorted(chosen)})


@st.composite
def placed(draw: st.DrawFn, spec: LayerSpec, call: Call) -> Call:
    """The call with positions, a past and a present now and then, and with the layer's window among its masks."""
    rng, batch = np.random.default_rng(draw(seeds)), call.query.shape[0]
    past = draw(st.sampled_from([0, 0, 1, 7])) if call.mask is None else 0
    if past:
        shape = batch, spec.num_kv_heads, past
        keys, values = (
            randn(*shape, width, seed=past, dtype=call.query.dtype)
            for width in (spec.head_width, spec.value_head_width)
        )
        call = call._replace(past_key=keys, past_value=values)
    if past or draw(st.booleans()):
        count, most = draw(st.sampled_from([1, batch])), draw(st.sampled_from([40, 2**24]))
        keys = torch.from_numpy(rng.integers(0, most, (count, past + call.source.shape[1])))
        keys = keys.sort(1).values if draw(st.booleans()) else keys
        rows = (
            keys[:, past:]
            if call.is_self_attention
            else torch.from_numpy(rng.integers(0, most, (1, call.query.shape[1])))
        )
        call = call._replace(positions=rows, key_positions=keys)
    call = call._replace(has_present=draw(st.booleans()))
    return call if spec.window is None else windowed(spec.window, spec.num_heads, call)


@st.composite
def masks_for(draw: st.DrawFn, sizes: Sizes, *, max_masks: int = 3) -> tuple[oracle.Mask, ...]:
    """Up to three masks of any kind; values have any axis whole or 1, and block whole rows now and then."""
    kinds = draw(st.lists(st.sampled_from(_KINDS), max_size=max_masks))
    return tuple(draw(kind(sizes)) for kind in kinds)


@st.composite
def _values(draw: st.DrawFn, sizes: Sizes) -> tuple[np.random.Generator, tuple[int, ...], float]:
    shape = tuple(size if draw(st.booleans()) else 1 for size in sizes)
    return np.random.default_rng(draw(seeds)), shape, draw(st.sampled_from([0.0, 0.1, 0.4, 0.9, 1.0]))


@st.composite
def _attend(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    rng, shape, blocked = draw(_values(sizes))
    return oracle.Attend(rng.random(shape) >= blocked)


@st.composite
def _ignore(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    rng, shape, blocked = draw(_values(sizes))
    return oracle.Ignore(rng.random(shape) < blocked)


@st.composite
def _bias(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    rng, shape, blocked = draw(_values(sizes))
    values = np.where(rng.random(shape) < min(blocked, 0.9), -np.inf, rng.normal(0, 2, shape))
    return oracle.Bias(values.astype(np.float32))


@st.composite
def _lengths(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    rng, shape = np.random.default_rng(draw(seeds)), (sizes.sequences, sizes.queries)
    return oracle.Lengths(rng.integers(0, sizes.keys + 1, shape if draw(st.booleans()) else shape[:1]))


def _offsets(sizes: Sizes) -> st.SearchStrategy[int | tuple[int, ...]]:
    one, count = _offset(sizes), sizes.sequences
    return st.one_of(one, one, st.lists(one, min_size=count, max_size=count).map(tuple))


def _offset(sizes: Sizes) -> st.SearchStrategy[int]:
    near = st.integers(-sizes.queries - 1, sizes.keys + 1)
    return st.one_of(st.just(0), st.just(sizes.keys - sizes.queries), near, near, st.integers(-(2**70), 2**70))


@st.composite
def _causal(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    return oracle.Causal(draw(_offsets(sizes)))


@st.composite
def _window(draw: st.DrawFn, sizes: Sizes) -> oracle.Mask:
    reach = st.one_of(st.none(), st.integers(0, sizes.keys), st.integers(0, 2**70))
    return oracle.Window(draw(_offsets(sizes)), draw(reach), draw(reach))


_KINDS = (_attend, _ignore, _bias, _lengths, _causal, _window)


@st.composite
def weights_wanted(draw: st.DrawFn, sizes: Sizes) -> WeightsWanted:
    def some(count: int) -> tuple[int, ...] | None:
        chosen = st.lists(st.integers(0, count - 1), min_size=1, max_size=min(count, 6), unique=True)
        return draw(st.one_of(st.none(), chosen.map(tuple)))

    forms: tuple[Literal["heads", "mean", "top_k", "contributions"], ...] = ("heads", "mean", "top_k", "contributions")
    form = draw(st.sampled_from(forms))
    return WeightsWanted(
        form,
        k=draw(st.integers(1, sizes.keys)) if form == "top_k" else None,
        heads=some(sizes.heads),
        queries=some(sizes.queries),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
    )


@st.composite
def calls(
    draw: st.DrawFn, spec: LayerSpec, *, dtype: torch.dtype = torch.float32, rows=lengths, max_masks: int = 2
) -> Drawn:
    """Self- and cross-attention of one to three sequences, with random masks and anything wanted beside the output."""
    batch, queries = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(rows)
    is_self = spec.query_width == spec.key_width == spec.value_width and draw(st.booleans())
    keys, seed = queries if is_self else draw(rows), draw(seeds)
    key = value = None
    if not is_self:
        key = randn(batch, keys, spec.key_width, seed=seed + 1, dtype=dtype)
        if spec.key_width != spec.value_width or draw(st.booleans()):
            value = randn(batch, keys, spec.value_width, seed=seed + 2, dtype=dtype)
    sizes = Sizes(batch, spec.num_heads, queries, keys)
    masks = draw(masks_for(sizes, max_masks=max_masks))
    query = randn(batch, queries, spec.query_width, seed=seed, dtype=dtype)
    call = Call(query, key, value, engine_mask(masks, sizes))
    return Drawn(call._replace(**draw(st.one_of(st.just({}), extras_wanted(sizes)))), masks)


@st.composite
def extras_wanted(draw: st.DrawFn, sizes: Sizes) -> dict[str, Any]:
    """Fields of a call that ask for something beside its output."""
    scores = dataclasses.replace(draw(weights_wanted(sizes)), form="heads", k=None)
    fields = {
        "weights": draw(weights_wanted(sizes)),
        "scores": dataclasses.replace(scores, stage=draw(st.sampled_from(["scaled", "capped", "masked"]))),
        "has_lse": True,
        "has_entropy": True,
    }
    return {name: fields[name] for name in draw(st.sets(st.sampled_from(sorted(fields)), min_size=1))}
