"""Made-up results for the modules that only read them."""

from benchmarks.results import Part

MACHINE = {
    "cpu": "Abacus 9",
    "cores": 2,
    "memory_gib": 4,
    "system": "Linux 1",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0"},
    "wrk": "wrk 4.1.0 [epoll]",
    "load_before": 0.1,
}


def part(name, samples, **fields) -> Part:
    about = {
        "measured_at": "2026-11-21 10:00 UTC",
        "commit": "abc1234",
        "machine": MACHINE,
        "settings": {"seconds": 8.0, "warm_s": 1},
        "subjects": {"mosec": {"settings": "WORKERS=2", "version": "0.9.8"}},
    }
    return Part(name=name, **{**about, **fields}, samples=list(samples))


def sample(number, subject, tok_s, **fields) -> dict:
    figures = {"rps": tok_s / 10, "tok_s": tok_s, "p50_ms": 5.0, "p99_ms": 9.0}
    return {"round": number, "subject": subject, "workload": "w1", **figures, **fields}
