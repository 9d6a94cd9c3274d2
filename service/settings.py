"""Settings: all options of the service, read once from the environment (`ATTENTION_…`) and the command line.

Invariants: Only this file reads the service's variables; the other commands name theirs in their options. An invalid value stops
the start with the variable's name. Most packages receive small frozen values (`limits.py`), not `Settings`. The text under each
field is its row of docs/settings.md, and a test compares them.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.errors import ServiceError

MIB = 2**20
ENV_PREFIX = "ATTENTION_"

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Timeout = Annotated[float, Field(gt=0, le=3600)]

# As browsers write an origin: scheme, host and optional port, in lower case, without a path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")


def listed(value: str) -> tuple[str, ...]:
    """Return what stands between commas, without spaces around it and without empty parts."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _checked_origins(value: str) -> str:
    origins = listed(value)
    if origins != ("*",) and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be * or origins like https://app.example:8443, in lower case, without a path or a slash")
    return value


_HOST_NAME = re.compile(r"\*|(?:\*?\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?")


def _checked_hosts(value: str) -> str:
    names = listed(value)
    if not all(map(_is_host, names)) or (value and not names):
        raise ValueError(
            "must be * or hosts like api.example, *.example.com, 192.0.2.7 or [::1], without a scheme or a port"
        )
    return value


def _is_host(name: str) -> bool:
    if ":" not in name:
        return _HOST_NAME.fullmatch(name) is not None
    try:
        address = ipaddress.IPv6Address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return address.scope_id is None  # no Host has a zone


class Settings(BaseSettings):
    """Settings of one process, frozen. A field's variable is `ATTENTION_` and the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    host: str = "127.0.0.1"
    """address to bind"""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port to bind; 0 = any free port, which the log names"""
    layers_dir: Path = Path(".layers")
    """directory of stored layers, one `<name>.safetensors` for each, and of models, `<name>.model`"""
    layers_source: str = ""
    """published layer set that is served in place of the files of `ATTENTION_LAYERS_DIR`, which then keeps what is fetched: a
    directory, or an address like `s3://bucket/path`, which needs the extra `source` (docs/layer-sets.md); unset: none"""
    layers_source_poll_s: Timeout = 10.0
    """time between two looks at `ATTENTION_LAYERS_SOURCE`, a quarter more or less (seconds)"""
    run_dir: Path | None = None
    """parent directory of the files that processes share (metrics); default: `/dev/shm`, else the temporary directory"""
    workers: int = Field(0, ge=0, le=64)
    """number of processes; 0 = usable cores / `ATTENTION_COMPUTE_THREADS` (at most 64) on a CPU, 1 on a GPU"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device on which layers run; auto = GPU if present, else CPU"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype in which layers compute"""
    compute_threads: int = Field(1, ge=1, le=256)
    """threads with which torch computes in each process"""
    exact: bool = False
    """on a GPU: the bits of an answer do not depend on its batch, because a layer runs one sequence at a time where the
    self-check finds that they would"""

    api_keys_file: Path | None = None
    """file of API keys, each line the SHA-256 digest of a key and a role (`infer` or `admin`); unset: requests need no key, and
    layers cannot be changed at run time"""
    open_metrics: bool = False
    """serve `/metrics` without a key even if API keys are set"""
    rate_limit_per_s: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)
    """requests that one key may send to one process (per second); without keys all clients share this limit; 0 = no limit"""
    rate_burst: int = Field(0, ge=0, le=10**6)
    """requests that one key may send at once after a pause; 0 = those of one second"""
    cors_origins: Annotated[str, AfterValidator(_checked_origins)] = ""
    """origins whose web pages may read answers, `https://app.example, …` or `*`; unset: none"""
    allowed_hosts: Annotated[str, AfterValidator(_checked_hosts)] = ""
    """hosts that `Host` may name, `api.example, *.example.com, …` or `*`; health checks are exempt unless a browser sends them;
    unset: any host, but on a loopback address without keys a browser's request must name a loopback host"""
    tls_cert_file: Path | None = None
    """certificate chain for HTTPS (PEM); it may also contain the private key"""
    tls_key_file: Path | None = None
    """private key of the certificate (PEM, without a passphrase)"""

    max_connections: int = Field(0, ge=0, le=10**6)
    """connections that a process keeps; a connection above this number is served health and metrics only, and its other requests
    are refused with Retry-After; 0 = as many as the file descriptors allow, at most 8192"""
    connection_max_age_s: float = Field(0.0, ge=0, le=86_400, allow_inf_nan=False)
    """age after which a connection ends with its next answer, which says `Connection: close`, so that pooled clients spread over
    replicas that have joined; each connection draws its own from 80% to 100% of it (seconds); 0 = no limit"""
    max_target_bytes: int = Field(8192, ge=256, le=65536)
    """request target, that is path and query (bytes)"""
    max_header_bytes: int = Field(16384, ge=1024, le=MIB)
    """all header fields of a request together (bytes)"""
    max_headers: int = Field(100, ge=8, le=10_000)
    """header fields of a request"""
    header_timeout_s: Timeout = 10.0
    """time for the headers to arrive, from the opening of the connection or the first byte of a later request (seconds)"""
    max_body_bytes: int = Field(16 * MIB, ge=1024, le=1024 * MIB)
    """request body, before and after decompression (bytes)"""
    decode_off_loop_bytes: Positive = MIB
    """bodies of at least this size, and JSON of at least a quarter of it, are parsed off the event loop, in one thread (bytes)"""
    max_text_numbers: Positive = 2**18
    """numbers written as text in a request; the other limits on text grow with it (see *Fixed limits*). At the default no text
    holds the event loop for more than 20 ms, and with twice the value it may take twice as long; tensors in base64 and
    safetensors have no such limit"""
    max_json_depth: int = Field(32, ge=8, le=128)
    """nesting depth of a JSON body"""
    max_sequences: int = Field(1024, ge=1, le=65536)
    """sequences in one request"""
    max_request_tokens: Positive = 65536
    """query rows of one request, plus its key rows if it sends keys"""
    max_request_cells: Positive = 2**28
    """attention scores of one request: sequences x heads x L x S"""
    max_weights_bytes: int = Field(64 * MIB, ge=1024)
    """weights, scores, lse and entropy that one request returns (bytes)"""
    max_table_bytes: int = Field(512 * MIB, ge=1024)
    """tables that one sequence of a request needs during computation: the sum of its masks and the workspace of its weights
    (bytes)"""
    body_timeout_s: Timeout = 30.0
    """time for a whole request body to arrive (seconds)"""
    write_timeout_s: Timeout = 30.0
    """time for the client to read an answer, or each piece of a long one (seconds)"""
    min_response_bytes_per_s: int = Field(256 * 1024, ge=0)
    """lowest rate at which the client may read a long answer (bytes per second); all waits for the client together last at most
    the write timeout plus the answer's bytes divided by this rate; 0 = any rate"""
    request_timeout_ms: int = Field(10_000, ge=1, le=3_600_000)
    """deadline of a request, counted from its complete body (milliseconds)"""

    max_batch_requests: Positive | None = None
    """requests that may share a batch; default: 16 on a CPU, 128 on a GPU"""
    max_batch_tokens: Positive | None = None
    """rows that may share a batch; a larger request runs alone; default: 2048 on a CPU, which computes about 1,024 rows at a
    time, 16384 on a GPU"""
    max_batch_cells: Positive | None = None
    """attention scores that may share a batch; a larger request runs alone; default: 16777216 on a CPU, 268435456 on a GPU"""
    max_wait_ms: float = Field(0.0, ge=0, le=10_000)
    """longest wait for more requests while the engine is idle (milliseconds), at most half of the time to a request's deadline;
    0 = start the batch at once"""
    queue_capacity: Positive = 256
    """requests that may wait in a process"""
    queue_bytes: int = Field(128 * MIB, ge=1024)
    """decoded tensors that may wait in a process (bytes); two more limits follow from it: a quarter of it or more for undecoded
    bodies, and all of it or more for unsent answers"""
    queue_cells: Positive = 2**32
    """attention scores that may wait in a process; a request that waits alone may have more"""
    standing_wait_ms: float | None = Field(None, ge=0)
    """in sustained overload a lane of the queue holds the whole batches that fit into this wait, at least one (milliseconds); a
    lane has the requests of one layer and digest, float64 or not, and one of three sizes; 0 = only the queue's other limits hold;
    default: 100, or 0 if `ATTENTION_QUEUE_CAPACITY` is set"""

    drain_delay_s: Seconds = 0.0
    """time of normal service at shutdown, with readiness off, until the listener closes (seconds)"""
    shutdown_grace_s: Seconds = 30.0
    """time for accepted requests to finish at shutdown (seconds)"""
    heartbeat_s: float = Field(1.0, gt=0, le=60)
    """time between updates of readiness and metrics (seconds)"""
    probe_s: Timeout = 10.0
    """a layer without an answer for this long is probed with a real forward pass (seconds)"""
    stuck_s: Timeout = 60.0
    """longest time without progress of a batch, and longest step of a layer's load; on a CPU a batch progresses many times a
    second, on a GPU only when it ends; after that, all waiting requests of the process fail and it is replaced; the watchdog also
    replaces a process whose event loop is silent for this long, at least 10 s (seconds)"""
    layer_change_s: Timeout = 30.0
    """time for all processes to load or unload a layer at run time; if one is late, the rollout is aborted in all; a PUT
    first reads the layer's file, which may take as long (seconds)"""
    max_layer_bytes: Positive = 2**30
    """largest file of a layer or model that is loaded; checking it takes about three times as much memory in a process (bytes)"""
    strict_layers: bool = True
    """refuse to start if a stored layer cannot be loaded; false = serve the other layers"""
    compress_offers: bool = False
    """compress answers for every client whose `Accept-Encoding` allows it; false = only for clients that name a single coding or
    prefer one to `identity`"""
    docs: bool = True
    """serve `/docs` and `/openapi.json`"""
    explore: bool = True
    """serve `/explore`, a page that shows the attention of a sentence"""
    traces: bool = False
    """send a span for each request, phase and batch by OTLP over HTTP, as the `OTEL_…` variables configure; needs the extra
    `otel`"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest severity of the log lines that workers write; the supervisor writes all of its few"""
    log_format: Literal["auto", "console", "plain", "json"] = "auto"
    """form of the log lines: console = for a person, with colours on a terminal unless `NO_COLOR` is set; plain = without; json =
    one object a line; auto = console if `serve` starts in a terminal, else json"""


class SettingsError(ServiceError, code="bad_settings"):
    """A setting is invalid; the message is one line that names the variable."""


def load_settings(**overrides: object) -> Settings:
    """Return the environment's settings, overridden by those of the command line (None = not given); raises SettingsError."""
    _check_names()
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"])
        # What the user has to correct: the option of the command, with its value, or the variable.
        origin = f"--{name.replace('_', '-')} {given[name]}" if name in given else f"{ENV_PREFIX}{name.upper()}"
        raise SettingsError(f"{origin}: {first['msg'].removeprefix('Value error, ')}") from None


def _check_names() -> None:
    """Raise SettingsError for a misspelt variable; ignore unrelated ones.

    Kubernetes adds some for a service `attention-ui`: ATTENTION_UI_SERVICE_HOST, and ATTENTION_UI_PORT=tcp://10.0.0.1:80.
    """
    known = [name.upper() for name in Settings.model_fields]
    for variable, value in sorted(os.environ.items()):
        name = variable.upper().removeprefix(ENV_PREFIX)
        is_unknown = variable.upper().startswith(ENV_PREFIX) and name not in known
        if is_unknown and not value.startswith(("tcp://", "udp://", "sctp://")):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            if near:
                raise SettingsError(f"unknown variable {variable}: did you mean {ENV_PREFIX}{near[0]}?")


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the environment in which a child process reads the same settings.

    It limits numeric libraries, which start a thread per core and ignore a CPU quota: on 64 cores two workers would exceed a
    limit of 128 threads. It drops PYTHONOPTIMIZE: 2 removes docstrings, and those of errors are the texts of the service. Without
    traces it drops the `OTEL_…` variables: one for other programs could stop FastAPI's import. Unless this package lies in the
    working directory, nothing is imported from there: `python -m` would take another `service`, or a `json.py`, first.
    """
    dropped = ("PYTHONOPTIMIZE",) if settings.traces else ("PYTHONOPTIMIZE", "OTEL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    named = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in given.items() if value is not None}
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": str(settings.compute_threads)}
    paths = {} if Path(__file__).parents[1].samefile(os.curdir) else {"PYTHONSAFEPATH": "1"}
    return {**threads, **inherited, **named, **paths}


def log_format(settings: Settings, *, is_terminal: bool) -> Literal["console", "plain", "json"]:
    """Return the form of the log lines; only a terminal shows colours, and not every one (https://no-color.org)."""
    if settings.log_format == "json" or (settings.log_format == "auto" and not is_terminal):
        return "json"
    has_colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return "console" if has_colours and settings.log_format != "plain" else "plain"


def local_url(settings: Settings, port: int | str) -> str:
    """Return the address of the service on this machine; one that listens on every address also has the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 (compared, not bound)
    scheme = "http" if settings.tls_cert_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a service that binds this address or name."""
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except (OSError, ValueError):
        return True  # binding it fails later, with the reason


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity mask, reduced to a cgroup's CPU quota if one is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of cgroup versions 2 and 1
        with contextlib.suppress(OSError, ValueError):
            texts = [Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in names]
            quota, period = " ".join(texts).split()
            if quota.isdecimal():  # neither "max" nor -1, which are no limit
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores
