"""GPU checks: what only a real device can answer about the engine and torch's kernels.

Invariants: a check yields rows of figures as it finds them; a row whose `failed` says why is a broken promise, all others are
figures. A check runs in a process of its own (`gpu_part.py`), so it may lose the device. What needs a GPU yields `skipped` on a
CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from service.attention.call import Answer, AttentionCall, Call, WeightsWanted
from service.attention.engine import Engine, EngineOptions, LayerCall, LoadedLayer
from service.attention.layer import Layer
from service.attention.masks import Added, CombinedMask, Sizes, causal
from service.attention.scaled_dot_product import ScaledDotProduct
from service.attention.spec import LayerSpec
from service.errors import CostLimit, EngineDown, ServiceError

Row = dict[str, Any]
WIDTH, HEADS = 512, 8
SPEC = LayerSpec(WIDTH, WIDTH, WIDTH, WIDTH, HEADS, HEADS, 64, 64, 0.125, ("query", "key", "value", "output"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Lengths that torch has not seen before, because cuDNN makes a plan for each.
NEW_LENGTHS = (37, 61, 90, 113, 150, 201)
# Largest difference of an output in float32 from the CPU's, and between alone and together on a GPU without exact mode.
TOLERANCE = 1e-4
TOGETHER = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


class Scale(NamedTuple):
    """How much is done: `calls` of a workload, and `seconds` of each timed loop."""

    device: torch.device
    calls: int
    seconds: float

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


REAL, DRY = Scale(torch.device("cuda"), 64, 1.0), Scale(torch.device("cpu"), 16, 0.02)


Check = Callable[[Scale], Iterator[Row]]


def machine(scale: Scale) -> Iterator[Row]:
    """Yield what the figures are of."""
    row: Row = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "card": "none (dry run on the CPU)",
        "driver": None,
    }
    if scale.is_gpu:
        about = torch.cuda.get_device_properties(scale.device)
        row |= {
            "card": about.name,
            "memory_mib": about.total_memory >> 20,
            "capability": f"{about.major}.{about.minor}",
        }
        row |= {"cudnn": torch.backends.cudnn.version(), "driver": of_smi("driver_version")}
    yield row


def of_smi(field: str) -> str | None:
    """Return a field of the first card, None where nvidia-smi does not tell it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.partition("\n")[0]
        or None
    )


def cudnn(scale: Scale) -> Iterator[Row]:
    """Yield what a masked call of torch costs at a new and at a known shape, with cuDNN's attention on and off."""
    for dtype, is_on in itertools.product(DTYPES, (True, False)):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        first, again, num_wrong = list[float](), list[float](), 0
        for length, has_rows in itertools.product(NEW_LENGTHS, (False, True)):
            q = torch.randn(1, HEADS, length, 64, device=scale.device, dtype=dtype)
            mask = torch.zeros(1, 1, length if has_rows else 1, length, device=scale.device, dtype=dtype)
            if has_rows:
                mask[:, :, 3] = -torch.inf
            for times in (first, again):
                _wait(scale)
                began = time.perf_counter()
                out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
                _wait(scale)
                times.append(time.perf_counter() - began)
            num_wrong += has_rows and bool(out[:, :, 3].any() or out.isnan().any())
        new_ms, known_ms = (statistics.median(times) * 1e3 for times in (first, again))
        yield dict(dtype=_name(dtype), cudnn=is_on, new_ms=new_ms, known_ms=known_ms, masked_rows_not_zero=num_wrong)


def meaning(scale: Scale) -> Iterator[Row]:
    """Yield how far the engine's attention is from the CPU's where every bias is the lowest number, or a row has no key."""
    x = _rows(1, 2, 5, 8)
    biases = {"finfo.min": torch.finfo(torch.float32).min, "-1e38": -1e38, "-inf in one row": -torch.inf}
    with (
        _engine(EngineOptions(scale.device, torch.float32)) as engine,
        _engine(EngineOptions(CPU, torch.float32)) as cpu,
    ):
        sides = [(one, one.load(ScaledDotProduct, dtype=torch.float32).result()) for one in (engine, cpu)]
        for (name, value), wanted in itertools.product(biases.items(), (None, WeightsWanted("heads"))):
            bias = torch.full((1, 1, 5, 5), value)
            if value == -torch.inf:
                bias[:, :, [0, 1, 2, 4]] = 0
            mask = CombinedMask(Sizes(1, 2, 5, 5), (Added(bias),))
            call = AttentionCall(x, x, x, 0.35, mask=mask, weights=wanted)
            ours, right = (_answers(one, loaded, [call])[0].output for one, loaded in sides)
            row: Row = {"bias": name, "weights": wanted is not None, "difference": float((ours - right).abs().max())}
            yield row | ({} if row["difference"] <= TOLERANCE else {"failed": "the output is not the CPU's"})


def bits(scale: Scale) -> Iterator[Row]:
    """Yield how many answers have the same bits alone and together; in exact mode all must."""
    for dtype, is_exact in itertools.product(DTYPES, (False, True)):
        with _loaded(scale, dtype, exact=is_exact) as (engine, loaded):
            calls = [_call(length, "causal" if i % 2 else "none") for i, length in enumerate(_mixed(scale.calls))]
            together = _answers(engine, loaded, calls)
            alone = [_answers(engine, loaded, [call])[0] for call in calls]
        pairs = [(a.output, b.output) for a, b in zip(alone, together, strict=True)]
        num = sum(torch.equal(a, b) for a, b in pairs)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        row: Row = {"dtype": _name(dtype), "exact": is_exact, "equal": num, "of": len(pairs), "difference": difference}
        row["sequential"] = loaded.is_sequential
        is_kept = num == len(pairs) if is_exact else difference <= TOGETHER[dtype]
        yield row | ({} if is_kept else {"failed": "the answers differ alone and together"})


def speed(scale: Scale) -> Iterator[Row]:
    """Yield the engine's calls a second, without HTTP, for each kind of call, dtype and mode."""
    cases = _cases(scale.calls)
    for dtype, is_exact in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        with _engine(EngineOptions(scale.device, dtype, exact=is_exact)) as engine:
            began = time.perf_counter()
            loaded = engine.load(partial(Layer, SPEC, _tensors())).result()
            load_s = time.perf_counter() - began
            for (name, calls), size in itertools.product(cases.items(), sorted({16, scale.calls})):
                row: Row = {"case": name, "dtype": _name(dtype), "exact": is_exact, "batch": size}
                row["calls_per_s"] = _rate(engine, loaded, calls, size, scale.seconds)
                yield row | {"load_s": load_s, "reserved_mib": engine.device_bytes >> 20}


def _cases(num: int) -> dict[str, list[Call]]:
    short, mixed = [16] * num, _mixed(num)
    return {
        "w2": [_call(length) for length in short],
        "w1": [_call(length) for length in mixed],
        "w1 causal": [_call(length, "causal") for length in mixed],
        "w3": [_call(length, weights=WeightsWanted("heads")) for length in mixed],
        "w2 top_k": [_call(length, weights=WeightsWanted("top_k", k=3)) for length in short],
    }


def launches(scale: Scale) -> Iterator[Row]:
    """Yield the kernels, copies and waits of one batch of 16, as CUDA's own profiler counts them."""
    with _loaded(scale) as (engine, loaded):
        for name, calls in _cases(16).items():
            _answers(engine, loaded, calls)
            with torch.profiler.profile() as profiler:
                _answers(engine, loaded, calls)
            yield {"case": name, "batch": len(calls), **counted(profiler.profiler.kineto_results.events())}


def counted(events: Sequence[Any]) -> Row:
    """Return what the events of a profiler say; a kernel is what runs on the device and neither copies nor fills memory."""
    on_device = [event.name() for event in events if event.device_type() == torch.profiler.DeviceType.CUDA]
    copies = [name for name in on_device if name.startswith("Memcpy")]
    kernels = [name for name in on_device if not name.startswith(("Memcpy", "Memset"))]
    waits = [event.name() for event in events if event.name().startswith("cuda") and "Synchronize" in event.name()]
    between = {way: sum(way in name for name in copies) for way in ("HtoD", "DtoH", "DtoD")}
    return {"kernels": len(kernels), **between, "waits": len(waits)}


def _rate(engine: Engine, loaded: LoadedLayer, calls: Sequence[Call], size: int, seconds: float) -> float:
    batches = [calls[start : start + size] for start in range(0, len(calls), size)]
    for batch in batches:
        _answers(engine, loaded, batch)
    num, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds or not num:
        for batch in batches:
            num += len(_answers(engine, loaded, batch))
    return num / (time.perf_counter() - began)


def varlen(scale: Scale) -> Iterator[Row]:
    """Yield what the device can give: one product, one launch for all sequences, one copy each way, in plain torch."""
    packed, output = (torch.randn(width, WIDTH, device=scale.device) / 22 for width in (3 * WIDTH, WIDTH))
    for dtype, (name, lengths) in itertools.product(
        (torch.float32, torch.bfloat16), (("w2", [16] * scale.calls), ("w1", _mixed(scale.calls)))
    ):
        parts = [_rows(length, WIDTH) for length in lengths]
        forward = _packed_forward(packed.to(dtype), output.to(dtype))
        together, alone = forward(parts), [forward([part])[0] for part in parts]
        row: Row = {"case": name, "dtype": _name(dtype), "of": len(parts)}
        row["equal"] = sum(map(torch.equal, alone, together))
        row["difference"] = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
        for size in (16, 64, 256):
            batch, num, began = (parts * 4)[:size], 0, time.perf_counter()
            while time.perf_counter() < began + scale.seconds:
                num += len(forward(batch))
            row[f"calls_per_s_{size}"] = num / (time.perf_counter() - began)
        yield row


def _packed_forward(packed: torch.Tensor, output: torch.Tensor) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    def forward(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(part) for part in parts]
        host = torch.empty(sum(lengths), WIDTH, pin_memory=True)
        torch.cat(parts, out=host)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).pin_memory()
        ends = ends.to(packed.device, non_blocking=True)
        x = host.to(packed.device, non_blocking=True).to(packed.dtype) @ packed.T
        q, k, v = (one.view(1, -1, HEADS, 64) for one in x.split(WIDTH, 1))
        attend, most = torch.ops.aten._efficient_attention_forward, max(lengths)  # noqa: SLF001 (torch has no public name)
        found = attend(q, k, v, None, ends, ends, most, most, 0.0, 0, False, scale=0.125)[0]
        return list((found.view(-1, WIDTH) @ output.T).float().cpu().split(lengths))

    return forward


def memory(scale: Scale) -> Iterator[Row]:
    """Yield what a call gets when the device's memory is used up, and whether the engine then goes on."""
    with _loaded(scale) as (engine, loaded):
        held = list(_all_memory(scale))
        error = _error(engine, loaded, Call(_rows(1, 32768, WIDTH)))
        del held
        torch.cuda.empty_cache()
        again = _error(engine, loaded, _call(16))
    row = {"error": type(error).__name__, "again": "an answer" if again is None else type(again).__name__}
    is_kept = isinstance(error, CostLimit) and again is None
    yield row | ({} if is_kept else {"failed": f"expected CostLimit, then an answer: {error!r}, {again!r}"[:300]})


def _all_memory(scale: Scale) -> Iterator[torch.Tensor]:
    for size in (2**30, 2**26, 2**24):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                yield torch.empty(size, dtype=torch.uint8, device=scale.device)


def lost(scale: Scale) -> Iterator[Row]:
    """Yield what a call gets after a device-side assertion, which loses the context of the process."""
    with _loaded(scale) as (engine, loaded):
        with contextlib.suppress(RuntimeError):
            torch.zeros(4, device=scale.device)[torch.tensor([9], device=scale.device)].cpu()
        error = _error(engine, loaded, _call(16))
    row = {"error": type(error).__name__}
    yield row | ({} if isinstance(error, EngineDown) else {"failed": f"expected EngineDown: {error!r}"[:300]})


def _on_gpu(check: Check) -> Check:
    """Return the check; on a CPU it yields that it was skipped."""
    return lambda scale: check(scale) if scale.is_gpu else iter([{"skipped": "needs a GPU"}])


CHECKS: dict[str, Check] = {check.__name__: check for check in (machine, cudnn, meaning, bits, speed)}
CHECKS |= {check.__name__: _on_gpu(check) for check in (launches, varlen, memory, lost)}
CPU = torch.device("cpu")


@contextlib.contextmanager
def _loaded(
    scale: Scale, dtype: torch.dtype = torch.float32, *, exact: bool = False
) -> Iterator[tuple[Engine, LoadedLayer]]:
    """Yield an engine and the layer on it."""
    with _engine(EngineOptions(scale.device, dtype, exact=exact)) as engine:
        yield engine, engine.load(partial(Layer, SPEC, _tensors())).result()


@contextlib.contextmanager
def _engine(options: EngineOptions) -> Iterator[Engine]:
    engine = Engine(options)
    try:
        yield engine
    finally:
        engine.close()


def _answers(engine: Engine, loaded: LoadedLayer, calls: Sequence[Call | AttentionCall]) -> Sequence[Answer]:
    return engine.run([LayerCall(loaded, call) for call in calls]).future.result()


def _error(engine: Engine, loaded: LoadedLayer, call: Call) -> BaseException | None:
    try:
        _answers(engine, loaded, [call])
    except (ServiceError, RuntimeError) as error:
        return error.with_traceback(None)
    return None


def _call(length: int, mask: str = "none", weights: WeightsWanted | None = None) -> Call:
    sizes = Sizes(1, HEADS, length, length)
    combined = CombinedMask(sizes, (causal(sizes, 0),)) if mask == "causal" else None
    return Call(_rows(1, length, WIDTH), mask=combined, weights=weights)


def _mixed(num: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randint(8, 256) for _ in range(num)]


_GENERATOR = torch.Generator().manual_seed(0)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_GENERATOR)


def _tensors() -> dict[str, torch.Tensor]:
    """Return seeded weights of about the size that trained ones have."""
    generator = torch.Generator().manual_seed(0)
    shapes = SPEC.tensor_shapes().items()
    return {
        name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 2)
        for name, shape in shapes
    }


def _wait(scale: Scale) -> None:
    if scale.is_gpu:
        torch.cuda.synchronize()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
