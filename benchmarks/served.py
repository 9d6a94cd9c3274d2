"""Served tokens/s over in-process packed tokens/s, in one run on one machine.

Starts the service on a free port with the layers of LAYERS_DIR, drives it in a closed loop from one process over
keep-alive connections, and runs the same layer packed in this process, before and after. W1 is mixed lengths 8 … 256, W2 is
16 tokens; bodies are safetensors and base64 JSON, the answers likewise.

    python benchmarks/served.py [--layers-dir .layers] [--layer minilm-l0] [--seconds 8] [--concurrency 32] [--workers N]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from service.attention.call import Call
from service.attention.layer import Layer
from service.layers.store import Store
from service.settings import usable_cores

LENGTHS = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def lengths(name: str) -> list[int]:
    chosen = random.Random(0)
    return [16] * 64 if name == "W2" else [chosen.choice(LENGTHS) for _ in range(64)]


def in_process(layer: Layer, sizes: list[int], seconds: float, threads: int) -> float:
    """Tokens/s of this process with so many torch threads, 32 sequences a batch."""
    torch.set_num_threads(threads)
    calls = [Call("", torch.randn(1, n, layer.spec.query_width)) for n in sizes]
    batches = [calls[:32], calls[32:]]
    tokens, started = 0, time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - started < seconds:
            for batch in batches:
                layer.forward(batch)
            tokens += sum(sizes)
    return tokens / (time.perf_counter() - started)


def as_base64(array: np.ndarray) -> bytes:
    data = base64.b64encode(array.tobytes()).decode()
    return json.dumps({"query": {"dtype": "float32", "shape": list(array.shape), "data": data}}).encode()


WIRES: dict[str, tuple[str, Callable[[np.ndarray], bytes]]] = {
    "safetensors": ("application/vnd.safetensors", lambda array: save({"query": array})),
    "base64": ("application/json", as_base64),
}


def requests(path: str, width: int, sizes: list[int], wire: str) -> list[bytes]:
    media_type, write = WIRES[wire]
    found = []
    for n in sizes:
        body = write(np.random.default_rng(n).standard_normal((n, width), np.float32))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
    return found


async def drive(
    port: int, bodies: list[bytes], sizes: list[int], concurrency: int, seconds: float
) -> tuple[float, list[float]]:
    """Tokens/s and the latencies of a closed loop."""
    end, tokens, latencies = time.perf_counter() + seconds, 0, []

    async def client(first: int) -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        i = first
        while (began := time.perf_counter()) < end:
            writer.write(bodies[i % len(bodies)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head[:20], head
            found = re.search(rb"content-length: (\d+)", head)
            assert found is not None
            await reader.readexactly(int(found[1]))
            latencies.append(time.perf_counter() - began)
            tokens += sizes[i % len(sizes)]
            i += concurrency
        writer.close()

    await asyncio.gather(*(client(i) for i in range(concurrency)))
    return tokens / seconds, latencies


def start(layers_dir: Path, workers: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--layers-dir", str(layers_dir)]
    server = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = next(json.loads(line)["port"] for line in server.stdout if '"serving"' in line and '"port"' in line)
    return server, port


def wait_ready(port: int) -> None:
    import httpx2

    for _ in range(600):
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the service did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers-dir", type=Path, default=Path(".layers"))
    parser.add_argument("--layer")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    cores = usable_cores()
    store = Store(options.layers_dir)
    name = options.layer or store.names()[0]
    stored = store.load(name)
    layer = Layer(stored.spec, stored.tensors, dtype=torch.float32, device=torch.device("cpu"))
    bounds = {w: max(in_process(layer, lengths(w), options.seconds / 4, n) for n in (1, cores)) for w in ("W1", "W2")}
    server, port = start(options.layers_dir, options.workers)
    try:
        import threading

        assert server.stdout is not None
        threading.Thread(target=server.stdout.read, daemon=True).start()
        wait_ready(port)
        for w, wire in itertools.product(("W1", "W2"), WIRES):
            sizes = lengths(w)
            bodies = requests(f"/v1/layers/{name}/attend", stored.spec.query_width, sizes, wire)
            asyncio.run(drive(port, bodies, sizes, options.concurrency, 2))
            served, latencies = asyncio.run(drive(port, bodies, sizes, options.concurrency, options.seconds))
            cuts = statistics.quantiles(latencies, n=100)
            print(
                f"{w} {name} {wire}: served {served:,.0f} tokens/s ({len(latencies) / options.seconds:,.0f} req/s, "
                f"p50 {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms), in process (best of 1 and {cores} threads) "
                f"packed {bounds[w]:,.0f}: ratio {served / bounds[w]:.2f}"
            )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
