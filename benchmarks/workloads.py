"""Workloads: the layer, the requests and the answers that are right, the same for every subject.

Laws: all is drawn from seeds; the answer that counts is computed in float64, so nobody's own arithmetic is the judge.
A form says how a request is written and what it asks for: `binary`, `weights` (binary, with the weights of every head),
`lists` (JSON, numbers as text).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from benchmarks.packed import PackedLayer
from examples.make_demo_layer import WIDTH, demo_tensors

Form = Literal["binary", "weights", "lists"]
Array = npt.NDArray[np.float32]

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_REQUESTS = 64
# How far an answer in float32 may be off.
TOLERANCE = 1e-4
# The bound runs as many sequences at once as callers wait.
BATCH = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests of these lengths, one sequence each, sent over and over in this order."""

    name: str
    lengths: tuple[int, ...]
    form: Form = "binary"

    @property
    def tokens_a_request(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def inputs(self) -> list[Array]:
        generator = np.random.default_rng(0)
        return [generator.standard_normal((length, WIDTH), np.float32) for length in self.lengths]


def _mixed() -> tuple[int, ...]:
    chosen = random.Random(0)
    return tuple(chosen.choice(LENGTHS) for _ in range(NUM_REQUESTS))


W1 = Workload("w1", _mixed())
W2 = Workload("w2", (16,) * NUM_REQUESTS)
W3 = Workload("w3", W1.lengths, "weights")
W2_LISTS = Workload("w2json", W2.lengths, "lists")
NAMED = {work.name: work for work in (W1, W2, W3, W2_LISTS)}


def of_length(length: int) -> Workload:
    """Requests of one length; fewer where they are long, so that all of them take at most 32 MiB."""
    num = max(2, min(NUM_REQUESTS, 2**25 // (length * WIDTH * 4)))
    return Workload(f"l{length}", (length,) * num)


def save_layer(path: Path) -> None:
    """As `torch.nn.MultiheadAttention` would save it."""
    save_file(demo_tensors(), path)


@functools.cache
def _exact_layer() -> PackedLayer:
    return PackedLayer({name: torch.from_numpy(array).double() for name, array in demo_tensors().items()})


@functools.lru_cache(maxsize=8)
def right_answers(work: Workload) -> list[npt.NDArray[np.float64]]:
    """Of each request: the output, and behind it the weights where they are asked for, as one row of numbers."""
    queries = [torch.from_numpy(x).double() for x in work.inputs()]
    if work.form == "weights":
        pairs = (_exact_layer().outputs_and_weights([query])[0] for query in queries)
        return [np.concatenate([part.numpy().ravel() for part in pair]) for pair in pairs]
    return [_exact_layer().outputs([query])[0].numpy().ravel() for query in queries]
