"""Figure 18: one key sends nine tenths of twice what the service can do; the others send what is left.

Invariants: each request costs the engine a fixed time, so that capacity is known; arrivals are open loop; an answer counts if
it is a 200 within the deadline; the same check on a service that does not distinguish keys must fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from service.api.auth.key_ring import Role, line_for
from service.settings import usable_cores
from tests.torture.figure import Form
from tests.torture.open_loop import Arrivals, OpenLoop, Record
from tests.torture.report import Row, at_least, fails, none_of
from tests.torture.subject import Subject

COST_S = 0.005
OVERLOAD, SHARE_OF_ONE = 2.0, 0.9
NUM_OTHERS = 3
SECONDS, LEAST_S = 20.0, 6.0
TIMEOUT_MS = 2000
LEAST_SUCCESS = 95
ONE = "the-one-that-floods"


def plant() -> None:
    """Plant a service that does not distinguish keys."""
    from service.api import request_context

    vars(request_context)["KEY_DIGEST"] = "attention.nobody"


def measure(form: Form) -> Iterator[Row]:
    (success, one), failed = _measured(form, "one-key", {})
    yield at_least(18, f"requests of {NUM_OTHERS} other keys answered in time", success, LEAST_SUCCESS, " %")
    yield Row(18, "requests of the key with nine tenths answered in time", "", f"{one:.0f} %", is_met=True)
    yield none_of(18, "neither answered nor refused", failed)
    (success, _), _ = _measured(form, "one-key-planted", {"modules": [__name__]})
    what = "a service that does not distinguish keys fails the check"
    yield fails(18, what, f"{success:.0f} %", success < LEAST_SUCCESS)


def _measured(form: Form, name: str, plants: dict) -> tuple[tuple[float, float], list[str]]:
    """Percent of the others' requests and of the one's that were answered in time; what was no answer at all."""
    room = form.room(name)
    others = [f"another-{number}" for number in range(NUM_OTHERS)]
    keys = Path(room / "keys")
    keys.write_text("\n".join(line_for(secret, Role.INFER) for secret in (ONE, *others)), encoding="ascii")
    cores = usable_cores()
    serving, loading = ({0}, {1}) if cores > 1 else (None, None)
    plants = {"cost_s": COST_S, **plants}
    with Subject(room, plants=plants, cpus=serving, workers=1, api_keys_file=keys, open_metrics=True) as subject:
        seconds, total = form.seconds(SECONDS, LEAST_S), OVERLOAD / COST_S
        loops = [_loop(subject, ONE, total * SHARE_OF_ONE, seconds, loading)]
        loops += [_loop(subject, key, total * (1 - SHARE_OF_ONE) / NUM_OTHERS, seconds, loading) for key in others]
        one, *rest = (loop.records() for loop in loops)
    records = [record for some in rest for record in some]
    failed = [
        f"{record.status} {record.how}" for record in [*one, *records] if record.status not in (200, 429, 503, 504)
    ]
    return (_success(records), _success(one)), failed


def _loop(subject: Subject, key: str, per_second: float, seconds: float, cpus: set[int] | None) -> OpenLoop:
    header = f"Authorization: Bearer {key}\r\n"
    return OpenLoop(Arrivals(subject.port, per_second, seconds, len(key), TIMEOUT_MS, headers=header), cpus)


def _success(records: list[Record]) -> float:
    return 100 * sum(record.status == 200 for record in records) / len(records)
