"""`attention golden --url`: a true service passes, and one that ignores masks is found."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def golden(directory, url) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attention_client.cli", "golden", "--out", str(directory), "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def maskless(url):
    """The service behind a relay that drops boolean masks."""

    class Relay(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["masks"] = [mask for mask in body["masks"] if mask["kind"] not in ("attend", "ignore")]
            answer = httpx2.post(f"{url}{self.path}", json=body)
            self.send_response(answer.status_code)
            for name in ("Content-Type", "Content-Length"):
                self.send_header(name, answer.headers[name])
            self.end_headers()
            self.wfile.write(answer.content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_service_gives_the_references(url, tmp_path):
    done = golden(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert "the largest error is 0." in " ".join(done.stdout.split())


def test_a_service_that_drops_masks_is_found(maskless, tmp_path):
    done = golden(tmp_path, maskless)
    assert done.returncode == 1
    assert re.match(r"attention: the service's (output|lse) of \w+ is off by", done.stderr)
    assert done.stderr.count("\n") == 1
