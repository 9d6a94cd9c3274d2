"""Stand-in GPU: `standin:0`, a device of torch written in Python, whose tensors each hold a tensor of the CPU.

Invariants: Operands on different devices fail, as on CUDA. The memory-efficient attention kernel is computed as CUDA computes
it, with its demands on the bias. Launches, copies and waits are counted; a copy to the host that is not waited for arrives at the
next wait, and until then its target holds no right value. Results are those of a device, not of this CPU: the
layout of an attention output differs. What it cannot show: times, real bits, asynchronous errors, memory.
`register` is for a whole process, so tests that use it run in a process of their own (`plugin.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

DEVICE_NAME = "standin"
DEVICE_INDEX = 0
LOG2_E = 1.4426950408889634
# The rows of a bias begin at multiples of this many values; torch pads a bias whose rows do not.
BIAS_ALIGNMENT = 8

aten: Any = torch.ops.aten
_COPIES = {aten.copy_.default, aten._copy_from.default}
_CONVERSIONS = {aten._to_copy.default}
# They take indices and values of the CPU, which torch copies to the device.
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "zeros", "full")
_libraries: list[torch.library.Library] = []
rounds_by_rows = False
"""Whether products in float32 round by their number of rows, as those of cuBLAS do."""


@dataclasses.dataclass(slots=True)
class Counts:
    """What a part of a program asked of the device; `plans` are calls that torch on Hopper would send to cuDNN."""

    launches: int = 0
    copies: int = 0
    waits: int = 0
    plans: int = 0


_counted: list[Counts] = []
# Copies to the host that nothing has waited for: each target with its values.
_pending: list[tuple[torch.Tensor, torch.Tensor]] = []


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what all threads ask of the device in the meantime."""
    counts = Counts()
    _counted.append(counts)
    try:
        yield counts
    finally:
        _counted.remove(counts)


def _count(**more: int) -> None:
    if "waits" in more:
        for target, values in _pending:
            target.copy_(values)
        _pending.clear()
    for counts in _counted:
        for name, number in more.items():
            setattr(counts, name, getattr(counts, name) + number)


class _Module:
    """`torch.standin`, as `torch.cuda` is for CUDA."""

    reserved_bytes = 0
    num_emptied = 0
    """How often the cache was emptied."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: DEVICE_INDEX)
    manual_seed_all = staticmethod(lambda _: None)
    get_rng_state = staticmethod(lambda _=None: torch.zeros(1, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda _=None: "stand-in")
    memory_reserved = classmethod(lambda cls, _=None: cls.reserved_bytes)

    @classmethod
    def empty_cache(cls) -> None:
        cls.num_emptied += 1


def register() -> torch.device:
    """Make the device known to torch in this process, once; raise RuntimeError if this torch cannot have one in Python."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise RuntimeError(f"torch {torch.__version__} has no device in Python, so there is no stand-in for a GPU")
    if not _libraries:
        setup(DEVICE_NAME, backend_module=_Module)
        library = torch.library.Library("aten", "IMPL")
        for name in _FACTORIES:
            packet, _, overload = name.partition(".")
            library.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        # Else torch decomposes it before it arrives here, unless in inference mode.
        library.impl("scaled_dot_product_attention", _attention, "PrivateUse1")
        _libraries.append(library)
    return torch.device(DEVICE_NAME, DEVICE_INDEX)


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `held` is its memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=register()
        )
        made.held = held
        return made

    def __init__(self, held: torch.Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


def _dispatch(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if op is aten.scaled_dot_product_attention.default:
        return _attention(*args, **kwargs)
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    if is_composite and op not in _COPIES | _CONVERSIONS:
        return op.decompose(*args, **kwargs)  # in inference mode composite operators arrive whole
    with torch._C._DisableTorchDispatch():
        if op in _COPIES:
            is_waited = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            _count_copy(args[1], is_to_device=_is_here(args[0]), is_waited=is_waited)
            _held(args[0]).copy_(_held(args[1]))
            return args[0]
        if op in _CONVERSIONS:
            return _converted(op, *args, **kwargs)
        return _KERNELS.get(op, functools.partial(_computed, op))(*args, **kwargs)


def _computed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other operator on what the tensors hold."""
    name = op._schema.name.removeprefix("aten::")
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in op._schema.returns)
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    others = [x for x in given if not _is_here(x) and x.dim()]
    if op in _INDEXED and _is_here(args[0]):
        _count(copies=len(others), **({"waits": len(others)} if others else {}))
    elif others and not is_view:
        shapes = [(tuple(x.shape), x.device.type) for x in given]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {shapes}")
    if op in _WAITS:
        _count(launches=1, waits=1)
    elif not is_view and name not in _ALLOCATIONS:
        _count(launches=1)
    device = kwargs.pop("device", None)
    plain_args, plain_kwargs = pytree.tree_map(_held, (args, kwargs))
    found = op(*plain_args, **plain_kwargs)
    if device is not None and device.type == "cpu":
        return found
    # An operator that writes returns its very arguments.
    written = {id(_held(x)): x for x in given}
    return pytree.tree_map(lambda x: written.get(id(x), DeviceTensor(x)) if isinstance(x, torch.Tensor) else x, found)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any
) -> Any:
    """Choose as torch does on Hopper: the definition in float64 and at odd widths, cuDNN in 16 bits, else memory-efficient.

    Where it would be cuDNN, a plan is counted and the memory-efficient kernel computes.
    """
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    alignment = 8 if is_half else 4
    if q.dtype == torch.float64 or q.shape[-1] % alignment or v.shape[-1] % alignment:
        return aten.scaled_dot_product_attention.default.decompose(q, k, v, attn_mask, **options)
    _count(plans=int(is_half and torch.backends.cuda.cudnn_sdp_enabled()))
    if attn_mask is not None:
        if any(stride % BIAS_ALIGNMENT for stride in attn_mask.stride()[:-1]):
            keys = attn_mask.shape[-1]
            padding = BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT
            attn_mask = torch.nn.functional.pad(attn_mask, (0, padding))[..., :keys]
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, attn_mask, False, **options)[0]


def _efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Compute as the kernel does: (q·kᵀ·scale + bias)·log2(e) in float32, then powers of 2; a row without a key is zero."""
    if not all(map(_is_here, (q, k, v))) or not (bias is None or _is_here(bias)):
        raise RuntimeError("Expected all tensors to be on the same device, but the attention kernel got others")
    _count(launches=1)
    if bias is not None:
        strides = bias.stride()
        if bias.dtype != q.dtype or strides[-1] != 1 or any(one % BIAS_ALIGNMENT for one in strides[:-1]):
            raise RuntimeError(f"invalid bias: {bias.dtype} with strides {strides} beside a query of {q.dtype}")
    output = _kernel(*map(_held, (q, k, v, bias)), is_causal=is_causal, scale=scale)
    unused = torch.empty(0)
    rows_first = output.transpose(1, 2).contiguous().transpose(1, 2)
    return tuple(map(DeviceTensor, (rows_first, unused, unused.long(), unused.long())))


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, is_causal: bool, scale: float
) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if bias is not None:
        scores += bias.float()
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    scores *= LOG2_E
    largest = scores.amax(-1, keepdim=True)
    powers = torch.exp2(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    sums = powers.sum(-1, keepdim=True)
    return (powers @ v.float() / sums.masked_fill(sums == 0, 1.0)).to(q.dtype)


def _any_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: None,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout_p: float,
    mask_type: int,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """Compute each sequence of [1, T, N, H] between two ends as `_efficient_attention` does, in one launch, with its demands."""
    given, widths = (q, k, v, ends_q, ends_k), (q.shape[3], v.shape[3])
    if not all(map(_is_here, given)):
        raise RuntimeError("Expected all tensors to be on the same device, but the attention kernel got others")
    if q.dtype == torch.float64 or any(width * q.element_size() % 16 for width in widths):
        raise RuntimeError(f"the kernel has no {q.dtype} at widths of {widths}")
    if q.shape[0] != 1 or any(ends.dtype != torch.int32 or ends.stride() != (1,) for ends in (ends_q, ends_k)):
        raise RuntimeError("cu_seqlens are contiguous int32, and the batch is one")
    _count(launches=1)
    places = [[slice(*pair) for pair in itertools.pairwise(_held(ends).tolist())] for ends in (ends_q, ends_k)]
    if [longest_q, longest_k] != [max(place.stop - place.start for place in some) for some in places]:
        raise RuntimeError(f"the longest sequences are not {longest_q} and {longest_k}")
    output = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    for rows, keys in zip(*places, strict=True):
        query, key, value = (_held(x)[:, some].transpose(1, 2) for x, some in ((q, rows), (k, keys), (v, keys)))
        output[:, rows] = _kernel(query, key, value, None, is_causal=bool(mask_type), scale=scale).transpose(1, 2)
    unused = torch.empty(0)
    return (*map(DeviceTensor, (output, unused, unused.long(), unused.long())), longest_q, longest_k)


def _product(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Round products in float32 by their number of rows as cuBLAS does, and differently if there is one instead of several."""
    found = _computed(op, *args, **kwargs)
    if rounds_by_rows and found.dtype == torch.float32:
        is_one = found.shape[:-2].numel() == 1
        found.held.mul_(1 + (found.shape[-2] // 4 % 8 + is_one) * 2**-22)
    return found


_KERNELS: dict[Any, Callable[..., Any]] = {
    **{op: functools.partial(_product, op) for op in (aten.mm.default, aten.addmm.default, aten.bmm.default)},
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._efficient_attention_forward.default: _any_lengths,
}


def _factory(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        _count(launches=int("empty" not in str(op)))
        with torch._C._DisableTorchDispatch():
            named = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
            return DeviceTensor(op(*args, **named, device="cpu"))

    return make


def _converted(op: Any, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return a copy in another dtype, on another device or in another layout."""
    device = kwargs.pop("device", None)
    is_to_device = _is_here(source) if device is None else device.type == DEVICE_NAME
    is_waited = not kwargs.get("non_blocking")
    _count_copy(source, is_to_device=is_to_device, is_waited=is_waited)
    found: torch.Tensor = op(_held(source), **kwargs)
    if is_to_device and found.is_floating_point():
        # A CPU that converts a NaN gives it other bits at the end of a vector than inside it. A GPU converts all alike.
        found.masked_fill_(found.isnan(), torch.nan)
    if not is_to_device and not is_waited and _is_here(source):
        _pending.append((found, found.clone()))
        found.fill_(torch.nan if found.is_floating_point() else -1)
    return DeviceTensor(found) if is_to_device else found


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        _count_copy(source, is_to_device=_is_here(target), is_waited=not non_blocking)
        _held(target).copy_(_held(source))
        return target


def _count_copy(source: torch.Tensor, *, is_to_device: bool, is_waited: bool) -> None:
    if _is_here(source) and is_to_device:
        _count(launches=1)
    elif _is_here(source) or is_to_device:
        _count(copies=1, **({"waits": 1} if is_waited else {}))


def _is_here(x: torch.Tensor) -> bool:
    return isinstance(x, DeviceTensor)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x
