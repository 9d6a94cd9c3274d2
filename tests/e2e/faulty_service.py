"""The real service with faults on demand and with the admin routes: `python faulty_service.py serve …`.

A request whose first number is one of the marks below does to the engine what the mark says. `FAULTY_LOAD_S` makes reading a
layer take that long, in a call that cannot be cancelled; `FAULTY_FORWARD_S` does so to every forward pass. With
`FAULTY_FLIP` one bit of the first answer is flipped wherever several requests share a forward pass. `FAULTY_PASSES` names a
file that gets a line for every forward pass as it begins: the process, the thread that computes it, and the marks of its
requests. With `FAULTY_INLINE=0` every batch goes to the compute thread, for tests of that thread.
"""

import asyncio
import dataclasses
import os
import sys
import threading
import time

STUCK, DEVICE, RAISES, SLOW = 1001.0, 1002.0, 1003.0, 1004.0
SLOW_S = 2.0
# Of `inline_s`: less than SLOW_S, and more than a busy machine keeps a process waiting.
FAR_TOO_LONG = 60
# Slow and then out of memory, where the loop waits for it.
STUMBLES = 1007.0
# Exceptions that elsewhere end a process, a task or a generator; raised by a batch, they fail that batch.
ENDS: dict[float, type[BaseException]] = {
    1011.0: KeyboardInterrupt,
    1012.0: SystemExit,
    1013.0: GeneratorExit,
    1014.0: StopIteration,
    1015.0: asyncio.CancelledError,
}


def replace(owner: object, name: str, value: object) -> None:
    getattr(owner, name)  # a fault that replaces nothing is an AttributeError
    setattr(owner, name, value)


def be_supervisor() -> None:
    from service.supervisor import supervisor

    exec_supervisor = supervisor.exec_supervisor

    def of_this_file(plan, environment):
        command = (sys.executable, __file__, *plan.command[3:])  # instead of `-m service`
        exec_supervisor(dataclasses.replace(plan, command=command), environment)

    replace(supervisor, "exec_supervisor", of_this_file)


def fail(marks: list[float]) -> None:
    """Fail or wait as the marks of a batch say, before it is computed."""
    if STUCK in marks:
        time.sleep(600)
    if DEVICE in marks:
        import torch

        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    if RAISES in marks:
        raise RuntimeError("a secret reason")
    for mark in ENDS.keys() & marks:
        raise ENDS[mark]("a secret reason")
    if SLOW in marks:
        time.sleep(SLOW_S)
    if STUMBLES in marks and threading.current_thread() is threading.main_thread():
        time.sleep(SLOW_S)
        raise MemoryError
    time.sleep(float(os.environ.get("FAULTY_FORWARD_S", "0")))


def first(tensor):
    """The first element as a view, whatever the axes are."""
    return tensor[(0,) * tensor.dim()]


def be_worker() -> None:
    import torch

    from service.api.auth import access
    from service.attention.engine import Engine
    from service.batching import runner
    from service.layers.store import Store

    forward, load, run = Engine._forward, Store.load, Engine.run
    passes = os.open(os.environ.get("FAULTY_PASSES", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def faulty_forward(self, batch):
        marks = [float(first(work.call.query)) for work in batch]
        told = f"{os.getpid()} {threading.current_thread().name} {' '.join(map(str, marks))}\n"
        os.write(passes, told.encode())
        fail(marks)
        answers = forward(self, batch)
        if os.environ.get("FAULTY_FLIP") and len(batch) > 1:
            first(answers[0].output.view(torch.int32)).bitwise_xor_(1)
        return answers

    def slow_load(self, name):
        time.sleep(float(os.environ.get("FAULTY_LOAD_S", "0")))
        return load(self, name)

    replace(access, "needs_admin", lambda scope: False)  # no route needs a key here
    replace(runner, "FAR_TOO_LONG", FAR_TOO_LONG)
    replace(Engine, "_forward", faulty_forward)
    if os.environ.get("FAULTY_INLINE") == "0":
        replace(Engine, "run", lambda self, batch, *, is_long, **_: run(self, batch, is_long=is_long))
    replace(Store, "load", slow_load)


if __name__ == "__main__":
    be_worker() if sys.argv[1] == "worker" else be_supervisor()
    from service.cli import main

    main()
