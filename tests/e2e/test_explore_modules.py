"""The explorer's modules outside a browser: hostile text survives every export, and runs in none."""

import base64
import csv
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attention_client

ROOT = Path(__file__).parents[2]
EXPORT = (ROOT / "service" / "explore" / "export.js").as_uri()
# It reads a list of [function, *arguments] and prints the list of results.
BRIDGE = f"""
import {{ readFileSync }} from "node:fs";
import * as module from "{EXPORT}";
const calls = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(calls.map(([name, ...given]) => module[name](...given))));
"""
HOSTILE = ["it's", 'say "no"', "two\nlines\r\n", "@file", "=1+1", "+1", "-1", "\t=1", "＝1", "a,b;c", "", "\ud800"]
HOSTILE += ["$HOME `id` $(id) !! \\ %s ''", "😀 👩‍👩‍👧 日本"]
HOSTILE += ["\u202egnp.exe", "\u2028\u2029\x7f\x9b", "\x00\x1b[2J", "\U000e0041", "]]>&amp;<!--", '" onload="x']
HOSTILE += ["</script><script>alert(1)</script>"]
N = len(HOSTILE)
SCALE = {"kind": "sequential", "max": 1, "dark": True}
CELLS = {"values": [n / N**2 for n in range(N**2)], "masked": [n % 5 == 0 for n in range(N**2)]}
DRAWN: dict[str, Any] = {"title": HOSTILE[-1], "rows": HOSTILE, "columns": HOSTILE[::-1], "scale": SCALE} | CELLS
TAGS = "svg|rect|defs|pattern|text|g|path|html|head|meta|title|style|body|h1|p|table|caption|thead|tbody|tr|td|th"
SVG = "{http://www.w3.org/2000/svg}"
BASE = "http://127.0.0.1:8000/under/it's/"

IS_MISSING = shutil.which("node") is None
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(IS_MISSING, reason="no node: apt-get install nodejs")]


def exported(*calls: list) -> list[str]:
    command = ["node", "--input-type=module", "-e", BRIDGE]
    ran = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, check=True)
    found: list[str] = json.loads(ran.stdout)
    return found


def test_masks_requests_and_figures_hold_their_promises():
    tests = ROOT / "tests" / "e2e" / "browser" / "explore_modules.test.mjs"
    ran = subprocess.run(["node", "--test", tests], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout


def test_a_copied_command_sends_the_body_as_it_is_and_never_the_key():
    bodies = [{"text": text, "layer": 3} for text in [*HOSTILE, "it's long " * 20_000]]
    path = {"path": "v1/attention"}
    commands = exported(*(["curl", path | {"body": body}, BASE, n % 2 == 1] for n, body in enumerate(bodies)))
    curl = 'curl() { for last; do :; done; [ "$last" = @- ] && cat || printf %s "$last"; printf %s "$2" >&2; }\n'
    for n, (body, command) in enumerate(zip(bodies, commands, strict=True)):
        ran = subprocess.run(["sh"], input=curl + command, capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) == body
        assert ran.stderr == f"{BASE}v1/attention"
        assert ("Bearer $ATTENTION_KEY" in command) == (n % 2 == 1)
        assert command.replace("\n", "").isprintable()


class RecordedClient:
    """A client that keeps what it was called with."""

    def __init__(self, calls: list, *given: Any, **options: Any):
        self.calls, self.weights = calls, None
        calls.append((given, options))

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            self.calls.append((name, given, options))
            return {"weights": None} if name.endswith("json") else self

        return call


def test_a_copied_program_asks_for_the_same_picture(monkeypatch):
    calls: list = []
    monkeypatch.setattr(attention_client, "Client", lambda *given, **options: RecordedClient(calls, *given, **options))
    monkeypatch.setenv("ATTENTION_KEY", "k")
    weights = {"form": "heads", "heads": [1], "dtype": "float32"}
    data = base64.b64encode(np.array([0, -math.inf], np.float32).tobytes()).decode()
    masks: list = [{"kind": "causal", "align": "top_left"}, {"kind": "bias", "axes": "ls", "values": [["-inf", 0.5]]}]
    masks += [{"kind": "bias", "values": {"dtype": "float32", "shape": [1, 2], "data": data}}]
    body = {"text_pair": "b", "layer": 3, "weights": weights, "masks": masks, "entropy": True}
    source = {"model": "minilm", "own": None}
    pictures = [{"source": source, "path": "", "body": body | {"text": text}} for text in HOSTILE]
    own = {"query": [[1, -0.5]], "masks": [{"kind": "bias", "values": ["-inf"]}], "weights": weights, "key": None}
    pictures += [
        {"source": {"own": {}}, "path": path, "body": own} for path in ("v1/layers/demo/attend", "v1/attention")
    ]

    (program,) = exported(["python", pictures, "http://127.0.0.1:8000/a/", True])
    assert program.replace("\n", "").isprintable()
    exec(compile(program, "copied", "exec"), {})
    made, *asked = calls
    assert made == (("http://127.0.0.1:8000/a",), {"api_key": "k"})
    assert [call[1] for call in asked] == [("minilm", text, "b") for text in HOSTILE] + [("demo", own), (own,)]
    assert [call[0] for call in asked[-3:]] == ["attend_text", "attend_json", "attention_json"]
    options = asked[0][2]
    assert (options["layer"], options["entropy"], options["weights"].heads) == (3, True, [1])
    causal, bias, same = options["masks"]
    assert (causal.kind, causal.fields, bias.fields) == ("causal", {"align": "top_left"}, {"axes": "ls"})
    assert (bias.values.tolist(), same.values.tolist()) == ([[-math.inf, 0.5]], [[0, -math.inf]])


def test_a_csv_file_keeps_its_labels_and_none_is_a_formula():
    (text,) = exported(["csv", DRAWN])
    head, *rows = csv.reader(io.StringIO(text, newline=""))
    assert text.endswith("\r\n")
    for found, label in zip([*head[1:], *(row[0] for row in rows)], [*HOSTILE[::-1], *HOSTILE], strict=True):
        assert found.removeprefix("'") == label
        assert not found.startswith(("=", "+", "-", "@", "\t", "＝"))
    assert np.allclose([[float(figure) for figure in row[1:]] for row in rows], np.reshape(DRAWN["values"], (N, N)))


def as_xml(text: str) -> str:
    """Text as XML can hold it and gives it back."""
    return re.sub("[\0-\x08\x0b-\x1f\ud800-\udfff]", "\ufffd", text.replace("\r\n", "\n"))


def test_drawings_and_documents_are_well_formed_name_every_row_and_key_and_run_nothing():
    drawing, document = (
        list(ET.fromstring(text.encode()).iter()) for text in exported(["svg", DRAWN], ["html", DRAWN, HOSTILE])
    )
    for element in [*drawing, *document]:
        assert re.fullmatch(TAGS, element.tag.removeprefix(SVG))
        assert not [name for name in element.attrib if name.startswith("on") or name.endswith(("href", "src"))]

    def texts(elements: list, tag: str) -> list[str]:
        return [element.text or "" for element in elements if element.tag == tag]

    assert texts(drawing, f"{SVG}text")[1 : 1 + 2 * N] == [as_xml(name) for name in HOSTILE + HOSTILE[::-1]]
    assert texts(document, "th") == [as_xml(name) for name in HOSTILE[::-1] + HOSTILE]
    assert texts(document, "p") == [as_xml(line) for line in HOSTILE]
