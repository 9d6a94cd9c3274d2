"""python -m benchmarks.codecs: MB/s of our codecs beside the bare libraries, both ways.

Ours and theirs alternate, so that a noisy machine is noisy for both; figures are medians. MB are of the text or body.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import orjson
import pybase64
import simdjson
import torch
from safetensors.torch import load, save

from service.attention.spec import LayerSpec
from service.batching.job import BatchInfo
from service.wire.answer import AnswerFacts, write_tensor
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.inference_codec import WantedAnswer, read_inference, split_inference, write_inference
from service.wire.json_document import MAX_TEXT_NUMBERS, parse
from service.wire.safetensors_codec import RequestTemplates, write_safetensors
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import TensorForm, decode_tensor

MAX_DEPTH = 32
RNG = np.random.default_rng(0)
SPEC = LayerSpec(
    query_width=512, key_width=512, value_width=512, out_width=512, num_heads=8, num_kv_heads=8, head_width=64,
    value_head_width=64, scale=0.125, biases=("query", "key", "value", "output"),
)  # fmt: skip
LIMITS = RequestLimits(*(2**62,) * 5)
TEMPLATES = RequestTemplates(LIMITS, MAX_DEPTH, MAX_TEXT_NUMBERS)
FACTS = AnswerFacts(0, "layer", "sha256:" + "0" * 64, BatchInfo(1, 1, 16), lambda: {"total": 1.5})
WANTED = WantedAnswer(None, {"output": True})


class Row(NamedTuple):
    """One codec in one direction: what it does, to how many bytes, by us and by the bare library."""

    name: str
    num_bytes: int
    ours: Callable[[], object]
    bare: Callable[[], object]


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def dumps(array: np.ndarray) -> bytes:
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(body: bytes) -> torch.Tensor:
    return decode_tensor(parse(body, max_depth=MAX_DEPTH)["query"], TensorField("/query", TensorKind.FLOAT))


def write(tensor: torch.Tensor, form: TensorForm) -> bytes:
    return b"".join(write_tensor(tensor, form))


def parse_floats(body: bytes) -> np.ndarray:
    return np.frombuffer(simdjson.Parser().parse(body)["query"].as_buffer(of_type="d"))


def text_rows() -> Iterator[Row]:
    lists = {f"nested lists, {rows} x 512": floats(rows, 512) for rows in (16, 64, 2048)}
    for name, value in {**lists, "flat list, 17 digits": RNG.standard_normal(32_768)}.items():
        body = b'{"query":' + dumps(value) + b"}"
        yield Row(f"read {name}", len(body), partial(decode, body), partial(parse_floats, body))
        ours = partial(write, torch.from_numpy(value), TensorForm.NESTED)
        yield Row(f"write {name}", len(body), ours, partial(dumps, value))
    for rows in (16, 64, 512, 4096):
        data = (values := floats(rows, 512)).tobytes()
        text = pybase64.b64encode(data)
        body = b'{"query":{"dtype":"float32","shape":[%d,512],"data":"%s"}}' % (rows, text)
        bare = partial(pybase64.b64decode, text.decode(), validate=True)
        yield Row(f"read base64, {rows} x 512", len(body), partial(decode, body), bare)
        ours = partial(write, torch.from_numpy(values), TensorForm.BASE64)
        yield Row(f"write base64, {rows} x 512", len(text), ours, partial(pybase64.b64encode, data))


def read_safetensors(body: bytes) -> CheckedRequest:
    """Return what a body gives whose header is known: joined, parsed, checked, costed."""
    return TEMPLATES.read(bytearray().join([body]), "layer", "digest", SPEC)


def read_binary_inference(body: bytes, json_length: bytes) -> CheckedRequest:
    text, rest = split_inference(bytearray().join([body]), json_length)
    found = read_inference(parse(text, max_depth=MAX_DEPTH), rest)
    return check_request(found.document, "layer", SPEC, LIMITS, found.mask_params)


def inference_body(array: np.ndarray) -> tuple[bytes, bytes]:
    query = {"name": "query", "datatype": "FP32", "shape": [1, *array.shape]}
    fields = {"inputs": [{**query, "parameters": {"binary_data_size": array.nbytes}}]}
    head = orjson.dumps({**fields, "parameters": {"binary_data_output": True}})
    return head + array.tobytes(), str(len(head)).encode()


def binary_rows() -> Iterator[Row]:
    """Ours from bytes to a checked request with its cost, and from an answer to its parts; the bare library copies both ways."""
    for rows in (16, 2048):
        array = floats(rows, 512)
        body, answer = save({"query": torch.from_numpy(array)}), {"output": torch.from_numpy(array)}
        inference, name = inference_body(array), f"{rows} x 512"
        bare_read, bare_write = partial(load, body), partial(save, answer)
        yield Row(f"read safetensors, {name}", len(body), partial(read_safetensors, body), bare_read)
        ours = partial(write_safetensors, answer, FACTS)
        yield Row(f"write safetensors, {name}", array.nbytes, ours, bare_write)
        yield Row(f"read inference, {name}", len(inference[0]), partial(read_binary_inference, *inference), bare_read)
        yield Row(f"write inference, {name}", array.nbytes, partial(write_inference, answer, FACTS, WANTED), bare_write)


def medians_s(row: Row) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(101 if row.num_bytes < 2**20 else 9):
        for work, taken in zip((row.ours, row.bare), times, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    gc.freeze()  # as the service does at start-up
    torch.set_num_threads(1)
    print(f"{'codec':<34}{'bytes':>12}{'ours MB/s':>12}{'bare MB/s':>12}{'ours µs':>10}{'ratio':>8}")
    for row in (*text_rows(), *binary_rows()):
        ours_s, bare_s = medians_s(row)
        speeds = f"{row.num_bytes / ours_s / 1e6:>12.0f}{row.num_bytes / bare_s / 1e6:>12.0f}"
        print(f"{row.name:<34}{row.num_bytes:>12,}{speeds}{ours_s * 1e6:>10.0f}{ours_s / bare_s:>8.2f}")
