"""Every form of the same request gives the same bits: JSON lists and base64, safetensors, Open Inference JSON and binary."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.forms import AXES, DTYPES, FLOATS, HEADS, OPTIONAL_AXES, WIDTH, Request, answers, check_same_bits


def numbers_of(numbers: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Of the dtype's own grid, and now and then what forms get wrong: both zeros, the smallest, its neighbours of one."""
    found = numbers.standard_normal(shape).astype(dtype)
    bits = np.dtype(f"u{dtype.itemsize}")
    sign = bits.type(1 << (8 * dtype.itemsize - 1))
    one = np.ones((), dtype).view(bits)
    odd = np.array([0, sign, 1, sign | bits.type(1), 3, one - bits.type(1), one + bits.type(1)], bits).view(dtype)
    return np.where(numbers.random(shape) < 0.1, numbers.choice(odd, shape), found)


@st.composite
def requests(draw) -> Request:
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = draw(st.sampled_from([None, 1, 2, 3]))
    lead = () if sequences is None else (sequences,)
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = DTYPES[draw(st.sampled_from(FLOATS))]
    other = st.just(dtype) | st.sampled_from(FLOATS).map(DTYPES.__getitem__)

    def rows(count: int, dtype: np.dtype) -> np.ndarray:
        return numbers_of(numbers, (*lead, count, WIDTH), dtype)

    is_cross = draw(st.booleans())
    keys = keys if is_cross else queries
    kinds = draw(st.lists(st.sampled_from(["attend", "ignore", "bias", "lengths", "causal", "window"]), unique=True))
    masks = [_mask(draw, numbers, kind, (lead, queries, keys)) for kind in kinds]
    forms = st.sampled_from(
        [
            {"form": "heads"},
            {"form": "mean"},
            {"form": "mean", "dtype": "float16"},
            {"form": "top_k", "k": draw(st.integers(1, keys))},
            {"form": "heads", "heads": [2, 0], "queries": [queries - 1]},
            {"form": "contributions"},
        ]
    )
    more = {
        "scores": draw(st.sampled_from([{"stage": "masked"}, {"stage": "scaled"}, {"stage": "capped", "heads": [1]}]))
    }
    more |= {"lse": True, "entropy": True}
    return Request(
        query=rows(queries, dtype),
        key=rows(keys, draw(other)) if is_cross else None,
        value=rows(keys, draw(other)) if is_cross and draw(st.booleans()) else None,
        masks=masks,
        weights=draw(st.none() | forms),
        more={name: more[name] for name in draw(st.sets(st.sampled_from(sorted(more))))},
    )


def _mask(draw, numbers, kind: str, sizes) -> tuple[dict, np.ndarray | None]:
    lead, queries, keys = sizes
    if kind == "causal":
        return {"kind": kind, "align": draw(st.sampled_from(["top_left", "bottom_right"]))}, None
    if kind == "window":
        offset = (
            draw(st.integers(-2, 2) | st.lists(st.integers(-2, 2), min_size=lead[0], max_size=lead[0])) if lead else 1
        )
        return {"kind": kind, "left": draw(st.integers(0, 3)), "right": None, "offset": offset}, None
    if kind == "lengths":
        shape = (*lead, queries) if draw(st.booleans()) or not lead else lead
        return {"kind": kind}, numbers.integers(0, keys + 1, shape).astype(draw(st.sampled_from(["int32", "int64"])))
    axes = draw(st.sampled_from(AXES[bool(lead)]))
    full = dict(zip("bhls", (*(lead or (1,)), HEADS, queries, keys), strict=True))
    chosen = numbers.random([full[name] if draw(st.integers(0, 3)) else 1 for name in axes]) < 0.7
    fields = {"kind": kind} | ({} if axes in OPTIONAL_AXES[bool(lead)] and draw(st.booleans()) else {"axes": axes})
    if kind == "bias":
        dtype = DTYPES[draw(st.sampled_from(FLOATS))]
        return fields, np.where(chosen, numbers_of(numbers, chosen.shape, dtype), dtype.type(-np.inf))
    return fields, chosen


@pytest.mark.long
@pytest.mark.parametrize("off_loop_bytes", [1, 2**20], ids=["in the thread", "on the loop"])
def test_every_form_of_a_random_request_gives_the_same_bits(served, off_loop_bytes):
    """B16: 240 requests in six to eight forms each."""

    async def story(service):
        loop = asyncio.get_running_loop()

        @settings(max_examples=120)
        @given(requests())
        def compare(request):
            check_same_bits(asyncio.run_coroutine_threadsafe(answers(service, request), loop).result(30))

        await asyncio.to_thread(compare)

    served(story, decode_off_loop_bytes=off_loop_bytes)
