"""Engine: the compute thread, and the layers that live on it.

Laws: one thread computes at a time, the engine's own or, for a brief batch while that has nothing to do, its caller's; a long
batch stops after each step (`preemption.py`), and while it is stopped a second thread of the engine's computes what comes;
results do not depend on mates (P1) nor on whether weights were asked for (P2); a layer serves only after a self-check with
real forward passes, and batches go between the steps of a load; running out of memory is an answer, not a death; a device
that has failed answers nothing any more (EngineDown).
Knows tensors; no asyncio, no HTTP: a caller gets a concurrent future.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from service.attention.call import Answer
from service.attention.heap import trim
from service.attention.layer import Layer
from service.attention.loaded_layer import LoadedLayer, Work
from service.attention.preemption import Steps, stopped_s
from service.attention.self_check import checks, keeps_bits
from service.attention.spec import LayerSpec
from service.errors import CostLimit, EngineDown

# What torch's allocators say, where they raise a plain RuntimeError: Linux, Windows, CUDA libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
# What a device says whose context is lost (an illegal address, a device-side assert, "uncorrectable ECC error"): every later
# call of this process fails as well. torch says it as AcceleratorError, libraries below it as a plain RuntimeError.
_DEVICE_FAILED = ("cuda error", "cublas_status", "cudnn_status", "device-side assert")
_CLOSED = "the engine is closed"

P = ParamSpec("P")
R = TypeVar("R")
# What a step of a batch comes to: the answers, or the batch itself, which has stopped.
Step = Sequence[Answer] | Steps[Sequence[Answer]]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """Where and how to compute. `exact`: on a GPU, one sequence at a time, so that bits do not depend on the batch; on a CPU a
    batch stops after each `step_s`, so that others can compute.
    """

    device: torch.device
    dtype: torch.dtype
    num_threads: int = 1
    exact: bool = False
    step_s: float = math.inf


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one; raises EngineDown where `cuda` is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise EngineDown('device "cuda" was asked for and this machine has none that torch can use')
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


class Engine:
    """`load` layers, then `run` batches of calls to one layer; both answer with a future, which the thread fulfils if it is not
    done.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._enter)
        self._second = ThreadPoolExecutor(1, thread_name_prefix="compute-beside", initializer=self._enter)
        self._threads: list[threading.Thread] = []  # those that have started
        self._steps: weakref.WeakSet[Steps[Sequence[Answer]]] = weakref.WeakSet()  # of batches handed over
        self._is_stopped = False  # whether a long batch waits for its next step
        self._turn = threading.Lock()  # held by whoever computes
        self._is_closed = False
        self._residents: weakref.WeakSet[LoadedLayer] = weakref.WeakSet()  # changed by the callers' thread alone
        # Written by whoever computes; readers on other threads see a slightly old value.
        self.busy_seconds = 0.0
        self.filler_rows = 0
        """Rows computed so far that stand for no position (see `ragged.py`)."""

    def load(self, spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> Future[LoadedLayer]:
        """Puts a layer on the device and checks it, step by step; batches that come meanwhile go between the steps."""
        if self._is_closed:
            raise EngineDown(_CLOSED)
        resident, done = LoadedLayer(spec, tensors), Future[LoadedLayer]()
        self._second.submit(int)  # so that its thread is there before it is needed
        self._residents.add(resident)
        self._go_on(resident, self._load_steps(resident), done)
        return done

    def run(self, batch: Sequence[Work], *, is_inline: bool = False) -> Future[Step]:
        """One forward pass for calls to the same layer in the same dtype; answers in order, or a batch that has stopped.

        A brief one may be done when this returns: waking the thread, and being woken by it, may take as long as it. While one
        batch is stopped others are to be run to their end. The future fails with CostLimit where memory ran out, with
        EngineDown where the engine is closed or its device failed.
        """
        done: Future[Step] = Future()
        if is_inline and self._can_run_here(batch) and self._turn.acquire(blocking=False):
            answers = self._run_here(batch)
            if answers is not None:
                done.set_result(answers)
                return done
        return self._run_in_steps(batch)

    def _run_in_steps(self, batch: Sequence[Work]) -> Future[Step]:
        """On a thread; one that comes while another is stopped runs to its end."""
        step_s = math.inf if self._is_stopped else self.options.step_s
        steps: Steps[Sequence[Answer]] = Steps(self._turn, step_s, self._stops)
        self._steps.add(steps)

        def close(handed: Future[None]) -> None:
            if handed.cancelled():
                steps.first.cancel()

        self._submit(steps.run, partial(self._run, batch)).add_done_callback(close)
        return steps.first

    def _stops(self, is_stopped: bool) -> None:
        self._is_stopped = is_stopped

    def close(self, timeout_s: float | None = None) -> bool:
        """Lets the running batch finish, drops what waits, ends the threads; False where that outlasts `timeout_s`."""
        self._is_closed = True
        for steps in list(self._steps):
            steps.finish()
        for pool in (self._thread, self._second):
            pool.shutdown(wait=timeout_s is None, cancel_futures=True)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def device_bytes(self) -> int:
        """Memory that torch holds on the device; on a CPU the layers' matrices (torch keeps no account there)."""
        if self.options.device.type != "cpu":
            return torch.cuda.memory_reserved(self.options.device)
        return sum(resident.num_bytes for resident in list(self._residents))

    def release(self) -> Future[None]:
        """Gives memory that no layer needs any more back to the device or, on a CPU, to the system."""
        return self._submit(self._in_turn, self._release)

    def _submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        try:
            return (self._second if self._is_stopped else self._thread).submit(work, *args, **kwargs)
        except RuntimeError as error:  # the pool is shut down
            raise EngineDown(_CLOSED) from error

    def _in_turn(self, work: Callable[[], R]) -> R:
        with self._turn:
            return work()

    def _run_here(self, batch: Sequence[Work]) -> Sequence[Answer] | None:
        """None where it failed: the thread tries again and tells why.

        Raised here the error would hold its callers' frames, so their jobs, so itself: the tensors would stay until some later
        collection, just when memory is short; and what is no Exception would end the loop instead of a batch.
        """
        try:
            return self._run(batch)
        except BaseException:  # noqa: BLE001 (see above)
            return None
        finally:
            self._turn.release()

    def _can_run_here(self, batch: Sequence[Work]) -> bool:
        """Not on a device, whose work nobody need wait for, nor where torch has several threads, for each of ours would have
        as many; a layer in a dtype that it has not been asked for is made first.
        """
        num_threads = max(self.options.num_threads, torch.get_num_threads())
        if self._is_closed or self.options.device.type != "cpu" or num_threads > 1:
            return False
        return self._dtype(batch) in batch[0].resident.variants

    def _enter(self) -> None:
        self._threads.append(threading.current_thread())
        torch.set_num_threads(self.options.num_threads)
        # TF32 rounds inputs to 10 bits of mantissa: never here.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def _go_on(self, resident: LoadedLayer, steps: Iterator[None], done: Future[LoadedLayer]) -> None:
        def told(step: Future[None]) -> None:
            if step.cancelled():
                done.set_exception(EngineDown("the engine was closed"))

        self._submit(self._in_turn, partial(self._step, resident, steps, done)).add_done_callback(told)

    @torch.inference_mode()
    def _step(self, resident: LoadedLayer, steps: Iterator[None], done: Future[LoadedLayer]) -> None:
        """One step of a load; the next one queues up behind the batch that has come meanwhile."""
        if done.cancelled():  # nobody wants the layer any more
            return
        started = time.perf_counter()
        try:
            next(steps)
            resident.seconds += time.perf_counter() - started
            self._go_on(resident, steps, done)
        except StopIteration:
            done.set_result(resident)
        except BaseException as error:  # noqa: BLE001 (whoever waits for the layer hears why it does not come)
            done.set_exception(error)

    def _load_steps(self, resident: LoadedLayer) -> Iterator[None]:
        layer, is_bitwise = self._variant(resident, self.options.dtype), True
        for kept in checks(layer):
            is_bitwise = is_bitwise and kept
            yield
        self._take(resident, layer, is_bitwise=is_bitwise)
        resident.is_sequential = layer.is_sequential

    def _variant(self, resident: LoadedLayer, dtype: torch.dtype) -> Layer:
        return Layer(resident.spec, resident.tensors, dtype=dtype, device=self.options.device)

    def _take(self, resident: LoadedLayer, layer: Layer, *, is_bitwise: bool) -> Layer:
        """A variant that has been checked is served from now on."""
        is_gpu = self.options.device.type != "cpu"
        # On a GPU only a tolerance is promised by default, so only the exact mode runs apart there.
        layer.is_sequential = self.options.exact if is_gpu else not is_bitwise
        self.filler_rows += layer.filler_rows
        resident.variants[layer.dtype] = layer
        return layer

    @torch.inference_mode()
    def _run(self, batch: Sequence[Work]) -> Sequence[Answer]:
        started = time.perf_counter()
        try:
            return self._forward(batch)
        except (MemoryError, RuntimeError) as error:
            is_memory = _is_out_of_memory(error)
            if not is_memory and not _has_device_failed(error):
                raise
        finally:
            self.busy_seconds += time.perf_counter() - started - stopped_s()
        # Outside the handler: the exception would keep the batch's tensors alive.
        if not is_memory:
            raise EngineDown("the device has failed; nothing can be computed until this process is replaced")
        self._release()
        raise CostLimit("the engine ran out of memory on this request; send fewer or shorter sequences")

    def _forward(self, batch: Sequence[Work]) -> Sequence[Answer]:
        layer = self._layer(batch[0].resident, self._dtype(batch))
        filled = layer.filler_rows
        try:
            answers = layer.forward([work.call for work in batch])
        finally:
            self.filler_rows += layer.filler_rows - filled
        rows = [answer.output.shape[:2] for answer in answers]
        if rows != [work.call.query.shape[:2] for work in batch]:
            raise RuntimeError("the layer's answers are not those of the calls. This is a bug.")
        return answers

    def _dtype(self, batch: Sequence[Work]) -> torch.dtype:
        return torch.float64 if batch[0].call.is_float64 else self.options.dtype

    def _layer(self, resident: LoadedLayer, dtype: torch.dtype) -> Layer:
        """The layer in `dtype`; made, warmed up and checked the first time it is asked for."""
        if found := resident.variants.get(dtype):
            return found
        layer = self._variant(resident, dtype)
        return self._take(resident, layer, is_bitwise=keeps_bits(layer))

    def _release(self) -> None:
        if self.options.device.type != "cpu":
            torch.cuda.empty_cache()
        else:
            # 48 MB of a 1,024 wide layer that had been replaced twice.
            trim()


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def _has_device_failed(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.AcceleratorError) or any(words in text for words in _DEVICE_FAILED)
