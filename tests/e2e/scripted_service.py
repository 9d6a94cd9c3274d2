"""A service of one layer that answers zeros at once, until `misbehave` says how it treats what comes."""

import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import safetensors.numpy

WIDTH = 4
LIMITS = {"body_bytes": 1 << 20, "tokens": 4096, "cells": 1 << 20}
LAYER = {
    "name": "zeros", "digest": "sha256:0", "num_heads": 1, "numerics": {"dtype": "float32"}, "limits": LIMITS,
    **dict.fromkeys(("query_width", "key_width", "value_width"), WIDTH),
}  # fmt: skip


class ScriptedService:
    """`with ScriptedService(misbehave) as service:`; `misbehave(handler)` returns true if it has dealt with the request.

    `answered` counts the references and all other answers of 200.
    """

    def __init__(self, misbehave=lambda handler: False) -> None:
        self.answered = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.send(200, json.dumps({"layers": [LAYER]}).encode())

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if service.answered >= REFERENCES and misbehave(self):
                    return
                service.answered += 1
                self.send(200, zeros(body, self.headers["Content-Type"]))

            def send(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in {"Content_Length": len(body), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


def zeros(body: bytes, content_type: str) -> bytes:
    """An answer without weights, of as many rows as the request has."""
    if content_type != "application/json":
        length = int.from_bytes(body[:8], "little")
        rows = json.loads(body[8 : 8 + length])["query"]["shape"][0]
        return safetensors.numpy.save({"output": np.zeros((rows, WIDTH), np.float32)})
    query = json.loads(body)["query"]
    rows = query["shape"][0] if isinstance(query, dict) else len(query)
    return json.dumps({"output": [[0.0] * WIDTH] * rows, "weights": None}).encode()


# Ten requests to the layer and two without one, each in three forms.
REFERENCES = 36


def hang(handler) -> bool:
    time.sleep(60)
    return True


def refuse_with(status, **headers):
    def misbehave(handler) -> bool:
        handler.send(status, b"{}", **headers)
        return True

    return misbehave


def every_other_time(misbehave):
    """It misbehaves with every second request, and answers the others."""
    numbers = itertools.count()
    return lambda handler: next(numbers) % 2 == 1 and misbehave(handler)


def no_answer(handler) -> bool:
    handler.close_connection = True
    return True


def half_an_answer(handler) -> bool:
    handler.send(200, b"{", Content_Length="100")
    return no_answer(handler)


def one_at_a_time(seconds: float):
    """Each answer takes this long, and waits for those before it."""
    turn = threading.Lock()

    def misbehave(handler) -> bool:
        with turn:
            time.sleep(seconds)
        return False

    return misbehave
