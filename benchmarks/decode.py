"""What JSON costs: 32,768 floats in every form, and the longest stop of the event loop for bodies of 16 MiB.

python -m benchmarks.decode
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import orjson
import pybase64
import torch

from service.errors import ServiceError
from service.wire.json_document import parse
from service.wire.tensor_text import write_tensor
from service.wire.tensors import TensorForm, TensorKind, decode_tensor

MAX_DEPTH = 32
REPEATS = 60
LARGE_BYTES = 16 * 2**20


def median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


async def decode(body: bytes, kind: TensorKind) -> None:
    document = await parse(body, max_depth=MAX_DEPTH)
    await decode_tensor(document["query"], param="/query", kind=kind)


def small_figures() -> None:
    loop = asyncio.new_event_loop()
    print(f"{'32,768 values':<34}{'bytes':>10}{'encode ms':>12}{'decode ms':>12}")
    for form in TensorForm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            tensor = torch.randn(64, 512).to(dtype)
            encode_ms = median_ms(lambda: list(write_tensor(tensor, form)))  # noqa: B023  (used at once)
            body = b'{"query":' + b"".join(write_tensor(tensor, form)) + b"}"
            decode_ms = median_ms(lambda: loop.run_until_complete(decode(body, TensorKind.FLOAT)))  # noqa: B023
            name = f"{form.value}, {str(dtype).removeprefix('torch.')}"
            print(f"{name:<34}{len(body):>10,}{encode_ms:>12.3f}{decode_ms:>12.3f}")
    mask = torch.randn(64, 512) > 0
    body = b'{"query":' + orjson.dumps(mask.tolist()) + b"}"
    decode_ms = median_ms(lambda: loop.run_until_complete(decode(body, TensorKind.BOOL)))
    print(f"{'nested lists, true and false':<34}{len(body):>10,}{'':>12}{decode_ms:>12.3f}")
    loop.close()


def large_bodies() -> Iterator[tuple[str, bytes, TensorKind]]:
    def filled(element: bytes) -> bytes:
        return b'{"query":[' + element * (LARGE_BYTES // len(element) - 8) + b"0]}"

    floats = np.random.default_rng(0).standard_normal((2800, 512)).astype(np.float32)
    yield (
        "nested lists",
        b'{"query":' + orjson.dumps(floats, option=orjson.OPT_SERIALIZE_NUMPY) + b"}",
        TensorKind.FLOAT,
    )
    data = pybase64.b64encode(np.resize(floats, (6, 512, 1000)).tobytes())
    head = b'{"query":{"dtype":"float32","shape":[6,512,1000],"data":"'
    yield "base64", head + data + b'"}}', TensorKind.FLOAT
    yield "base64 with escaped slashes", head + data.replace(b"/", b"\\/") + b'"}}', TensorKind.FLOAT
    yield "zeros", filled(b"0,"), TensorKind.FLOAT
    yield "booleans", filled(b"true,"), TensorKind.BOOL
    yield '"-inf"', filled(b'"-inf",'), TensorKind.BIAS
    yield "null (refused)", filled(b"null,"), TensorKind.FLOAT
    yield "strings (refused)", filled(b'"1.5",'), TensorKind.FLOAT
    yield "1e999 (refused)", filled(b"1e999,"), TensorKind.FLOAT
    yield "integers beyond 64 bits", filled(b"1234567890123456789012345,"), TensorKind.FLOAT
    yield "objects (refused)", filled(b"{},"), TensorKind.FLOAT
    yield "brackets (refused)", b'{"query":' + b"[" * LARGE_BYTES, TensorKind.FLOAT
    yield "keys (refused)", b"{" + b'"a":0,' * (LARGE_BYTES // 6) + b"}", TensorKind.FLOAT


async def longest_stop_s(body: bytes, kind: TensorKind) -> tuple[float, float]:
    longest, last, is_over = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal longest, last
        while not is_over:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    start = time.perf_counter()
    with contextlib.suppress(ServiceError):
        await decode(body, kind)
    total = time.perf_counter() - start
    await asyncio.sleep(0)
    is_over = True
    await watcher
    return total, longest


def large_figures() -> None:
    print(f"\n{'16 MiB of':<34}{'total ms':>12}{'longest stop ms':>18}")
    for name, body, kind in large_bodies():
        runs = [asyncio.run(longest_stop_s(body, kind)) for _ in range(3)]
        print(f"{name:<34}{min(run[0] for run in runs) * 1e3:>12.1f}{min(run[1] for run in runs) * 1e3:>18.1f}")


if __name__ == "__main__":
    gc.freeze()  # as the service does at start-up
    small_figures()
    large_figures()
