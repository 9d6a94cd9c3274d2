"""Figure 10: mutated checkpoints given to the loader: of our own stored form, and of a foreign one given to the importer.

Invariants: the loader runs in a process of its own (`load_mutants.py`), so that a crash or a hang is seen for what it is; each
file is refused with a LayerError that has our own words, or loads as the very layer that it was before.
"""

from __future__ import annotations

import collections
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx2

from service.api.auth.key_ring import Role, line_for
from tests.e2e.started import Started, X
from tests.integration.running import ADMIN_KEY, prepare, small_layer
from tests.torture.figure import Form
from tests.torture.load_mutants import mutate
from tests.torture.report import Row, none_of

FILES = 20_000
RELOADS = 400
OK = 200
MAY_BE = {200, 422, 503}
PROCESS_S = 1800


def measure(form: Form) -> Iterator[Row]:
    room = form.room("checkpoints")
    num = form.count(FILES, 200)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.torture.load_mutants", str(room), str(form.seed), str(num)],
        stdout=subprocess.PIPE,
    )
    told = json.loads(process.communicate(timeout=PROCESS_S)[0] or "{}")
    died = [] if process.returncode == 0 else [f"the loader ended with {_how(process.returncode)}; the file is {room}"]
    yield none_of(10, f"{num:,} mutated checkpoints: deaths, hangs over 5 s", died + told.get("hangs", []))
    yield none_of(
        10,
        "errors other than LayerError, messages that show internals, layers that changed",
        told.get("wrong", ["no answer"]),
    )
    counts = told.get("counts", {})
    yield Row(10, "outcomes", "", ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items())), is_met=True)
    yield from _reloads(form)


def _reloads(form: Form) -> Iterator[Row]:
    """F14: mutants in the place of a served layer, and PUT; what is served stays what it was, to the last bit."""
    room, num = form.room("reloads"), form.count(RELOADS, 20)
    prepare(room, [small_layer("small")])
    (room / "keys").write_text(line_for(ADMIN_KEY, Role.ADMIN), encoding="ascii")
    path = room / "layers" / "small.safetensors"
    content = path.read_bytes()
    service = Started(room / "layers", workers=2, api_keys_file=room / "keys")
    statuses: collections.Counter[int] = collections.Counter()
    wrong: list[str] = []
    try:
        service.wait_ready()
        with httpx2.Client(base_url=service.url, headers={"x-api-key": ADMIN_KEY}, timeout=60) as client:
            before = client.post("/v1/layers/small/attend", json=X).json()["output"]
            for number in range(num):
                new = path.with_suffix(".new")
                new.write_bytes(mutate(content, form.random(f"reload {number}")))
                new.replace(path)
                statuses[client.put("/v1/layers/small").status_code] += 1
                answer = client.post("/v1/layers/small/attend", json=X)
                if answer.status_code != OK or answer.json()["output"] != before:
                    wrong.append(f"#{number} was followed by {answer.status_code}")
    finally:
        service.end()
    told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    yield none_of(10, f"{num} reloads of mutants under way: the old layer gone or changed (F14)", wrong)
    yield none_of(
        10, f"reloads with another answer than 200, 422 or 503 ({told})", [*map(str, statuses.keys() - MAY_BE)]
    )


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)
