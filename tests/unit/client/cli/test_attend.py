"""`sdpa` and `show`: attention on one's own arrays, and weights from a file."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from typer.testing import CliRunner

from attention_client import Client
from attention_client.cli import app as cli
from attention_client.cli import asking
from attention_client.cli.app import app
from attention_client.errors import ServiceError
from tests import oracle

pytestmark = pytest.mark.usefixtures("service")


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def files(tmp_path):
    """Query [2, 4, 3, 8], key and value [2, 2, 5, 8] on disk."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 4, 3, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(shape).astype(np.float32))
    return tmp_path


def nobody(url: str, **options: Any) -> Client:
    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    return Client(url, **options, transport=httpx2.MockTransport(refuse))


def options(directory) -> list[object]:
    return [part for name in ("query", "key", "value") for part in (f"--{name}", directory / f"{name}.npy")]


def test_attention_writes_the_output_and_every_requested_tensor(files):
    out = files / "out.npz"
    asked = (
        "--scale",
        0.5,
        "--softcap",
        2,
        "--causal",
        "top_left",
        "--weights",
        "heads",
        "--scores",
        "masked",
        "--lse",
    )
    text = run("sdpa", *options(files), *asked, "--out", out)
    query, key, value = (np.load(files / f"{name}.npy") for name in ("query", "key", "value"))
    expected = oracle.scaled_dot_product((query, key, value), [oracle.Causal(0)], scale=0.5, softcap=2.0)
    with np.load(out) as arrays:
        found = dict(arrays)
    assert np.allclose(found["output"], expected.output, atol=1e-5)
    assert np.allclose(found["weights"], expected.weights, atol=1e-5)
    assert np.allclose(found["lse"], expected.lse, atol=1e-5)
    assert np.array_equal(np.isneginf(found["scores"]), np.isneginf(expected.masked))
    assert '"sdpa"' in text


SIZES = [(2, 4, 3, 5), (2, 8, 40, 70)]
MASKS = [
    "causal align=top_left",
    "causal offset=[1,0]",
    "window left=1 right=0 align=top_left",
    "lengths values=[1,2]",
    "attend axes=ls values=ls.npy",
    "ignore axes=bs values=bs.npy",
    "bias values=bhls.npy",
]


@pytest.fixture
def sized(tmp_path, monkeypatch, request):
    """Query, key, value and masks of the sizes B, H, L, S in the current directory."""
    monkeypatch.chdir(tmp_path)
    b, h, queries, keys = request.param
    rng = np.random.default_rng(b)
    for name, rows in (("query", queries), ("key", keys), ("value", keys)):
        np.save(f"{name}.npy", rng.standard_normal((b, h, rows, 8)).astype(np.float32))
    np.save("ls.npy", np.tri(queries, keys, dtype=bool))
    np.save("bs.npy", np.arange(keys) > rng.integers(1, keys, (b, 1)))
    np.save("bhls.npy", rng.standard_normal((b, h, queries, keys)).astype(np.float32))


def answer(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("sdpa", *options(Path()), *arguments, "--json"))
    return found


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("sized", SIZES, indirect=True)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_the_command_line_is_that_of_a_request(mask):
    def value_of(text: str) -> Any:
        return np.load(text).tolist() if text.endswith(".npy") else text if text.isidentifier() else json.loads(text)

    kind, *fields = mask.split()
    sent = {"kind": kind} | {name: value_of(text) for name, _, text in (field.partition("=") for field in fields)}
    body = {name: np.load(f"{name}.npy").tolist() for name in ("query", "key", "value")}
    Path("body.json").write_text(json.dumps(body | {"masks": [sent]}), encoding="utf-8")
    asked = json.loads(run("sdpa", "--request", "body.json", "--json"))
    np.testing.assert_allclose(answer("--mask", mask)["output"], asked["output"], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("sized", SIZES, indirect=True)
@pytest.mark.parametrize(
    ("weights", "names"),
    [
        ("heads", {"weights"}),
        ("mean", {"weights"}),
        ("heads heads=[0] queries=[0,1] dtype=float16", {"weights"}),
        ("top_k k=2", {"values", "indices", "rest"}),
        ("contributions queries=[1]", {"weights"}),
    ],
)
def test_every_form_of_weights_is_printed_as_json_and_saved(weights, names):
    found = answer("--weights", weights, "--out", "x.npz", "--lse", "--entropy")
    assert {*found} >= {"output", "lse", "entropy", "masked_rows", "layer", *names}
    with np.load("x.npz") as arrays:
        for name in ("output", "lse", "entropy", *names):
            np.testing.assert_allclose(np.array(found[name], float), arrays[name].astype(float), rtol=1e-6)


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("sized", SIZES, indirect=True)
def test_indices_that_come_as_lists_are_whole_numbers():
    body = {name: np.load(f"{name}.npy").tolist() for name in ("query", "key", "value")}
    Path("body.json").write_text(json.dumps(body | {"weights": {"form": "top_k", "k": 1}}), encoding="utf-8")
    run("sdpa", "--request", "body.json", "--out", "x.npz")
    with np.load("x.npz") as arrays:
        assert (arrays["indices"].dtype, arrays["values"].dtype) == (np.int32, np.float32)


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("sized", SIZES, indirect=True)
def test_an_npy_file_holds_the_output_alone_and_json_has_minus_infinity_as_a_string():
    found = answer("--mask", "lengths values=[0,0]", "--lse", "--out", "x.npy")
    assert np.load("x.npy").tolist() == found["output"]
    assert {row for sequence in found["lse"] for head in sequence for row in head} == {"-inf"}
    text = run("sdpa", *options(Path()), "--lse", "--out", "x.npy")
    assert text.splitlines()[-1] == "the output alone is written to x.npy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mask", "attend axes=ls values=missing.npy"), "^missing.npy cannot be read: No such file or directory$"),
        (("--mask", "attend values"), '^--mask: "values" is not understood'),
        (("--mask", "kind=attend"), '^--mask: "kind=attend" is not understood'),
        (("--mask", ""), "^--mask: the kind is missing$"),
        (("--mask", "attend kind=ignore values=ls.npy"), '^--mask: "kind=ignore" is not understood'),
        (("--mask", "lengths values=[1,2] values=[2,2]"), r'^--mask: "values=\[2,2\]" is not understood'),
        (("--request", "body.json"), "^give either --query"),
        (
            ("--mask", "padding values=1"),
            '^422 bad_mask: --mask "padding values=1": kind must be one of attend, ignore',
        ),
        (("--mask", "window width=3"), 'unknown field "width" in --mask "window width=3"; the fields are'),
        (("--weights", "top_k"), "^422 invalid: --weights: k is required"),
        (("--weights", "max"), "--weights: form must be one of"),
        (("--weights", "heads head=0"), 'unknown field "head" in --weights'),
        (("--weights", "heads heads=[9]"), "^422 invalid: --weights: heads must be"),
        (("--mask", "causal", "--mask", "window left=x"), '--mask "window left=x": left must be a whole number'),
        (("--causal", "sideways"), "^422 bad_mask: --causal: align must be one of"),
        (("--scores", "raw"), "^422 invalid: --scores: stage must be one of"),
        (("--layout", "hld"), "--layout|--query"),
        (("--scale", "nan"), "finite numbers"),
        (("--num-heads", "3"), "^422 [a-z_]+: --num-heads"),
        (("--softcap", "-1"), "^422 [a-z_]+: --softcap must be"),
        (("--out", "nowhere/x.npy"), "^nowhere/x.npy cannot be written: No such file or directory$"),
    ],
)
@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("sized", SIZES, indirect=True)
def test_a_mistake_in_an_option_is_one_sentence(arguments, words):
    with pytest.raises(ServiceError, match=words) as raised:
        answer(*arguments)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "arguments",
    [
        ("attend", "small", "--query", "missing"),
        ("attend", "small", "--request", "missing"),
        ("sdpa", "--query", "missing"),
        ("show", "small", "--query", "missing"),
        ("show", "--weights", "missing"),
        ("compare", "missing"),
    ],
)
def test_a_missing_file_is_one_sentence_with_its_path(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServiceError, match=r"^missing cannot be read: No such file or directory$"):
        run(*arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"query": [[1]], "query": [[2]], "key": [[1]], "value": [[1]]}', "has a duplicate key$"),
        (
            '{"query": [[1]], "key": [[1]], "value": [[1]], "masks": [{"kind": "attend", "kind": "ignore"}]}',
            "duplicate key$",
        ),
        (
            '{"query": [[1]], "key": [[1]], "value": [[1]], "encoding": "hex"}',
            'encoding must be one of .* got "hex"$',
        ),
        ("[[1]]", "must be a JSON object$"),
        ("5", "must be a JSON object$"),
    ],
)
def test_a_request_file_is_refused_for_what_the_service_refuses_in_a_body(tmp_path, content, words):
    (tmp_path / "body.json").write_text(content, encoding="utf-8")
    with pytest.raises(ServiceError, match=words):
        run("sdpa", "--request", tmp_path / "body.json")


@pytest.mark.parametrize("encoding", [None, "list", "base64"])
def test_a_bfloat16_answer_has_the_same_numbers_whatever_encoding_the_file_asks_for(tmp_path, encoding):
    numbers = np.array([[1.5, -2.25], [3.0, -0.5]], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    tensor = {"dtype": "bfloat16", "shape": [2, 2], "data": base64.b64encode(bits.tobytes()).decode()}
    body = dict.fromkeys(("query", "key", "value"), tensor) | {"scale": 1e4, "masks": [{"kind": "causal"}]}
    (tmp_path / "body.json").write_text(json.dumps(body | {"encoding": encoding}), encoding="utf-8")
    assert json.loads(run("sdpa", "--request", tmp_path / "body.json", "--json"))["output"] == numbers.tolist()


def archive(compressed: bytes) -> bytes:
    """An .npz file whose one array has these bytes instead of its own."""
    made, array = io.BytesIO(), np.ones((2, 4), np.float32)
    np.savez_compressed(made, weights=array)
    content = made.getvalue()
    place = content.index(b".npy") + len(b".npy") + 20
    return content[:place] + compressed + content[place + len(compressed) :]


def header(shape: str) -> bytes:
    """The head of an .npy file of format 1.0 without its data."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


DAMAGED = {
    "empty": b"",
    "magic of a zip alone": b"PK\x03\x04",
    "no zip": b"PK\x03\x04" + b"x" * 60,
    "no npy": b"\x93NUMPY\x01",
    "damaged array of a zip": archive(b"\xff" * 16),
    "zip that is cut off": archive(b"")[:-30],
    "npy without data": header("(2, 4)"),
    "npy that no memory holds": header(f"({10**15},)"),
    "npy with a damaged header": header("((("),
    "text": b"1 2 3",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize(
    "arguments",
    [
        ("attend", "small", "--query", "damaged"),
        ("sdpa", "--query", "q.npy", "--key", "damaged"),
        ("sdpa", "--query", "q.npy", "--mask", "attend axes=ls values=damaged"),
        ("sdpa", "--request", "damaged"),
        ("show", "small", "--query", "damaged"),
        ("show", "--weights", "damaged"),
        ("compare", "damaged"),
    ],
)
def test_a_damaged_file_is_one_sentence_with_its_path(tmp_path, monkeypatch, arguments, content):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    Path("damaged").write_bytes(content)
    with pytest.raises(ServiceError, match=r"^damaged (is not a|must hold one)[^\n]*$"):
        run(*arguments)


@pytest.mark.parametrize(
    ("option", "word"),
    [("--layout", "\udcff"), ("--causal", "\udcff"), ("--mask", "\udcff"), ("--num-heads", str(10**20))],
)
@pytest.mark.parametrize("where", [(), ("--url", "http://127.0.0.1:9")])
def test_a_word_that_json_cannot_hold_is_one_sentence(files, option, word, where):
    """Bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    with pytest.raises(ServiceError):
        run("sdpa", *options(files), option, word, *where)


def test_weights_that_are_not_from_0_to_1_are_drawn_too(tmp_path):
    np.save(tmp_path / "w.npy", np.array([[-0.5, np.nan], [np.inf, 1.5]]))
    rows = run("show", "--weights", tmp_path / "w.npy").splitlines()[2:4]
    assert [row.split()[1:3] for row in rows] == [["-50", "??"], ["??", "150"]]


def test_the_summary_of_infinite_numbers_has_no_warning_of_numpy(tmp_path, monkeypatch, capfd):
    np.save(tmp_path / "q.npy", np.array([[1e20]], np.float32))
    np.save(tmp_path / "k.npy", np.array([[1e20], [-1e20]], np.float32))
    words = f"sdpa --query {tmp_path}/q.npy --key {tmp_path}/k.npy --value {tmp_path}/k.npy --scores scaled"
    monkeypatch.setattr(sys, "argv", ["attention", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, err) == (None, "")
    assert "scores float32 [1, 2]  min -inf  mean nan  max inf" in out


@pytest.mark.parametrize("command", ["attend small --query q.npy", "sdpa --query q.npy", "golden --out x"])
def test_every_command_that_asks_takes_the_address_of_the_environment_and_names_it(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    monkeypatch.setenv("ATTENTION_URL", "http://127.0.0.1:9")
    words = r"^no answer from http://127\.0\.0\.1:9: ConnectError\. Is the service running there\?$"
    with pytest.raises(ServiceError, match=words):
        run(*command.split())


@pytest.mark.parametrize("command", ["attend small --query q.npy", "sdpa --query q.npy", "show small --query q.npy"])
def test_without_an_address_this_machine_is_asked_and_where_nothing_answers_the_command_says_how_to_start(
    tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    monkeypatch.delenv("ATTENTION_URL")
    monkeypatch.setattr(asking, "Client", nobody)
    words = r"^no answer from http://127\.0\.0\.1:8000: .* Start one with `attention-service serve`, or give"
    with pytest.raises(ServiceError, match=words):
        run(*command.split())


@pytest.mark.parametrize(
    "command", ["attend small --query q.npy", "sdpa --query q.npy", "show small --query q.npy", "golden --out x"]
)
@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [({}, "--url http://x/v1", "--url: give the address without /v1, like http://x"), ({}, "--url x:8000", "--url must be like http://127"),
     ({"URL": "http://x/v1/"}, "", "--url: give the address without /v1, like http://x"),
     ({"URL": "x"}, "", "--url must be like"),
     ({"CLIENT_KEY": "a b"}, "", "--api-key must be printable ASCII"),
     ({}, "--api-key é", "--api-key must be printable ASCII"),
     ({"URL": "http://me:it@x"}, "--api-key k", "--api-key and a user name in --url exclude each other"),
     ({"CLIENT_KEY": "k"}, "--url http://me:it@x", "--api-key and a user name in --url exclude each other")],
)  # fmt: skip
def test_an_address_or_a_key_is_refused_by_the_name_of_its_option(
    tmp_path, monkeypatch, command, environment, options, words
):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    for name, value in environment.items():
        monkeypatch.setenv(f"ATTENTION_{name}", value)
    with pytest.raises(ServiceError, match=f"^{re.escape(words)}"):
        run(*command.split(), *options.split())


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("option", ["--scale", "--softcap"])
def test_a_number_that_json_lacks_is_refused_by_the_name_of_its_option(tmp_path, monkeypatch, option, number):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 4), np.float32))
    with pytest.raises(ServiceError, match=rf"^{option} must be JSON: .* finite numbers"):
        run("sdpa", "--query", "q.npy", option, number)


@pytest.mark.parametrize("command", ["attend small --query q.npy", "show small --query q.npy"])
@pytest.mark.parametrize("slashes", ["/", "//"])
def test_an_address_may_end_with_a_slash(tmp_path, monkeypatch, command, slashes):
    monkeypatch.chdir(tmp_path)
    np.save("q.npy", np.ones((2, 16), np.float32))
    assert run(*command.split(), "--url", f"http://service{slashes}")


@pytest.mark.parametrize("name", ["y.txt", "y", "y.npy.gz", "y.json", "/dev/null"])
@pytest.mark.parametrize("command", ["attend small --query missing.npy", "sdpa --query missing.npy"])
def test_out_refuses_a_suffix_that_it_does_not_write_before_anything_is_asked(tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServiceError, match=rf"^--out {name}: the file must end with \.npy or \.npz$"):
        run(*command.split(), "--out", name)


def test_a_suffix_in_capitals_is_the_same(files):
    run("sdpa", *options(files), "--out", files / "y.NPY")
    assert np.load(files / "y.NPY").shape == (2, 4, 3, 8)


@pytest.mark.parametrize("size", [2, 12])
def test_a_weight_of_one_is_drawn_as_a_hundred_hundredths(tmp_path, size):
    np.save(tmp_path / "w.npy", np.eye(size, dtype=np.float32))
    text = run("show", "--weights", tmp_path / "w.npy")
    rows = [line for line in text.splitlines() if "1.000" in line]
    assert len(rows) == size
    assert all(row.split().count("100") == 1 for row in rows)


def test_attention_refuses_what_the_service_refuses(files):
    with pytest.raises(ServiceError, match="layout"):
        run("sdpa", *options(files), "--layout", "hld")


@pytest.mark.parametrize(("shape", "title"), [((2, 3, 4, 4), "w.npz, head 0"), ((2, 4, 4), "w.npz"), ((4, 4), "w.npz")])
def test_show_draws_weights_from_a_file(tmp_path, shape, title):
    """Its title names a head only if the file has heads."""
    weights = np.zeros(shape, np.float32)
    weights[..., 0] = 1.0
    np.savez(tmp_path / "w.npz", weights=weights)
    text = run("show", "--weights", tmp_path / "w.npz", "--legend", "--tokens", "a b c d")
    assert text.splitlines()[0].strip() == title


def test_show_draws_the_sequence_and_head_that_are_chosen(tmp_path):
    weights = np.zeros((2, 3, 4, 4), np.float32)
    weights[1, 2, :, 3] = 1.0
    np.save(tmp_path / "w.npy", weights)
    text = run("show", "--weights", tmp_path / "w.npy", "--sequence", 1, "--head", 2)
    assert text.splitlines()[0].strip() == "w.npy, head 2"
    assert text.count("3 1.000") == 4


@pytest.mark.parametrize("name", ["w[v2].npy", "[red]w[.npy", "w[.npy", ":key:.npy"])
def test_names_of_files_are_printed_as_they_are(files, name):
    """What rich calls markup is text in a name; a path may also have a closing tag."""
    np.save(files / "w.npy", np.eye(4, dtype=np.float32))
    assert run("show", "--weights", (files / "w.npy").rename(files / name)).splitlines()[0].strip() == name
    for out in (files / name, files / "x[" / f"y]{name}"):
        out.parent.mkdir(exist_ok=True)
        text = run("sdpa", *options(files), "--out", out)
        assert text.splitlines()[-1].endswith(f"written to {out}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show",), "either a layer or --weights"),
        (("show", "layer", "--weights", "w.npz"), "either a layer or --weights"),
        (("show", "--weights", "w.npz", "--query", "w2.npy"), "either a layer or --weights"),
        (("show", "--weights", "w.npz", "--request", "w2.npy"), "either a layer or --weights"),
        (("show", "--weights", "w.npz", "--causal", "top_left"), "either a layer or --weights"),
        (("show", "--weights", "w.npz", "--mask", "causal"), "either a layer or --weights"),
        (("show", "small", "--query", "q16.npy", "--head", 9), "^422 invalid: --head must be a number from 0 to 3"),
        (("show", "small", "--query", "w2.npy"), '^422 bad_shape: --query has 4 features, layer "small" takes 16$'),
        (("attend", "small", "--query", "q16.npy", "--key", "w2.npy"), "^422 bad_shape: --key has 4 features"),
        (("attend", "small", "--query", "whole.npy"), "^422 bad_dtype: the dtype of --query must be"),
        (("sdpa", "--query", "w2.npy", "--key", "w2.npy"), "^422 invalid: --value is required$"),
        (("attend", "layer", "--request", "w2.npy", "--key", "w2.npy"), "^give either --query"),
        (("attend", "layer", "--request", "w2.npy", "--value", "w2.npy"), "^give either --query"),
        (("attend", "layer", "--key", "w2.npy"), "^give either --query"),
        (("show", "--weights", "missing.npz"), "missing.npz"),
        (("show", "--weights", "w.npz", "--sequence", 2), "--sequence must be below 2"),
        (("show", "--weights", "w3.npy", "--sequence", 2), "--sequence must be below 2"),
        (("show", "--weights", "w2.npy", "--sequence", 1), "--sequence must be below 1"),
        (
            ("show", "--weights", "w3.npy", "--head", 0),
            r"^w3.npy has no heads .* float32 \[2, 4, 4\]; --sequence chooses",
        ),
        (("show", "--weights", "w2.npy", "--head", 3), r"^w2.npy has no heads to choose from: float32 \[4, 4\]; "),
        (("show", "--weights", "none.npy"), r"must hold weights .* got float32 \[4, 0\]"),
        (("show", "--weights", "w.npz", "--head", 3), "--head must be below 3"),
        (("show", "--weights", "k.npz"), "^k.npz has no array called weights$"),
        (("show", "--weights", "empty.npz"), "^empty.npz has no array called weights$"),
        (("show", "--weights", "flat.npy"), "must hold weights"),
    ],
)
def test_show_says_what_is_wrong_with_the_file_or_the_choice(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    np.savez("w.npz", weights=np.ones((2, 3, 4, 4), np.float32))
    np.save("q16.npy", np.ones((3, 16), np.float32))
    np.save("whole.npy", np.ones((3, 16), np.int64))
    np.savez("k.npz", output=np.ones((4, 4)), values=np.ones((4, 2)))
    np.savez("empty.npz")
    for name, shape in {"flat": (4,), "w2": (4, 4), "w3": (2, 4, 4), "none": (4, 0)}.items():
        np.save(f"{name}.npy", np.ones(shape, np.float32))
    with pytest.raises(ServiceError, match=words):
        run(*arguments)


def test_show_writes_the_labels_of_a_saved_request_on_the_axes_unless_tokens_are_given(tmp_path):
    saved = {"request": {"query": np.eye(3, 16).tolist()}, "labels": ["The", " cat", "sat"]}
    (tmp_path / "saved.json").write_text(json.dumps(saved), encoding="utf-8")
    asked = ("show", "small", "--request", tmp_path / "saved.json")
    assert re.search(r"The +cat +sat +strongest", run(*asked))
    assert re.search(r"a +b +c +strongest", run(*asked, "--tokens", "a b c"))
