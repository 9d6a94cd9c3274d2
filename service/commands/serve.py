"""`serve` and `worker` commands: start the supervisor, and the worker processes that it runs.

Invariants: A worker has one event loop; on a CPU two threads compute. `serve` does not import torch. Its options become
environment variables, from which a worker reads its settings. A failed start prints one line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.observability.telemetry import Telemetry
    from service.settings import Settings
    from service.worker.control_channel import ControlChannel
    from service.worker.server import Server

# How long a thread may hold the interpreter lock that another waits for. The compute thread needs it between two products, a
# hundred times in a large batch. With Python's default of 5 ms it would wait for a busy event loop as long as a product takes.
SWITCH_INTERVAL_S = 0.0005
DEVICES = Path("/dev")


def serve(
    host: Annotated[str | None, typer.Option(help="address to bind; default: 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 = a free one; default: 8000")] = None,
    layers_dir: Annotated[Path | None, typer.Option(help="directory of stored layers; default: .layers")] = None,
    workers: Annotated[int | None, typer.Option(help="processes; default: one per usable core, one on a GPU")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; default: auto")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: float32")] = None,
) -> None:
    """Serve the layers of a directory until SIGTERM or SIGINT. Each option overrides its ATTENTION_ variable."""
    # Imported here, because the other commands do not need these, and the settings take 0.3 s to import.
    from service.observability.line_writer import use_format
    from service.settings import child_environment, is_loopback, load_settings, log_format
    from service.supervisor.processes import STDOUT, nonblocking_streams, write_log_line
    from service.supervisor.supervisor import Plan, exec_supervisor

    is_terminal = os.isatty(STDOUT)  # until a pipe takes its place
    with nonblocking_streams():
        given = dict(host=host, port=port, layers_dir=layers_dir, workers=workers, device=device, dtype=dtype)
        settings = load_settings(**given)
        settings = settings.model_copy(update={"log_format": log_format(settings, is_terminal=is_terminal)})
        use_format(settings.log_format)
        is_variable = layers_dir is None and "layers_dir" in settings.model_fields_set
        _check_layers(settings, "ATTENTION_LAYERS_DIR" if is_variable else "--layers-dir")
        _check_start(settings)
        if settings.api_keys_file is None and not is_loopback(settings.host):
            write_log_line("warning", "open_to_all", host=settings.host, reason="no ATTENTION_API_KEYS_FILE is set")
        settings = without_unusable_gpu(settings)
    settings = settings.model_copy(update={"workers": num_workers(settings)})
    plan = Plan(
        command=(sys.executable, "-m", "service", "worker"),
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        drain_s=settings.drain_delay_s + settings.shutdown_grace_s,
        watchdog_timeout_s=settings.stuck_s,
        run_dir=None if settings.run_dir is None else str(settings.run_dir),
        log_format=settings.log_format,
        welcome=_welcome(settings) if settings.log_format != "json" else "",
    )
    exec_supervisor(plan, child_environment(settings))


def _welcome(settings: Settings) -> str:
    """Return the three lines with which a terminal begins; the command in them works as it is printed."""
    from service import __version__
    from service.settings import local_url
    from service.supervisor.supervisor import LAYERS, PORT

    url = local_url(settings, PORT)
    question = '{"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}'
    options = f"-H 'Content-Type: application/json' -d '{question}'"
    if settings.tls_cert_file is not None:
        options += " -k"  # the certificate has the service's public name, not the address used here
    if settings.api_keys_file is not None:
        options += ' -H "Authorization: Bearer $KEY"'
    page = "explore" if settings.explore else "docs" if settings.docs else ""
    return (
        f"attention-service {__version__} starts on {url}\n"
        f"ready: it serves attention without a layer{LAYERS}\n"
        f"{f'open {url}/{page}, ' if page else ''}ask with: curl {url}/v1/attention {options}\n"
    )


def _check_source(settings: Settings, origin: str) -> None:
    """Raise SettingsError if a library for the source is missing, or the directory for what is fetched cannot be written."""
    from service.errors import LayerError
    from service.layers.set_source import SetSource
    from service.settings import SettingsError

    try:
        SetSource(settings.layers_source)
        settings.layers_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=settings.layers_dir).close()
    except LayerError as error:
        raise SettingsError(f"ATTENTION_LAYERS_SOURCE: {error.message}") from None
    except OSError as error:
        raise SettingsError(
            f"{origin}: {settings.layers_dir} must be writable, because fetched layers are kept there: {error.strerror}"
        ) from None


def _check_layers(settings: Settings, origin: str) -> None:
    """Warn if the directory has no layer; if it cannot be read, raise SettingsError with the option or variable of it."""
    from service.settings import SettingsError
    from service.supervisor.processes import write_log_line

    if settings.layers_source:
        _check_source(settings, origin)
        return
    try:
        has_layers = any(path.suffix == ".safetensors" for path in settings.layers_dir.iterdir())
    except OSError as error:
        raise SettingsError(f"{origin}: {error.filename} cannot be read: {error.strerror}") from None
    if not has_layers:
        reason = "the directory has none: `make layers` or `attention-service layers import` makes some"
        write_log_line("warning", "no_layers", reason=reason, effect="only attention without a layer is served")


def _check_start(settings: Settings) -> None:
    """Raise ServiceError if descriptors, keys, TLS files or the exporter would make the start of every worker fail."""
    from service.settings import SettingsError
    from service.supervisor.processes import max_connections

    max_connections(settings.max_connections)
    if settings.api_keys_file is not None:
        from service.api.auth.key_ring import read_keys

        read_keys(settings.api_keys_file)
    if settings.tls_cert_file is not None:
        _check_tls(settings.tls_cert_file, settings.tls_key_file)
    elif settings.tls_key_file is not None:
        raise SettingsError("ATTENTION_TLS_KEY_FILE needs ATTENTION_TLS_CERT_FILE")
    if settings.traces:
        try:
            from service.observability.trace_export import TraceExport

            TraceExport()
        except ModuleNotFoundError:
            reason = "ATTENTION_TRACES needs the extra `otel` (pip install 'attention-service[otel]')"
            raise SettingsError(reason) from None
        except ValueError as error:
            raise SettingsError(f"ATTENTION_TRACES: an OTEL_… variable is invalid: {error}") from None


def _check_tls(certificate: Path, key: Path | None) -> None:
    """Raise SettingsError if the files cannot be used; it names the setting, never a file's content or OpenSSL's text."""
    import ssl

    from service.settings import SettingsError

    for name, path in (("CERT", certificate), ("KEY", key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise SettingsError(f"ATTENTION_TLS_{name}_FILE: it cannot be read: {error.strerror}") from None
    try:
        # With a passphrase, even a wrong one, OpenSSL does not ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "?")
    except OSError:
        reason = "no certificate (PEM) and private key without a passphrase that fit together"
        raise SettingsError(f"ATTENTION_TLS_CERT_FILE: {reason}") from None


def without_unusable_gpu(settings: Settings) -> Settings:
    """Return the settings with the CPU as device if it is `auto` and torch cannot use the GPU that is here; log the reason."""
    from service.supervisor.processes import write_log_line

    if settings.device != "auto" or not _has_gpu():
        return settings
    # Another process asks, because this one never imports torch. A driver that is too old is the usual reason.
    asked = subprocess.run(
        [sys.executable, "-P", "-c", "import torch; torch.cuda.init()"], capture_output=True, text=True, check=False
    )
    if not asked.returncode:
        return settings
    reason = asked.stderr.strip().rpartition("\n")[2]
    write_log_line("warning", "gpu_unusable", reason=reason, effect="layers run on the CPU, with a worker a core")
    return settings.model_copy(update={"device": "cpu"})


def num_workers(settings: Settings) -> int:
    """Return the setting; by default 1 on a GPU, else the usable cores divided by the compute threads of a worker (1 to 64)."""
    from service.settings import usable_cores

    if settings.workers:
        return settings.workers
    has_gpu = settings.device == "cuda" or (settings.device == "auto" and _has_gpu())
    return 1 if has_gpu else max(1, min(64, usable_cores() // settings.compute_threads))


def _has_gpu() -> bool:
    """Return whether a GPU is here and torch was built for one, without importing torch."""
    # A container may have the device file of its own GPU only, which need not be the first.
    return not version("torch").endswith("+cpu") and any(DEVICES.glob("nvidia[0-9]*"))


def worker(
    port: Annotated[int, typer.Option()],
    slot: Annotated[int, typer.Option()],
    channel: Annotated[int, typer.Option()],
    run_dir: Annotated[Path, typer.Option()],
    peers: Annotated[int, typer.Option()] = 0,
) -> None:
    """Run one process of the service; `serve` starts it."""
    from service.attention.heap import keep_freed
    from service.observability.logs import configure_logs
    from service.settings import load_settings

    keep_freed()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = load_settings()
    configure_logs(settings.log_level, log_format=settings.log_format, worker=slot)
    raise typer.Exit(_run(settings, port, slot, channel, run_dir, peers))


def _run(settings: Settings, port: int, slot: int, descriptor: int, run_dir: Path, peers: int) -> int:
    """Open the channel to the supervisor and the port, import torch, and serve; return the exit code of the process."""
    from service.http.listener import BACKLOG
    from service.supervisor.channel import MAX_SUPERVISOR_BYTES, Channel
    from service.supervisor.processes import bind, raise_descriptor_limit, unbuffer_streams
    from service.worker.control_channel import ControlChannel

    unbuffer_streams()
    channel = ControlChannel(Channel(socket.socket(fileno=descriptor), MAX_SUPERVISOR_BYTES), has_peers=peers > 0)
    raise_descriptor_limit(settings.max_connections)
    listener = bind(settings.host, port)
    if not peers:
        # The first process listens at once: while it imports torch, an early request waits for its 503, and its connection is not
        # refused. A replacement does not listen yet: the kernel would send it requests that other workers could answer.
        listener.listen(BACKLOG)
    import torch  # only a worker does, and only after its listener exists

    # This thread computes too: it gets the setting's number of threads even if OMP_NUM_THREADS has another.
    torch.set_num_threads(settings.compute_threads)
    return _serve(settings, listener, channel, run_dir, slot)


def _serve(settings: Settings, listener: socket.socket, channel: ControlChannel, run_dir: Path, slot: int) -> int:
    """Serve to the end of the process, then write out its metrics, logs and spans; return the exit code."""
    from service.observability.logs import finish_logs
    from service.observability.metrics import Metrics
    from service.observability.telemetry import Telemetry
    from service.supervisor.run_directory import RunDirectory
    from service.supervisor.supervisor import EXIT_REFUSED

    export = None
    if settings.traces:
        from service.observability.trace_export import TraceExport  # saves memory: the SDK is loaded only if it is used

        export = TraceExport()
    run = RunDirectory(run_dir)
    with contextlib.suppress(OSError):  # the first heartbeat reports it
        run.restore()
    metrics = Metrics(run.metrics, slot)
    telemetry = Telemetry(metrics, None if export is None else export.tracer)
    try:
        server = _server(settings, listener, telemetry, channel, lambda: any([run.restore(), metrics.values.restore()]))
    except ServiceError as error:
        channel.report(start_error=error.message)
        return EXIT_REFUSED
    try:
        server.run()
        return server.exit_code
    finally:
        metrics.values.close()
        finish_logs()
        if channel.is_orphaned:
            run.close()
        if export is not None:
            export.close()


def _server(
    settings: Settings,
    listener: socket.socket,
    telemetry: Telemetry,
    channel: ControlChannel,
    restore: Callable[[], bool],
) -> Server:
    """Build the service and the server around it; raises ServiceError if the settings cannot be served."""
    from service.app import build
    from service.limits import transport_limits
    from service.worker.server import Server
    from service.worker.service import Service

    service = Service(settings, telemetry, channel, lambda code: server.leave(code), restore=restore)  # noqa: PLW0108 (made below)
    times = dict(delay_s=settings.drain_delay_s, grace_s=settings.shutdown_grace_s)
    tls = settings.tls_cert_file, settings.tls_key_file
    server = Server(build(service), service, listener, transport_limits(settings), **times, tls=tls)
    channel.ended = server.supervisor_ended
    service.readiness.joined = server.rebalance
    return server
