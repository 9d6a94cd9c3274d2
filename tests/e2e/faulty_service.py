"""The real service with faults on demand and with the admin routes: `python faulty_service.py serve …`.

A request whose first number is one of the marks below does to the engine what the mark says. `FAULTY_LOAD_S` makes reading a
layer take that long, in a call that cannot be called off; `FAULTY_FORWARD_S` does so to every forward pass. With
`FAULTY_FLIP` one bit of the first answer is flipped wherever several requests share a forward pass.
"""

import dataclasses
import os
import sys
import time

STUCK, DEVICE, RAISES, SLOW = 1001.0, 1002.0, 1003.0, 1004.0
SLOW_S = 2.0


def replace(owner: type, name: str, method: object) -> None:
    setattr(owner, name, method)


def be_supervisor() -> None:
    from service import supervisor

    become = supervisor.become

    def of_this_file(plan):
        command = (sys.executable, __file__, *plan.command[3:])  # instead of `-m service`
        become(dataclasses.replace(plan, command=command))

    vars(supervisor)["become"] = of_this_file


def be_worker() -> None:
    import torch

    from service.api import access
    from service.attention.engine import Engine
    from service.layers.store import Store

    forward, load, run = Engine._forward, Store.load, Engine.run

    def faulty_forward(self, batch):
        marks = {float(work.call.query[0, 0, 0]) for work in batch}
        if STUCK in marks:
            time.sleep(600)
        if DEVICE in marks:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if RAISES in marks:
            raise RuntimeError("a secret reason")
        if SLOW in marks:
            time.sleep(SLOW_S)
        time.sleep(float(os.environ.get("FAULTY_FORWARD_S", "0")))
        answers = forward(self, batch)
        if os.environ.get("FAULTY_FLIP") and len(batch) > 1:
            answers[0].output.view(torch.int32).view(-1)[0] ^= 1
        return answers

    def slow_load(self, name):
        time.sleep(float(os.environ.get("FAULTY_LOAD_S", "0")))
        return load(self, name)

    vars(access)["_ADMIN_METHODS"] = frozenset()  # everybody may change layers here
    replace(Engine, "_forward", faulty_forward)
    replace(Engine, "run", lambda self, batch, **_: run(self, batch))  # no batch is brief: any may be made slow
    replace(Store, "load", slow_load)


if __name__ == "__main__":
    be_worker() if sys.argv[1] == "worker" else be_supervisor()
    from service.cli import main

    main()
