"""Engine: the one compute thread, and the layers that live on it.

Laws: one thread for everything that computes; results do not depend on mates (P1) nor on whether weights were asked for
(P2); a layer serves only after a self-check with real forward passes; running out of memory is an answer, not a death.
Knows tensors; no asyncio, no HTTP: a caller gets a concurrent future.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from service.attention.call import Answer, Call
from service.attention.layer import Layer
from service.attention.self_check import keeps_bits
from service.attention.spec import LayerSpec
from service.errors import CostLimit, EngineDown, LayerNotFound

# What torch's allocators say, where they raise a plain RuntimeError: Linux, Windows, CUDA libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """Where and how to compute. `exact`: on a GPU, one sequence at a time, so that bits do not depend on the batch."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int = 1
    exact: bool = False


class LoadReport(NamedTuple):
    """What the self-check found: whether calls share a forward pass or run one sequence at a time, and how long it took."""

    is_sequential: bool
    seconds: float


class _Resident(NamedTuple):
    """A layer as it was stored; the variants in other dtypes are made from it."""

    spec: LayerSpec
    tensors: Mapping[str, torch.Tensor]


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one; raises EngineDown where `cuda` is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise EngineDown('device "cuda" was asked for and this machine has none that torch can use')
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


class Engine:
    """`load` layers, then `run` batches of calls to one layer; both answer with a future that the one thread fulfils."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._enter)
        self._residents: dict[str, _Resident] = {}
        self._layers: dict[tuple[str, torch.dtype], Layer] = {}
        # Written by the compute thread alone; readers on other threads see a slightly old value.
        self.busy_seconds = 0.0
        self._replaced_filler_rows = 0

    def load(self, name: str, spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> Future[LoadReport]:
        """Puts a layer on the device and checks it; from then on `run` serves it, instead of any earlier one of that name."""
        return self._submit(self._load, name, spec, tensors)

    def run(self, batch: Sequence[Call]) -> Future[Sequence[Answer]]:
        """One forward pass for calls to the same layer in the same dtype; answers in order.

        The future fails with CostLimit where memory ran out, with EngineDown where the engine is closed.
        """
        return self._submit(self._run, batch)

    def close(self) -> None:
        """Lets the running batch finish and ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def filler_rows(self) -> int:
        """Rows computed so far that stand for no position (see `ragged.py`)."""
        return self._replaced_filler_rows + sum(layer.filler_rows for layer in list(self._layers.values()))

    @property
    def device_bytes(self) -> int:
        """Memory that torch holds on the device; on a CPU the layers' tensors (torch keeps no account there)."""
        if self.options.device.type != "cpu":
            return torch.cuda.memory_reserved(self.options.device)
        return sum(layer.num_bytes for layer in list(self._layers.values()))

    def _submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        try:
            return self._thread.submit(work, *args, **kwargs)
        except RuntimeError as error:  # the pool is shut down
            raise EngineDown("the engine is closed") from error

    def _enter(self) -> None:
        torch.set_num_threads(self.options.num_threads)
        # TF32 rounds inputs to 10 bits of mantissa: never here.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    @torch.inference_mode()
    def _load(self, name: str, spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> LoadReport:
        started = time.perf_counter()
        resident = _Resident(spec, tensors)
        layer = self._checked(resident, self.options.dtype)
        for key in [key for key in self._layers if key[0] == name]:
            self._replaced_filler_rows += self._layers.pop(key).filler_rows
        self._residents[name] = resident
        self._layers[name, self.options.dtype] = layer
        return LoadReport(layer.is_sequential, time.perf_counter() - started)

    @torch.inference_mode()
    def _run(self, batch: Sequence[Call]) -> Sequence[Answer]:
        started = time.perf_counter()
        dtype = torch.float64 if batch[0].is_float64 else self.options.dtype
        try:
            return self._layer(batch[0].layer, dtype).forward(batch)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
        finally:
            self.busy_seconds += time.perf_counter() - started
        # Outside the handler: the exception would keep the batch's tensors alive.
        raise CostLimit("the engine ran out of memory on this request; send fewer or shorter sequences")

    def _layer(self, name: str, dtype: torch.dtype) -> Layer:
        """The layer in `dtype`; made, warmed up and checked the first time it is asked for."""
        if found := self._layers.get((name, dtype)):
            return found
        if name not in self._residents:
            raise LayerNotFound("no layer of that name is loaded")
        layer = self._layers[name, dtype] = self._checked(self._residents[name], dtype)
        return layer

    def _checked(self, resident: _Resident, dtype: torch.dtype) -> Layer:
        layer = Layer(resident.spec, resident.tensors, dtype=dtype, device=self.options.device)
        is_gpu = self.options.device.type != "cpu"
        # On a GPU only a tolerance is promised by default, so only the exact mode runs apart there.
        is_bitwise = keeps_bits(layer)
        layer.is_sequential = self.options.exact if is_gpu else not is_bitwise
        return layer


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in _OUT_OF_MEMORY)
