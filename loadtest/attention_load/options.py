"""The options that the load test adds to Locust's; each is an environment variable too (`LOADTEST_…`)."""

from __future__ import annotations

import argparse
import re
from typing import Any

from attention_load.schedule import SCENARIOS

OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("scenario", "smoke", "smoke, ramp, spike or soak"),
    ("peak_users", 8, "users at the top of the scenario"),
    ("base_users", 2, "users before and after a spike"),
    ("hold_s", 0.0, "seconds each stage is measured, of a soak all stages together; 0 = the scenario's default"),
    ("steps", 8, "steps of a ramp"),
    ("layer", "", "layers to request, separated by commas; empty = all that the service lists"),
    ("long_tokens", 512, "rows of a long request"),
    ("check_every", 5, "one in so many answers of a kind and form is compared with its reference; 0 = none"),
    ("pace", 0.0, "requests a second of each user (Locust's constant_throughput); 0 = no pause"),
    ("request_timeout_s", 30.0, "seconds until a request without an answer fails"),
    ("retries", 0, "attempts after one that brought no whole answer, or a balancer's own 500, 502, 503 or 504"),
    ("api_key", "", "API key of the service"),
    ("seed", 20261121, "seed of the tensors"),
    ("max_p50_ms", 0.0, "objective: median latency; 0 = none"),
    ("max_p95_ms", 0.0, "objective: 95th percentile; 0 = none"),
    ("max_p99_ms", 1000.0, "objective: 99th percentile; 0 = none"),
    ("max_error_share", 0.0, "objective: failed requests, wrong answers included, as a share of all"),
    ("max_refusal_share", 0.01, "objective: refusals (429 and 503 with Retry-After) as a share of all"),
    ("min_rps", 0.0, "objective: correct answers a second; 0 = none"),
    ("json_report", "", "file for the verdict as JSON; empty = none"),
)
# Paths that are copied together with the address.
ROUTE = re.compile(r"(?i)(?<![:/])/+(v[12](/.*)?|docs|openapi\.json|healthz|readyz|metrics)/*$")
POSITIVE = ("peak_users", "base_users", "steps", "long_tokens", "request_timeout_s")


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def add_options(parser: Any, **_: Any) -> None:
    for name, default, meaning in OPTIONS:
        kind = {"type": type(default), "default": default, "choices": SCENARIOS if name == "scenario" else None}
        is_shown = name not in ("api_key", "json_report")
        env_var = f"LOADTEST_{name.upper()}"
        parser.add_argument(flag(name), help=meaning, env_var=env_var, include_in_web_ui=is_shown, **kind)


def address(host: str | None) -> str:
    """The service's address without a slash at its end. Raises ValueError that names the option."""
    if not re.fullmatch(r"(?i)https?://[^/?#\s]+[^?#\s]*", host or ""):
        raise ValueError(f"--host must be like http://127.0.0.1:8000, without a query, not {host!r}")
    if found := ROUTE.search(str(host)):
        raise ValueError(f"--host: give the address without /{found[0].strip('/')}")
    return str(host).rstrip("/")


def validate(options: argparse.Namespace) -> None:
    """Raises ValueError that names the option."""
    for name, default, _ in OPTIONS:
        value = getattr(options, name)
        if not isinstance(default, str) and (value < 0 or (value == 0 and name in POSITIVE)):
            raise ValueError(f"{flag(name)} must {'be positive' if name in POSITIVE else 'not be negative'}")
    if not (options.api_key.isascii() and options.api_key.isprintable()):
        raise ValueError("--api-key has characters that a header cannot carry (a line end?)")
