"""Attention fixtures: layers with random tensors, bitwise comparison and thread counts, shared by the tests of attention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from service.attention import masks
from service.attention.call import Answer, Call, TopK, Weights
from service.attention.engine import Engine, EngineOptions, LayerCall
from service.attention.kernels import Heads
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Mask, Sizes
from service.attention.self_check import Variant, checks, settle
from service.attention.spec import LayerSpec, Window
from tests import oracle

CPU = torch.device("cpu")
DEVICE = CPU
"""The device on which the tests compute; `tests/standin/plugin.py` sets another before it imports them."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
THREADS = (1, 2)
# Two threads of this process and another process beside it keep two cores busy for minutes.
every_thread_count = pytest.mark.parametrize(
    "threads", [THREADS[0], *(pytest.param(n, marks=pytest.mark.long) for n in THREADS[1:])]
)


def keeps_bits(layer: Variant) -> bool:
    """Whether the layer passes the whole self-check as it is."""
    return all(checks(layer))


def settled(layer: Layer) -> Layer:
    """The layer as the self-check leaves it: its least rows raised, or sequential, where this machine's products need it."""
    for _ in settle(layer):
        pass
    return layer


def make_spec(
    width: int = 24,
    num_heads: int = 3,
    *,
    num_kv_heads: int | None = None,
    biases: bool | tuple[str, ...] = True,
    **fields: object,
) -> LayerSpec:
    """A layer whose widths are all `width`, unless `fields` say otherwise."""
    head_width = max(1, width // num_heads)
    values: dict = {
        "query_width": width,
        "key_width": width,
        "value_width": width,
        "out_width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "head_width": head_width,
        "value_head_width": head_width,
        "scale": head_width**-0.5,
        "biases": biases if isinstance(biases, tuple) else ("query", "key", "value", "output") if biases else (),
        **fields,
    }
    if not values.get("has_output", True):
        values["biases"] = tuple(name for name in values["biases"] if name != "output")
        values["out_width"] = values["num_heads"] * values["value_head_width"]
    return LayerSpec(**values)


def make_tensors(spec: LayerSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the layer in float64, scaled so that outputs are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / (shape[-1] ** 0.5 if len(shape) > 1 else 2)
        for name, shape in spec.tensor_shapes().items()
    }


def make_layer(spec: LayerSpec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
    return Layer(spec, make_tensors(spec, seed), dtype=dtype, device=DEVICE)


class OneLayer:
    """An engine with one layer, which answers plain calls."""

    def __init__(self, options: EngineOptions, spec: LayerSpec, seed: int = 0) -> None:
        self.engine = Engine(options)
        self.loaded = self.engine.load(functools.partial(Layer, spec, make_tensors(spec, seed))).result()

    def run(self, calls: Sequence[Call], *, is_inline: bool = False, is_long: bool = False) -> Future[Any]:
        works = [LayerCall(self.loaded, call) for call in calls]
        return self.engine.run(works, is_inline=is_inline, is_long=is_long).future

    def close(self) -> None:
        self.engine.close()


def identity_layer(width: int, value_width: int | None = None, *, scale: float, dtype=torch.float64) -> Layer:
    """Scaled dot-product attention itself: one head, projections that change nothing, no output projection."""
    value_width = value_width or width
    spec = make_spec(
        width,
        1,
        biases=False,
        value_width=value_width,
        value_head_width=value_width,
        has_output=False,
        scale=float(scale),
    )
    tensors = {f"{name}.weight": torch.eye(width) for name in ("query", "key")}
    return Layer(spec, tensors | {"value.weight": torch.eye(value_width)}, dtype=dtype, device=DEVICE)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_heads(sizes: Sizes, dtype: torch.dtype, seed: int = 0, width: int = 8) -> Heads:
    q, k, v = (
        randn(sizes.heads, rows, width, seed=seed + i, dtype=dtype)
        for i, rows in enumerate((sizes.queries, sizes.keys, sizes.keys))
    )
    return Heads(q, k, v)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def oracle_inputs(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value of a call after its defaults, for the oracle."""
    query = call.query.double().numpy()
    key = query if call.key is None else call.key.double().numpy()
    return query, key, key if call.value is None else call.value.double().numpy()


def engine_mask(given: Sequence[oracle.Mask], sizes: Sizes) -> CombinedMask | None:
    """The engine's masks for the oracle's masks; None without any."""
    return CombinedMask(sizes, tuple(_engine_mask(mask, sizes) for mask in given)) if given else None


def _engine_mask(mask: oracle.Mask, sizes: Sizes) -> Mask:
    match mask:
        case oracle.Attend(values):
            return masks.Allowed(torch.from_numpy(values))
        case oracle.Ignore(values):
            return masks.ignore(torch.from_numpy(values))
        case oracle.Bias(values):
            return masks.Added(torch.from_numpy(values))
        case oracle.Lengths(values):
            return masks.lengths(torch.from_numpy(values).reshape(len(values), -1))
        case oracle.Causal(offset):
            return masks.causal(sizes, offset)
        case oracle.Window(offset, left, right):
            return masks.window(sizes, offset, left, right)


def windowed(window: Window, num_heads: int, call: Call) -> Call:
    """The call with the layer's window in front of its masks, as a request puts it there."""
    positions, key_positions = call.places
    sizes = Sizes(len(call.query), num_heads, positions.shape[1], key_positions.shape[1])
    own = () if call.mask is None else call.mask.masks
    return call._replace(mask=CombinedMask(sizes, (masks.of_positions(window, positions, key_positions), *own)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: 0.0 and -0.0 differ, a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def same_weights(one: Weights | None, other: Weights | None) -> bool:
    if isinstance(one, TopK) and isinstance(other, TopK):
        return all(same_bits(getattr(one, name), getattr(other, name)) for name in ("values", "indices", "rest"))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    return one is other


def same_answers(one: Answer, other: Answer) -> bool:
    """Every part bit for bit; what one has not, the other has not."""
    names = [field.name for field in dataclasses.fields(Answer)]
    return all(same_weights(getattr(one, name), getattr(other, name)) for name in names)


def full_weights(answer: Answer) -> torch.Tensor:
    """The weights of an answer in the form "heads" or "mean"."""
    assert isinstance(answer.weights, torch.Tensor)
    return answer.weights


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Allocations(TorchDispatchMode):
    """While entered, notes every tensor that is made in memory of its own, and every sort; sizes in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.sorted_keys: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "aten.sort" in str(func):
            self.sorted_keys.append(args[0].shape[-1])
        given = [*args, *(kwargs or {}).values()]
        held = {arg.untyped_storage().data_ptr() for arg in given if isinstance(arg, torch.Tensor)}
        made = out if isinstance(out, list | tuple) else [out]
        self.sizes += [
            x.numel() for x in made if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in held
        ]
        return out


@functools.cache
def blas_keeps_rows() -> bool:
    """Whether this machine's matrix products have the property that the rounding rules of `projection.py` were measured for.

    True where the rows of a product keep their bits in every taller one of 12, 16, 20, ... rows, for a grid of widths that
    are multiples of 4. Written with numbers of its own, so that it does not follow a change of those rules. Where it is
    false the tests hold the engine to its fallback, one sequence at a time.
    """
    return all(_product_keeps_rows(dtype, threads) for dtype in DTYPES for threads in THREADS)


def may_run_apart(layer: Layer) -> bool:
    """Whether the self-check may find out that this layer has to run one sequence at a time here.

    In float64 on two threads oneMKL cuts products with an inner width above 256 and few columns (13 to 47) along that
    inner width, and whether it does depends on the number of rows: no rounding of rows helps there.
    """
    is_cut = layer.dtype == torch.float64 and torch.get_num_threads() > 1
    inner = max(shape[1] for shape in layer.spec.tensor_shapes().values() if len(shape) > 1)
    return not blas_keeps_rows() or (is_cut and inner > 256)


def _product_keeps_rows(dtype: torch.dtype, threads: int) -> bool:
    with torch_threads(threads):
        for width, out in ((4, 1028), (20, 60), (64, 64), (128, 36), (384, 384), (512, 1536)):
            weight, bias = randn(out, width, seed=1, dtype=dtype), randn(out, seed=2, dtype=dtype)
            tall = randn(260, width, seed=3, dtype=dtype)
            if dtype.itemsize == 2:  # rounding hides another order of most sums, but not of those that nearly cancel
                weight[:, width // 2 :], bias = -weight[:, : width // 2], torch.zeros_like(bias)
                tall[:, width // 2 :] = tall[:, : width // 2]
                tall[:, ::5] *= 1 + 2 * torch.finfo(dtype).eps
            # In the 16-bit dtypes products of at most 4,096 multiply-adds round differently.
            least = max(12, -(-(4096 // (width * out) + 1) // 4) * 4)
            expected = functional.linear(tall, weight, bias)
            for rows in (least, least + 4, least + 8, 64, 132):
                if not same_bits(functional.linear(tall[:rows].clone(), weight, bias), expected[:rows]):
                    return False
    return True
