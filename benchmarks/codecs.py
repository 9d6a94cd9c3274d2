"""What the codecs cost: our MB/s beside the bare library's, both ways; then how long bodies of 16 MiB stop the event loop,
decoded on it and in the decoding thread.

python -m benchmarks.codecs

Ours and theirs take turns, so that a noisy machine is noisy for both; figures are medians. MB are of the text or body.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import orjson
import pybase64
import simdjson
import torch
import uvloop
from safetensors.torch import load, save

from service.api.json_parser import JsonParser
from service.attention.call import Answer
from service.attention.spec import LayerSpec
from service.batching.job import BatchInfo
from service.errors import ServiceError
from service.wire.answer import AnswerFacts, write_tensor
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.inference_codec import WantedAnswer, WantedOutput, split_inference, write_inference
from service.wire.inference_codec import read_inference as parse_inference
from service.wire.json_document import MAX_TEXT_NUMBERS, parse
from service.wire.safetensors_codec import RequestTemplates, write_safetensors
from service.wire.tensors import TensorForm, TensorKind, decode_tensor

MAX_DEPTH = 32
REPEATS = 101
LARGE_BYTES = 16 * 2**20
RNG = np.random.default_rng(0)


class Row(NamedTuple):
    """One codec in one direction: what it does, to how many bytes, by us and by the bare library."""

    name: str
    num_bytes: int
    ours: Callable[[], object]
    bare: Callable[[], object]
    repeats: int = REPEATS


def medians_s(row: Row) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(row.repeats):
        for work, taken in zip((row.ours, row.bare), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def decode(body: bytes, kind: TensorKind = TensorKind.FLOAT) -> torch.Tensor:
    document = parse(body, max_depth=MAX_DEPTH)
    return decode_tensor(document["query"], param="/query", kind=kind).tensor


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def in_body(value: bytes) -> bytes:
    return b'{"query":' + value + b"}"


def dumps(array: np.ndarray) -> bytes:
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def json_rows() -> Iterator[Row]:
    nested, row = floats(64, 512), RNG.standard_normal(32_768)
    for name, value in (
        ("nested lists, 64 x 512", nested),
        ("flat list, 17 digits", row),
        ("nested lists, 16 x 512", floats(16, 512)),
        ("nested lists, 2048 x 512", floats(2048, 512)),
        ("nested lists, 4 x 24", floats(4, 24)),
    ):
        body = in_body(dumps(value))
        yield Row(
            f"read {name}",
            len(body),
            lambda body=body: decode(body),
            lambda body=body: np.frombuffer(simdjson.Parser().parse(body)["query"].as_buffer(of_type="d")),
            REPEATS if len(body) < 2**20 else 9,
        )
    for name, value in (("nested lists, 64 x 512", nested), ("flat list, 17 digits", row)):
        tensor = torch.from_numpy(value)
        yield Row(
            f"write {name}",
            len(dumps(value)),
            lambda tensor=tensor: b"".join(write_tensor(tensor, TensorForm.NESTED)),
            lambda value=value: dumps(value),
        )


def base64_rows() -> Iterator[Row]:
    for rows in (2, 16, 64, 512, 4096):
        values = floats(rows, 512)
        text = pybase64.b64encode_as_string(values.tobytes())
        body = in_body(f'{{"dtype":"float32","shape":[{rows},512],"data":"{text}"}}'.encode())
        yield Row(
            f"read base64, {rows} x 512",
            len(body),
            lambda body=body: decode(body),
            lambda text=text: pybase64.b64decode(text, validate=True),
            REPEATS if rows < 1024 else 15,
        )
    tensor = torch.from_numpy(floats(64, 512))
    data = tensor.numpy().tobytes()
    yield Row(
        "write base64, 64 x 512",
        len(data) // 3 * 4,
        lambda: b"".join(write_tensor(tensor, TensorForm.BASE64)),
        lambda: pybase64.b64encode(data),
    )


SPEC = LayerSpec(
    query_width=512, key_width=512, value_width=512, out_width=512, num_heads=8, num_kv_heads=8, head_width=64,
    value_head_width=64, scale=0.125, biases=("query", "key", "value", "output"),
)  # fmt: skip
LIMITS = RequestLimits(*(2**62,) * 5)
PATTERNS = RequestTemplates(LIMITS, MAX_DEPTH, MAX_TEXT_NUMBERS)
FACTS = AnswerFacts(0, "layer", "sha256:" + "0" * 64, BatchInfo(1, 1, 16), lambda: {"total": 1.5})


def read_safetensors(body: bytes) -> CheckedRequest:
    """All that happens to a body whose header came before: joined, parsed, checked, costed."""
    return PATTERNS.read(bytearray().join([body]), "layer", "digest", SPEC)


def read_inference(body: bytes, json_length: bytes) -> CheckedRequest:
    text, rest = split_inference(bytearray().join([body]), json_length)
    found = parse_inference(parse(text, max_depth=MAX_DEPTH), rest)
    return check_request(found.document, "layer", SPEC, LIMITS, found.mask_params)


def inference_body(array: np.ndarray) -> tuple[bytes, bytes]:
    query = {"name": "query", "datatype": "FP32", "shape": [1, *array.shape]}
    fields = {"inputs": [{**query, "parameters": {"binary_data_size": array.nbytes}}]}
    head = orjson.dumps({**fields, "parameters": {"binary_data_output": True}})
    return head + array.tobytes(), str(len(head)).encode()


def binary_rows() -> Iterator[Row]:
    """Ours from bytes to a checked request with its cost, and from an answer to its parts; the bare library copies both ways."""
    wanted = WantedAnswer(None, (WantedOutput("output", is_binary=True),))
    for rows in (16, 2048):
        array = floats(rows, 512)
        body, answer = save({"query": torch.from_numpy(array)}), Answer(torch.from_numpy(array)[None])
        inference, head = inference_body(array)
        name = f"{rows} x 512"
        yield Row(f"read safetensors, {name}", len(body), lambda b=body: read_safetensors(b), lambda b=body: load(b))
        yield Row(
            f"write safetensors, {name}",
            array.nbytes,
            lambda a=answer: write_safetensors(a, FACTS, is_batch=False),
            lambda a=answer: save({"output": a.output}),
        )
        yield Row(
            f"read inference, {name}",
            len(inference),
            lambda b=inference, n=head: read_inference(b, n),
            lambda b=body: load(b),
        )
        yield Row(
            f"write inference, {name}",
            array.nbytes,
            lambda a=answer: write_inference(a, FACTS, wanted),
            lambda a=answer: save({"output": a.output}),
        )


def codec_figures() -> None:
    print(f"{'codec':<34}{'bytes':>12}{'ours MB/s':>12}{'bare MB/s':>12}{'ours µs':>10}{'ratio':>8}")
    for row in (*json_rows(), *base64_rows(), *binary_rows()):
        ours_s, bare_s = medians_s(row)
        speeds = f"{row.num_bytes / ours_s / 1e6:>12.0f}{row.num_bytes / bare_s / 1e6:>12.0f}"
        print(f"{row.name:<34}{row.num_bytes:>12,}{speeds}{ours_s * 1e6:>10.0f}{ours_s / bare_s:>8.2f}")


def large_bodies() -> Iterator[tuple[str, bytes]]:
    def filled(element: bytes) -> bytes:
        return b'{"query":[' + element * (LARGE_BYTES // len(element) - 8) + b"0]}"

    values = floats(1400, 512)
    yield "nested lists", in_body(dumps(values))
    data = pybase64.b64encode(np.resize(values, (6, 512, 1000)).tobytes())
    head = b'{"query":{"dtype":"float32","shape":[6,512,1000],"data":"'
    yield "base64", head + data + b'"}}'
    yield "base64 with escaped slashes", head + data.replace(b"/", b"\\/") + b'"}}'
    yield "zeros (refused)", filled(b"0,")
    yield "integers beyond 64 bits", b'{"query":[' + b"1234567890123456789012345," * 600_000 + b"0]}"
    yield "objects (refused)", filled(b"{},")
    yield "brackets (refused)", b'{"query":' + b"[" * LARGE_BYTES
    yield "keys (refused)", b"{" + b'"a":0,' * (LARGE_BYTES // 6) + b"}"


async def longest_stop_s(body: bytes) -> tuple[float, float]:
    """Seconds that a body takes in all, and the longest time without a tick of the loop."""
    parser = JsonParser(MAX_DEPTH, MAX_TEXT_NUMBERS)
    longest, last, is_over = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal longest, last
        while not is_over:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    with contextlib.suppress(ServiceError):
        await parser.parse(body)  # starts the process
    last = start = time.perf_counter()
    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    with contextlib.suppress(ServiceError):
        await parser.parse(body)
    total, is_over = time.perf_counter() - start, True
    await watcher
    parser.close()
    return total, longest


def large_figures() -> None:
    print(f"\n{'16 MiB in the helper process, ms':<34}{'total':>12}{'longest stop':>14}")
    for name, body in large_bodies():
        runs = [uvloop.run(longest_stop_s(body)) for _ in range(3)]
        total, longest = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:<34}{total * 1e3:>12.2f}{longest * 1e3:>14.2f}")


if __name__ == "__main__":
    gc.freeze()  # as the service does at start-up
    torch.set_num_threads(1)
    codec_figures()
    large_figures()
