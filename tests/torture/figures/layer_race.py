"""Figure 11: the file of one layer is swapped, removed and damaged without pause while admins PUT and DELETE it.

Invariants: every answer to an admin is one that the contract has for it, a 503 only while another change is under way; another
layer answers every request with the right bits, the raced one with a version that it had, or not at all (404); no process ends;
afterwards one PUT makes all processes serve the file as it is. The same check with the old fault planted must fail.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.api.auth.key_ring import Role, line_for
from service.layers.store import Store
from tests.integration.running import ADMIN_KEY, small_layer
from tests.torture import at_rest, process_tree
from tests.torture.figure import Form
from tests.torture.raw_connection import RawConnection, post
from tests.torture.report import Row, fails, none_of
from tests.torture.subject import NUM_ASKERS, Subject, Vitals

KEY = {"X-API-Key": ADMIN_KEY}
RACED, OTHER = "zero", "small"
QUERY = json.dumps({"query": [[0.5, *[0.25] * 15], [-0.5] * 16]}).encode()
ALLOWED = {"PUT": {200, 201, 404, 409, 422}, "DELETE": {204, 404}}
UNDER_WAY = b"another change of layers is under way"
ADMINS = ("PUT", "PUT", "PUT", "DELETE")
SCALES = (0.125, 0.25, 0.5, 2.0)
SECONDS, LEAST_S, PLANTED_S = 25.0, 6.0, 30.0
MAX_PAUSE_S = 0.03
DELETE_PAUSE_S = 1.0
# As long as a change may take.
CHANGE_S = 60.0
# New connections, which the kernel spreads over the processes: enough starters that every process was the author of a change.
CHECKS, NUM_STARTERS = 12, 16


def plant() -> None:
    """The old fault: any version of the desired state was taken for the missing one, and nothing reported what was missing."""
    from service.errors import LayerError
    from service.supervisor.status import DesiredState
    from service.worker.layer_registry import LayerRegistry

    async def apply(self: LayerRegistry, desired: DesiredState) -> None:
        errors: dict[str, LayerError] = {}
        for name in sorted({name for name, _ in desired.loaded - self._loaded.keys()}):
            try:
                stored = await self.read(self._load_thread, self._store.load, name)
                if (name, stored.digest) not in desired.loaded:
                    raise LayerError("the file is not the version that is served")  # noqa: TRY301 (as it was)
                await self._load(name, stored.digest)
            except LayerError as error:
                errors[name] = error
        self.applied = desired
        self._serve(desired)
        missing = {name: errors[name] for name, digest in desired.layers.items() if (name, digest) not in self._loaded}
        self.refusal = next((LayerError(missing[name].message) for name in desired.changed if name in missing), None)

    LayerRegistry.apply = apply  # type: ignore[method-assign]


def measure(form: Form) -> Iterator[Row]:
    seconds = form.seconds(SECONDS, LEAST_S)
    with _subject(form.room("layer-race")) as subject:
        race = _Race(subject, form.random("layer race"))
        race.run(seconds)
        told = ", ".join(f"{count} x {status}" for status, count in sorted(race.statuses.items()))
        what = f"{seconds:.0f} s of changing files under {len(ADMINS)} admins ({told})"
        yield none_of(11, f"{what}: answers outside the contract", race.wrong)
        yield none_of(11, f"other layers meanwhile ({race.num_asked:,} requests): wrong answers", race.harmed)
        yield none_of(11, "processes that ended", race.deaths())
        yield none_of(11, "processes that do not serve the current file after one more PUT", race.unsettled())
        what = "at rest: counts that do not add up; gauges, tasks, threads, descriptors, processes that are not back"
        yield none_of(11, what, at_rest.not_back(subject, race.before))
    with _subject(form.room("layer-race-planted"), plants={"modules": [__name__]}) as subject:
        race = _Race(subject, form.random("planted race"))
        race.run(PLANTED_S, until=race.deaths)
        found = race.deaths()
        yield fails(11, "the old fault, planted, fails the check", f"{len(found)} processes ended", bool(found))


def _subject(room: Path, **more: Any) -> Subject:
    (room / "keys").write_text(line_for(ADMIN_KEY, Role.ADMIN), encoding="ascii")
    return Subject(room, workers=2, api_keys_file=room / "keys", open_metrics=True, **more)


class _Race:
    """One race over one service; what was wrong in it, in words."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self._subject, self._rng = subject, rng
        self._path = subject.directory / "layers" / f"{RACED}.safetensors"
        layers = [small_layer(RACED, add_zero_attn=True, scale=scale) for scale in SCALES]
        made = Store(subject.directory / "made")
        self._versions = {layer.digest: made.save(layer).read_bytes() for layer in layers}
        self._first_answer: bytes | None = None
        self.statuses: collections.Counter[int] = collections.Counter()
        self.wrong: list[str] = []
        self.harmed: list[str] = []
        self.num_asked = 0
        self.before = self._baseline()

    def run(self, seconds: float, until: Callable[[], object] = lambda: None) -> None:
        """Ends early where `until` has found something."""
        asyncio.run(self._run(seconds, until))

    def deaths(self) -> list[str]:
        """Processes that are gone, and what was said of it."""
        gone = set(self._subject.pids) - set(process_tree.children(self._subject.process.pid))
        said = [line["event"] for line in self._subject.lines() if line["event"] in ("main_task_failed", "worker_died")]
        return [*(f"process {pid}" for pid in gone), *said]

    def unsettled(self) -> list[str]:
        """What new connections see after one PUT of one version, if it is not that version alone."""
        digest, content = next(iter(self._versions.items()))
        self._write(content)

        async def look() -> set[str]:
            (status, body), *seen = [await self._ask("PUT"), *[await self._ask("POST") for _ in range(CHECKS)]]
            told = [json.loads(body).get("digest", f"PUT {status}")]
            told += [str(json.loads(body).get("layer", {}).get("digest", status)) for status, body in seen]
            return set(told) - {digest}

        return [*asyncio.run(look())]

    def _baseline(self) -> Vitals:
        """Of processes that have started what they start once, at need."""
        for _ in range(NUM_STARTERS):
            self.unsettled()
        with ThreadPoolExecutor(NUM_ASKERS) as pool:
            list(pool.map(self._subject.get, ["/metrics"] * NUM_ASKERS))
        return self._subject.vitals()

    async def _run(self, seconds: float, until: Callable[[], object]) -> None:
        end = time.monotonic() + seconds
        over = lambda: time.monotonic() > end
        work = [self._churn(over), *(self._change(method, over) for method in ADMINS)]
        work += [self._watch(layer, over) for layer in (OTHER, OTHER, RACED)]
        running = asyncio.gather(*work)
        while not running.done() and not until():
            await asyncio.sleep(0.1)
        if not running.done():
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def _churn(self, over: Callable[[], bool]) -> None:
        versions = list(self._versions.values())
        while not over():
            kind = self._rng.random()
            if kind < 0.02:
                self._path.unlink(missing_ok=True)
            elif kind < 0.04:
                self._path.write_bytes(versions[0][: self._rng.randrange(len(versions[0]))])
            else:
                self._write(self._rng.choice(versions[:2] if kind < 0.9 else versions))
            await asyncio.sleep(self._rng.uniform(0, MAX_PAUSE_S))

    def _write(self, content: bytes) -> None:
        beside = self._path.with_name(".beside")
        beside.write_bytes(content)
        beside.replace(self._path)

    async def _change(self, method: str, over: Callable[[], bool]) -> None:
        while not over():
            # A layer that is never served for long races with nothing.
            await asyncio.sleep(DELETE_PAUSE_S if method == "DELETE" else 0)
            status, body = await self._ask(method)
            self.statuses[status] += 1
            is_busy = status == http.HTTPStatus.SERVICE_UNAVAILABLE and UNDER_WAY in body
            if status not in ALLOWED[method] and not is_busy:
                self.wrong.append(f"{method} {status} {body[:200]!r}")

    async def _watch(self, layer: str, over: Callable[[], bool]) -> None:
        while not over():
            status, body = await self._ask("POST", layer)
            self.num_asked += layer == OTHER
            answer, _, _ = body.partition(b',"batch":')
            if layer == RACED:
                is_right = status == http.HTTPStatus.NOT_FOUND or any(
                    digest.encode() in body for digest in self._versions
                )
            else:
                self._first_answer = self._first_answer or answer
                is_right = status == http.HTTPStatus.OK and answer == self._first_answer
            if not is_right:
                self.harmed.append(f"{layer} {status} {body[:200]!r}")

    async def _ask(self, method: str, layer: str = RACED) -> tuple[int, bytes]:
        """Over a connection of its own; status 0 where there was no answer."""
        path = f"/v1/layers/{layer}"
        wire = post(f"{path}/attend", QUERY, KEY) if method == "POST" else post(path, b"", KEY, method)
        with contextlib.closing(RawConnection(self._subject.port)) as connection:
            reply = await connection.outcome(wire, CHANGE_S)
        return (0, reply.encode()) if isinstance(reply, str) else (reply.status, reply.body)
