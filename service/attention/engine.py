"""Engine: loads layers and runs batches of calls on two compute threads; callers get concurrent futures.

Invariants: On a CPU one thread computes long batches, loads and the first batch in a dtype; the other computes short batches. The
caller's thread may compute an inline batch while the short batches' thread is idle: these two share a lock. A GPU has one thread.
The operating system shares the cores between the threads. Results depend neither on other calls of the batch or on the other
thread (P1) nor on whether weights are requested (P2). A layer serves only after a self-check with real forward passes. The steps
of loads and long batches take turns. Out of memory fails the batch, not the process. After the device has failed, every batch
fails with EngineDown. No table keeps loaded layers alive: when the last catalog or request that holds one goes, its memory is
free. Only the thread of long batches changes a loaded layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from service.attention.call import Answer
from service.attention.heap import trim
from service.attention.progress import Progress, current
from service.attention.projection import instruction_set
from service.attention.self_check import Variant, first_rate, settle
from service.errors import CostLimit, EngineDown

# Messages of torch's allocators where they raise a plain RuntimeError: Linux, Windows, CUDA, cuBLAS and cuDNN (`…_ALLOC_FAILED`).
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "_status_alloc_failed")
# Messages after which a device's context is lost (an illegal address, a device-side assert, "uncorrectable ECC error"): every
# later call of this process fails as well. torch raises AcceleratorError, libraries below it a plain RuntimeError.
_DEVICE_FAILED = ("cuda error", "cublas_status", "cudnn_status", "device-side assert")
# What begins alike and loses nothing: a call that the device does not take, or a torch that was not built for this GPU.
_CALL_FAILED = ("_status_not_supported", "invalid configuration argument", "no kernel image")
# How long a load computes in its turn: with a step a turn it would take a minute beside a stream of batches of a second.
LOAD_S = 0.1
_CLOSED = "the engine is closed"
_DOWN = "the device failed; this process computes nothing until it is replaced"

R = TypeVar("R")
Answers = Sequence[Answer]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    device: torch.device
    dtype: torch.dtype
    num_threads: int = 1
    exact: bool = False
    """Whether a GPU takes one sequence at a time where the self-check finds that bits depend on the batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """What an answer's bits depend on besides the layer and the request; equal bits are promised on one fingerprint only (P1).

    `isa` is the widest instruction set that products use here, or the GPU's name.
    """

    isa: str
    torch: str
    threads: int
    dtype: str
    device: str


def fingerprint(options: EngineOptions) -> Fingerprint:
    device, dtype = options.device, str(options.dtype).removeprefix("torch.")
    isa = instruction_set() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return Fingerprint(isa, str(torch.__version__), options.num_threads, dtype, device.type)


def set_gpu_numerics() -> None:
    """Turn off what makes CUDA's products and attention less exact, or slow for each new shape; for the whole process."""
    # TF32 rounds inputs to 10 bits of mantissa; reduced precision adds partial sums in 16 bits.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # torch 2.11 and newer send masked attention in 16 bits to cuDNN on Hopper. It builds a plan for each shape (reported: 0.4 s
    # each, pytorch#196678), and here most requests are new shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)


def pick_device(name: str) -> torch.device:
    """Return the device; `auto` is the GPU if there is one. Raise EngineDown if `cuda` is requested and there is none."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise EngineDown('device "cuda" was requested, but torch finds no CUDA device on this machine')
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


class Build(Protocol):
    """Makes a variant of one layer, of attention without a layer, or of a model: `partial(Layer, spec, tensors)`."""

    def __call__(self, *, dtype: torch.dtype, device: torch.device) -> Variant: ...


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedLayer:
    """A variant for each dtype requested so far, and what builds them; `dtype` computes every query that is not float64.

    Without `may_block` the loop never waits for it: no batch runs inline.
    """

    build: Build
    dtype: torch.dtype
    may_block: bool = True
    variants: dict[torch.dtype, Variant] = dataclasses.field(default_factory=dict)
    rates: dict[torch.dtype, float] = dataclasses.field(default_factory=dict)
    """Flops per second of the last pass of each variant's self-check."""
    seconds: float = 0.0
    """The compute thread's time to load it, self-check included."""

    @property
    def is_sequential(self) -> bool:
        """Whether calls in its first dtype cannot share a forward pass (by the self-check, or in a GPU's exact mode)."""
        return next(iter(self.variants.values())).is_sequential

    @property
    def least_rows(self) -> int:
        """Of any product in its first dtype, by the self-check; 1 without products."""
        return next(iter(self.variants.values())).least_rows


class QueryCall(Protocol):
    """A call of any kind: its answer has the sequences and rows of its query [B, L, …] or [B, N, …]."""

    @property
    def query(self) -> torch.Tensor: ...


class LayerCall(NamedTuple):
    loaded: LoadedLayer
    call: QueryCall

    @property
    def is_float64(self) -> bool:
        """Whether the query is float64: then the call is computed in float64."""
        return self.call.query.dtype == torch.float64

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_float64 else self.loaded.dtype


class Running(NamedTuple):
    """A batch on its thread."""

    future: Future[Answers]
    progress: Progress


class Engine:
    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._threads: list[threading.Thread] = []  # threads that have started
        self._short = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._enter_thread)
        self._long = self._short
        if options.device.type == "cpu":
            self._long = ThreadPoolExecutor(1, thread_name_prefix="compute-long", initializer=self._enter_thread)
        self._lock = threading.Lock()  # held while a short or an inline batch is computed
        self._batches: weakref.WeakSet[Future[Answers]] = weakref.WeakSet()
        self._is_closed = False
        self._loaded: weakref.WeakSet[LoadedLayer] = weakref.WeakSet()  # changed on the callers' thread only
        # A thread's processor time, so that a rate does not depend on what else computes. A GPU computes beside the thread.
        self._clock = time.thread_time if options.device.type == "cpu" else time.perf_counter
        self.load_step_began: float | None = None
        """By time.perf_counter, while a step of a load runs; written by the thread of long batches."""

    def load(self, build: Build, *, dtype: torch.dtype | None = None, may_block: bool = True) -> Future[LoadedLayer]:
        """Put a layer on the device and check it step by step; long batches that arrive meanwhile run between the steps.

        It computes in `dtype`, by default the service's. The future fails with EngineDown if the device has failed or the engine
        is closed meanwhile, and with the error of `build` or of torch otherwise. Raises EngineDown if the engine is closed.
        """
        if self._is_closed:
            raise EngineDown(_CLOSED)
        loaded, done = LoadedLayer(build, dtype or self.options.dtype, may_block), Future[LoadedLayer]()
        self._short.submit(int)  # starts its thread before it is needed
        self._loaded.add(loaded)
        self._submit(self._long, partial(self._step, loaded, self._variant_steps(loaded, loaded.dtype), done))
        return done

    def run(self, batch: Sequence[LayerCall], *, is_inline: bool = False, is_long: bool = False) -> Running:
        """Run one forward pass for calls to the same layer in the same dtype; the future gives the answers in order.

        With `is_inline` the caller's thread may compute the batch before `run` returns: waking the engine's thread and then the
        caller can take as long as a small batch. A long batch computes beside the others, and so does the first batch in a dtype,
        because it builds the layer's variant. The future fails with CostLimit if memory runs out, with Stopped if the batch was
        stopped, and with EngineDown if the device has failed. Raises EngineDown if the engine is closed.
        """
        progress = Progress()
        if is_inline and batch[0].loaded.may_block and (done := self._run_inline(batch, progress)) is not None:
            return Running(done, progress)
        is_long = is_long or not self.rate(batch[0])
        future = self._submit(self._long if is_long else self._short, partial(self._compute, batch, progress, is_long))
        self._batches.add(future)
        return Running(future, progress)

    def rate(self, call: LayerCall) -> float:
        """Return the flops per second of the self-check in the dtype of this call; 0 if nothing was computed in it so far."""
        return call.loaded.rates.get(call.dtype, 0.0)

    def close(self, timeout_s: float | None = None) -> bool:
        """Let running batches finish, drop waiting ones and end the threads; return whether both ended in `timeout_s`."""
        self._is_closed = True
        for future in list(self._batches):
            future.cancel()
        for pool in (self._short, self._long):
            pool.shutdown(wait=timeout_s is None)
        until = time.monotonic() + (timeout_s or 0.0)
        for thread in self._threads:
            thread.join(None if timeout_s is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def device_bytes(self) -> int:
        """Bytes that torch holds on the device; on a CPU those of the layers' matrices (torch keeps no account there)."""
        if self.options.device.type != "cpu":
            return int(torch.get_device_module(self.options.device).memory_reserved(self.options.device))
        return sum(layer.num_bytes for loaded in list(self._loaded) for layer in list(loaded.variants.values()))

    def release(self) -> Future[None]:
        """Return memory that no layer needs any more to the device or, on a CPU, to the system; never beside short batches."""
        return self._submit(self._short, self._release)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], R]) -> Future[R]:
        try:
            return pool.submit(work)
        except RuntimeError as error:  # the pool is shut down
            raise EngineDown(_CLOSED) from error

    def _compute(self, batch: Sequence[LayerCall], progress: Progress, is_long: bool) -> Answers:
        """Compute the batch on a thread of the engine."""
        if is_long and self._long is not self._short:
            with progress:
                return self._run(batch)
        with self._lock, progress:
            try:
                return self._run(batch)
            except CostLimit:
                self._release()
                raise

    def _run_inline(self, batch: Sequence[LayerCall], progress: Progress) -> Future[Answers] | None:
        """Compute the batch on the caller's thread; return None where the compute thread has to, also if it fails here.

        Not on a GPU, which computes beside the caller's thread. Not with several torch threads: torch would start as many again
        for the caller's. Not before the layer has a variant in the batch's dtype: building and checking one takes long.

        An error raised on this thread holds the frames of its callers, these hold the jobs, and a job holds its error. Such a
        cycle keeps the tensors until a garbage collection, just when memory is short. A BaseException would end the event loop.
        """
        num_threads = max(self.options.num_threads, torch.get_num_threads())
        if self._is_closed or self.options.device.type != "cpu" or num_threads > 1 or not self.rate(batch[0]):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        done: Future[Answers] = Future()
        try:
            with progress:
                done.set_result(self._run(batch))
        except BaseException:  # noqa: BLE001 (see above)
            return None
        finally:
            self._lock.release()
        return done

    def _enter_thread(self) -> None:
        self._threads.append(threading.current_thread())
        torch.set_num_threads(self.options.num_threads)
        set_gpu_numerics()

    @torch.inference_mode()
    def _step(self, loaded: LoadedLayer, steps: Iterator[None], done: Future[LoadedLayer]) -> None:
        """Run steps of a load for about LOAD_S and submit the rest, which queues behind long batches that arrived meanwhile.

        The caller may cancel `done` at any time, also during the last step.
        """
        until = time.perf_counter() + LOAD_S
        try:
            while True:
                if done.cancelled() or self._is_closed:
                    raise EngineDown(_CLOSED)  # noqa: TRY301
                self.load_step_began = before = time.perf_counter()
                next(steps)
                loaded.seconds += time.perf_counter() - before
                if time.perf_counter() >= until:
                    self._submit(self._long, partial(self._step, loaded, steps, done))
                    return
        except StopIteration:
            if done.set_running_or_notify_cancel():
                done.set_result(loaded)
        except BaseException as error:  # noqa: BLE001 (the future carries the failure to the caller)
            if done.set_running_or_notify_cancel():  # if cancelled, this ends a `concurrent.futures.wait` for it
                # Without the traceback, whose frames hold the layer and `done`, which holds the error.
                done.set_exception(EngineDown(_DOWN) if _has_device_failed(error) else error.with_traceback(None))
            with contextlib.suppress(EngineDown):  # the engine is closed
                self.release()  # by the time it runs, nothing holds the layer
        finally:
            self.load_step_began = None

    def _variant_steps(self, loaded: LoadedLayer, dtype: torch.dtype) -> Iterator[None]:
        """Build a layer in `dtype`, warm it up and check it, one forward pass a step; then calls use it.

        The first step also converts and packs the weights.
        """
        device = self.options.device
        layer = loaded.build(dtype=dtype, device=device)
        yield from settle(layer)
        if device.type != "cpu" and not self.options.exact:  # a GPU promises only a tolerance
            layer.is_sequential = False
        rate = first_rate(layer, self._clock)
        loaded.variants[dtype], loaded.rates[dtype] = layer, rate

    @torch.inference_mode()
    def _run(self, batch: Sequence[LayerCall]) -> Answers:
        try:
            return self._forward(batch)
        except (MemoryError, RuntimeError) as error:
            has_device_failed = _has_device_failed(error)
            if not has_device_failed and not _is_out_of_memory(error):
                raise
        # Raised outside the handler: the caught exception would keep the batch's tensors alive.
        if has_device_failed:
            raise EngineDown(_DOWN)
        raise CostLimit("the engine ran out of memory on this request; send fewer or shorter sequences")

    def _forward(self, batch: Sequence[LayerCall]) -> Answers:
        loaded, dtype = batch[0].loaded, batch[0].dtype
        if dtype not in loaded.rates:  # the first batch in this dtype; the next ones wait for it on this thread
            for _ in self._variant_steps(loaded, dtype):
                pass
        started, progress = self._clock(), current()
        try:
            answers = loaded.variants[dtype].forward([one.call for one in batch])  # each of the layer's own kind
        finally:
            if progress is not None:
                progress.seconds += self._clock() - started
        rows = [answer.output.shape[:2] for answer in answers]
        if rows != [one.call.query.shape[:2] for one in batch]:
            raise RuntimeError("the layer's answers do not match the calls. This is a bug.")
        return answers

    def _release(self) -> None:
        # On a CPU this frees 48 MB after a 1,024-wide layer has been replaced twice.
        trim() if self.options.device.type == "cpu" else torch.get_device_module(self.options.device).empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def _has_device_failed(error: BaseException) -> bool:
    """Return whether the device is lost. Memory that is short and a call that fails are a "CUDA error" too, and lose nothing."""
    text = str(error).lower()
    is_of_device = isinstance(error, torch.AcceleratorError) or any(words in text for words in _DEVICE_FAILED)
    return is_of_device and not any(words in text for words in _CALL_FAILED) and not _is_out_of_memory(error)
