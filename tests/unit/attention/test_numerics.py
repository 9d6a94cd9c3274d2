"""The numerics fingerprint says what the bits of an answer depend on."""

from __future__ import annotations

import dataclasses

import torch

from service.attention.engine import EngineOptions, fingerprint
from tests.engine_room import CPU, DTYPES


def test_a_fingerprint_names_instruction_set_torch_threads_and_dtype():
    found = fingerprint(EngineOptions(CPU, torch.float32, 2))
    assert found.isa == torch.backends.cpu.get_cpu_capability()
    assert found.torch == torch.__version__
    assert (found.threads, found.dtype, found.device) == (2, "float32", "cpu")


def test_fingerprints_differ_where_bits_may():
    found = {fingerprint(EngineOptions(CPU, dtype, threads)) for dtype in DTYPES for threads in (1, 2)}
    assert len(found) == 8


def test_a_fingerprint_is_plain_words_and_numbers():
    assert all(
        type(value) in (str, int) for value in dataclasses.astuple(fingerprint(EngineOptions(CPU, torch.bfloat16, 1)))
    )
