"""Workloads: the layer, the requests and their correct answers, the same for every subject.

Invariants: everything is drawn from seeds; correct answers are computed in float64. A form says how a request is written and
what it asks for: `binary`, `weights` (binary, with the weights of every head), `lists` (JSON, numbers as text), `three` (binary,
the same rows as query, key and value) or `sdpa` (the same bytes for attention without a layer).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from benchmarks.packed import HEADS, PackedLayer
from examples.make_demo_layer import WIDTH, demo_tensors

Form = Literal["binary", "weights", "lists", "three", "sdpa"]
Array = npt.NDArray[np.float32]

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_REQUESTS = 64
# Largest error of an answer in float32.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one sequence each, with these lengths, sent over and over in this order."""

    name: str
    lengths: tuple[int, ...]
    form: Form = "binary"

    @property
    def tokens_a_request(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def inputs(self) -> list[Array]:
        generator = np.random.default_rng(0)
        return [generator.standard_normal((length, WIDTH), np.float32) for length in self.lengths]


_RANDOM = random.Random(0)
W1 = Workload("w1", tuple(_RANDOM.choice(LENGTHS) for _ in range(NUM_REQUESTS)))
W2 = Workload("w2", (16,) * NUM_REQUESTS)
W3 = Workload("w3", W1.lengths, "weights")
W2_LISTS = Workload("w2json", W2.lengths, "lists")
W2_THREE, W2_SDPA = Workload("w2three", W2.lengths, "three"), Workload("w2sdpa", W2.lengths, "sdpa")


def of_length(length: int) -> Workload:
    """Return requests of one length; fewer if they are long, so that all of them take at most 32 MiB."""
    num = max(2, min(NUM_REQUESTS, 2**25 // (length * WIDTH * 4)))
    return Workload(f"l{length}", (length,) * num)


@functools.lru_cache(maxsize=8)
def correct_answers(work: Workload) -> list[npt.NDArray[np.float64]]:
    """Return the flat numbers of each answer: the output, then the weights if the form asks for them."""
    queries = [torch.from_numpy(x).double() for x in work.inputs()]
    if work.form == "sdpa":
        heads = [query.view(1, len(query), HEADS, -1).transpose(1, 2) for query in queries]
        return [F.scaled_dot_product_attention(x, x, x).transpose(1, 2).numpy().ravel() for x in heads]
    layer = PackedLayer({name: torch.from_numpy(array).double() for name, array in demo_tensors().items()})
    return [flat(layer.forward([query], with_weights=work.form == "weights")[0]) for query in queries]


def flat(tensors: tuple[torch.Tensor, ...]) -> npt.NDArray[np.float64]:
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors])
