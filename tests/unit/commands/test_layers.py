"""`attention-service layers`: the output and the file of an import, and the message for each mistake."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from service import cli
from service.attention.spec import Rotary, Window
from service.commands import layers as commands
from service.commands import parity
from service.layers import directory
from service.layers.importer import import_layer
from service.layers.store import Store, StoredLayer
from service.settings import load_settings
from tests.unit.layers.checkpoints import linears, random, save_safetensors

SIZES = [(12, 3), (64, 4)]
FLOAT64 = " with float64 (the source is no directory with a config.json)\n"


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd):
    """Return a function that runs a `layers` command in the directory of the test and returns its exit code and output."""
    monkeypatch.setenv("ATTENTION_LAYERS_DIR", str(tmp_path / "layers"))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attention-service", "layers", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def gpt2(width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Conv1D weights are [in, out]."""
    made = {"c_attn.weight": random(width, 3 * width, seed=seed) / width**0.5, "c_attn.bias": random(3 * width)}
    made |= {"c_proj.weight": random(width, width, seed=seed) / width**0.5, "c_proj.bias": random(width)}
    return {f"h.0.attn.{key}": value for key, value in made.items()}


def curl(method: str) -> str:
    return f'curl -X {method} http://127.0.0.1:8000/v1/layers/mine -H "Authorization: Bearer $KEY"'


def file(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str = "x.safetensors") -> Path:
    return save_safetensors(tmp_path / name, tensors)


@pytest.mark.parametrize(("width", "heads"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_import_prints_family_heads_dtype_and_parity(run_command, tmp_path, width, heads, dtype):
    """And the parts that the layer has beside projections, if any."""
    path = file(tmp_path, {key: value.to(dtype) for key, value in gpt2(width).items()})
    code, out, err = run_command("import", path, "--name", "mine", "--heads", heads)
    assert (code, err) == (0, "")
    first, second, third, *last = out.splitlines()
    kind = str(dtype).removeprefix("torch.")
    start = f"mine: family gpt2, {width} wide, {heads} heads of {width // heads}, {kind}, sha256:"
    assert first.startswith(start)
    assert second.startswith("mine: parity with float64: max abs error output ")
    assert float(second.split("output ")[1].split(" ")[0]) < 1e-5
    assert third == "mine: with causal mask"
    assert last == [
        f"mine: wrote {tmp_path}/layers/mine.safetensors",
        f"mine: a running service serves it after a restart, or with an admin key: {curl('PUT')}",
    ]
    plain = file(tmp_path, linears("", *(f"linears.{i}" for i in range(4)), width=width), "annotated.safetensors")
    assert len(run_command("import", plain, "--name", "plain", "--heads", heads)[1].splitlines()) == 4
    assert run_command("check", "mine", path, "--heads", heads)[1].endswith("; the same digest: parity" + FLOAT64)


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_another_layer_is_overwritten_only_with_replace(run_command, tmp_path, width, heads):
    """The same layer again, also from a file of another name, is left as it is."""
    first, second = file(tmp_path, gpt2(width)), file(tmp_path, gpt2(width, seed=5), "y.safetensors")
    ask = ("--name", "mine", "--heads", heads)
    assert run_command("import", first, *ask)[0] == 0
    code, out, _ = run_command("import", first.rename(tmp_path / "z.safetensors"), *ask)
    assert (code, out.splitlines()[3]) == (0, f"mine: {tmp_path}/layers/mine.safetensors holds it already")
    store = Store(tmp_path / "layers")
    digest = store.load("mine").digest
    code, out, err = run_command("import", second, *ask)
    assert (code, out) == (1, "")
    assert err == (
        'attention-service: layer "mine" exists with other tensors or options, from x.safetensors h.0.attn (gpt2); '
        "choose another --name, or overwrite it with --replace\n"
    )
    assert run_command("import", tmp_path / "z.safetensors", *ask, "--scale", 0.125)[0] == 1
    assert store.load("mine").digest == digest
    assert run_command("import", second, *ask, "--replace")[0] == 0
    assert store.load("mine").digest != digest


@pytest.mark.parametrize("is_same", [True, False])
def test_an_import_that_another_one_overtakes_is_as_if_it_came_second(run_command, tmp_path, monkeypatch, is_same):
    """The other one stores its layer after this one has looked for one."""
    ours, theirs = file(tmp_path, gpt2(12)), file(tmp_path, gpt2(12, seed=0 if is_same else 5), "y.safetensors")
    other = import_layer(theirs, name="mine", heads=3)
    compare = parity.with_float64

    def overtaken(*layers: StoredLayer) -> tuple[bool, str]:
        Store(tmp_path / "layers").save(other)
        return compare(*layers)

    monkeypatch.setattr(parity, "with_float64", overtaken)
    code, out, err = run_command("import", ours, "--name", "mine", "--heads", 3)
    assert Store(tmp_path / "layers").load("mine").source == other.source
    if is_same:
        assert (code, err) == (0, "")
        assert f"mine: {tmp_path}/layers/mine.safetensors holds it already\n" in out
    else:
        assert (code, out) == (1, "")
        assert err.startswith('attention-service: layer "mine" exists with other tensors or options, from y.safet')


def test_a_link_to_nothing_is_overwritten_only_with_replace(run_command, tmp_path):
    ask = ("import", file(tmp_path, gpt2(12)), "--name", "mine", "--heads", 3)
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "mine.safetensors").symlink_to("nothing")
    why = f'--layers-dir {tmp_path}/layers: layer "mine": a file has this name; --replace overwrites it'
    assert run_command(*ask) == (1, "", f"attention-service: {why}\n")
    assert run_command(*ask, "--replace")[0] == 0


def test_a_file_that_cannot_be_read_is_overwritten_only_with_replace(run_command, tmp_path):
    path = file(tmp_path, gpt2(12))
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "mine.safetensors").write_bytes(b"notes")
    code, out, err = run_command("import", path, "--name", "mine", "--heads", 3)
    assert (code, out) == (1, "")
    assert err.startswith('attention-service: layer "mine": ')
    assert err.endswith("; --replace overwrites the file\n")
    assert (tmp_path / "layers" / "mine.safetensors").read_bytes() == b"notes"
    assert run_command("import", path, "--name", "mine", "--heads", 3, "--replace")[0] == 0


def test_replace_is_not_offered_where_the_directory_is_a_file(run_command, tmp_path):
    (tmp_path / "layers").touch()
    why = f'--layers-dir {tmp_path}/layers: layer "mine": the layer directory cannot be written'
    expected = (1, "", f"attention-service: {why}\n")
    assert run_command("import", file(tmp_path, gpt2(12)), "--name", "mine", "--heads", 3) == expected


def test_a_list_does_not_wait_for_a_named_pipe(run_command, tmp_path):
    (tmp_path / "layers").mkdir()
    os.mkfifo(tmp_path / "layers" / "pipe.safetensors")
    code, _, err = run_command("list")
    assert (code, err) == (1, 'layer "pipe": the file is not a regular file\n')


def test_a_layer_that_float32_cannot_compute_is_not_stored(run_command, tmp_path):
    tensors = {key: value.double() * 1e30 for key, value in gpt2(12).items()}
    code, out, err = run_command("import", file(tmp_path, tensors), "--name", "huge", "--heads", 3)
    assert (code, out) == (1, "")
    assert err.startswith(
        'attention-service: layer "huge" is not stored: float32 is too far from its float64 reference, max abs error'
    )
    beyond = {key: value * 1e10 for key, value in tensors.items()}
    err = run_command("import", file(tmp_path, beyond), "--name", "huge", "--heads", 3)[2]
    assert err.startswith('attention-service: layer "huge" is not stored: values of query.weight, key.weight')
    assert err.endswith(" exceed float32\n")
    assert not (tmp_path / "layers").exists()


MAP = ("query=m.a.weight", "key=m.b.weight", "value=m.c.weight", "output=m.d.weight")


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_the_pairs_of_a_map_may_be_written_in_every_usual_way(run_command, tmp_path, width, heads):
    """After one --map, quoted as one word, or with an option each; before or behind the source."""
    path, ask = file(tmp_path, linears("m.", *"abcd", width=width)), ("--name", "mine", "--heads", heads)
    each = [word for pair in MAP for word in ("--map", pair)]
    for words in (
        (path, *ask, "--map", *MAP), (*ask, "--map", *MAP, path), (path, *ask, "--map", " ".join(MAP)), (*each, path, *ask)
    ):  # fmt: skip
        code, out, err = run_command("import", *words)
        assert (code, err) == (0, "")
        assert out.startswith(f"mine: family mapped, {width} wide, {heads} heads of {width // heads}, float32, sha256:")
    assert run_command("check", "mine", path, "--heads", heads, "--map", *MAP)[1].endswith(
        "the same digest: parity" + FLOAT64
    )
    assert run_command("check", "--map", *MAP, "mine", path, "--heads", heads)[1].endswith(
        "the same digest: parity" + FLOAT64
    )


def test_ignored_keys_are_left_out_by_import_and_check(run_command, tmp_path):
    """An option for each key, before or behind the pairs of a map."""
    extra = {"m.q_norm.weight": random(4), "m.k_norm.weight": random(4)}
    path, ask = file(tmp_path, {**linears("m.", *"abcd", width=12), **extra}), ("--heads", 3, "--map", *MAP)
    code, out, err = run_command("import", path, "--name", "mine", *ask, "--ignore", "m.q_norm.weight")
    assert (code, out) == (1, "")
    assert err.endswith(
        "the module has keys that the mapped layer does not use "
        "(--ignore KEY, once for each, leaves out what does not change attention): 'm.k_norm.weight'\n"
    )
    both = [word for key in extra for word in ("--ignore", key)]
    assert run_command("import", path, "--name", "mine", *both, *ask)[0] == 0
    assert run_command("check", "mine", path, *ask, *both)[1].endswith("the same digest: parity" + FLOAT64)


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_a_fused_key_is_named_once(run_command, tmp_path, width, heads):
    path = file(tmp_path, {"m.in.weight": random(3 * width, width), "m.out.weight": random(width, width)})
    ask = ("--name", "mine", "--heads", heads, "--fused", "qkv")
    assert run_command("import", path, *ask, "--map", "qkv=m.in.weight", "output=m.out.weight")[0] == 0
    code, _, err = run_command("import", path, *ask, "--map", "query=m.in.weight", "output=m.out.weight")
    assert code == 1
    assert err == (
        "attention-service: --map lacks qkv; the form is --map query=KEY key=KEY value=KEY output=KEY, "
        "or --fused qkv --map qkv=KEY output=KEY\n"
    )


def test_arguments_that_are_no_pairs_are_refused(run_command, tmp_path):
    path = file(tmp_path, gpt2(12))
    assert run_command("import", path, "more", "--name", "x")[::2] == (
        2,
        "attention-service: Invalid value: Got unexpected extra argument (more)\n",
    )
    for words, why in (
        ((path, "--map", *MAP, "gate=m.g.weight"), "Got unexpected extra argument (gate=m.g.weight)"),
        (("--map", *MAP), "SOURCE is missing; only pairs of --map are given"),
        ((path, "query=a"), "Got unexpected extra argument (query=a)"),
    ):
        code, out, err = run_command("import", *words, "--name", "x")
        assert (code, out, err) == (2, "", f"attention-service: Invalid value: {why}\n")


@pytest.mark.parametrize("names", [["a"], ["a-rather-long-name-of-a-layer", "b"]])
def test_a_list_fits_a_terminal_of_80_columns(run_command, tmp_path, monkeypatch, names):
    monkeypatch.setenv("COLUMNS", "80")
    for name in names:
        assert run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", name)[0] == 0
    code, out, err = run_command("list")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split()[:6] == ["name", "width", "heads", "dtype", "family", "digest"]
    assert [row.split()[:4] for row in rows] == [[name, "12", "3", "float32"] for name in names]
    assert max(map(len, [head, *rows])) <= 80
    assert rows[0].split()[5] == Store(tmp_path / "layers").load(names[0]).digest[7:19]


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 9, b"\2\0\0\0\0\0\0\0{}", b"x" * 100_000])
def test_a_list_says_which_file_is_no_stored_layer(run_command, tmp_path, content):
    run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", "good")
    (tmp_path / "layers" / "bad.safetensors").write_bytes(content)
    code, out, err = run_command("list")
    assert (code, out.splitlines()[1].split()[0]) == (1, "good")
    assert err == 'layer "bad": the file is no stored layer; `layers import` makes one of a checkpoint\n'


@pytest.mark.parametrize(
    ("field", "value"),
    [("source", 5), ("source", None), ("source", {}), ("source", "\x1b[31m"), ("family", 5), ("digest", ["a"])],
)
def test_a_list_says_which_header_has_a_field_that_is_no_printable_text(run_command, tmp_path, field, value):
    spec = {"query_width": 12, "num_heads": 3, "family": "gpt2", "digest": "sha256:" + "0" * 64, "source": "x"}
    metadata = {"spec": json.dumps(spec | {field: value})}
    save_file({"query.weight": torch.zeros(1)}, tmp_path / "bad.safetensors", metadata)
    code, _, err = run_command("list", "--layers-dir", tmp_path)
    assert code == 1
    assert err == 'layer "bad": the file is no stored layer; `layers import` makes one of a checkpoint\n'


@pytest.mark.parametrize("name", ["m[v2]", "[red]m[", "m[/y]", ":key:"])
def test_a_list_shows_the_names_of_files_as_they_are(run_command, tmp_path, monkeypatch, name):
    """What rich calls markup is text in a name."""
    monkeypatch.setenv("COLUMNS", "200")
    source = tmp_path / f"{name}.safetensors"
    source.parent.mkdir(exist_ok=True)
    assert run_command("import", file(tmp_path, gpt2(12), source.name), "--heads", 3, "--name", "good")[0] == 0
    (tmp_path / "layers" / f"{name.replace('/', '')}.safetensors").touch()
    code, out, err = run_command("list")
    assert code == 1
    assert out.splitlines()[1].partition(" gpt2 ")[2].split()[1] == source.name
    assert err.startswith(f'layer "{name.replace("/", "")}": ')


@pytest.mark.parametrize("name", [b"Big", b"_x", b"a" * 65, b"x y", b"sdpa", b"b\xffd"])
def test_a_list_says_which_file_the_service_does_not_serve_for_its_name(run_command, tmp_path, name):
    assert run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", "good")[0] == 0
    layers = tmp_path / "layers"
    (layers / "good.safetensors").rename(layers / f"{os.fsdecode(name)}.safetensors")
    code, out, err = run_command("list")
    shown = os.fsdecode(name).replace("\udcff", "\\udcff")
    assert (code, len(out.splitlines())) == (1, 1)
    assert err == f'layer "{shown}": no layer can have this name, so the service does not serve it\n'


def test_the_command_line_has_the_names_of_the_store():
    assert (commands.NAME, commands.SDPA) == (directory.NAME, directory.SDPA)


def test_a_list_of_a_missing_directory_is_one_sentence_with_its_path(run_command, tmp_path):
    message = f"attention-service: the layer directory {tmp_path / 'none'} cannot be read: No such file or directory\n"
    assert run_command("list", "--layers-dir", tmp_path / "none") == (1, "", message)


def test_a_list_imports_neither_torch_nor_numpy_nor_the_settings(tmp_path):
    code = (
        "import sys; sys.argv = ['attention-service', 'layers', 'list', '--layers-dir', sys.argv[1]]\n"
        "import atexit; atexit.register(lambda: print({'torch', 'numpy', 'service.settings'} & {*sys.modules}))\n"
        "from service.cli import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(heads=3, scale=0.5), "scale: 0.25 stored, 0.5 in the source"),
        (
            dict(heads=4),
            "heads: 3 stored, 4 in the source; kv heads: 3 stored, 4 in the source; head width: 4 stored, 3 in ",
        ),
        (dict(heads=3, bias=False), "biases: query, key, value, output stored, none in the source"),
        (
            dict(heads=3, width=24),
            "query width: 12 stored, 24 in the source; key width: 12 stored, 24 in the source; value",
        ),
    ],
    ids=str,
)
def test_a_check_says_in_what_the_source_differs(run_command, tmp_path, changed, said):
    """And it gives both values."""

    def words(heads: int, scale: float = 0.25, *, width: int = 12, bias: bool = True) -> list[object]:
        tensors = linears("m.", *"abcd", width=width, bias=bias)
        return [file(tmp_path, tensors), "--heads", heads, "--scale", scale, "--map", *MAP]

    assert run_command("import", "--name", "mine", *words(3))[0] == 0
    code, out, err = run_command("check", "mine", *words(**changed))
    assert (code, out) == (1, "")
    assert err.startswith(f"attention-service: the stored layer is not that of the source: {said}")


def test_a_check_names_each_field_of_a_part_in_which_the_source_differs(run_command, tmp_path):
    """A layer of an older release lacks a part that the source has today, and the other way round."""
    path, ask = file(tmp_path, linears("m.", *"abcd", width=12)), ("--heads", 3, "--map", *MAP)
    assert run_command("import", path, "--name", "mine", *ask)[0] == 0
    store = Store(tmp_path / "layers")
    plain = store.load("mine")
    rotary = Rotary("half", (1.0,) * 2)
    spec = dataclasses.replace(plain.spec, rotary=rotary, window=Window(None, 0), softcap=30.0)
    store.save(StoredLayer("mine", spec, plain.tensors, "x", "mapped"))
    assert len(run_command("list")[1].splitlines()) == 2
    assert run_command("check", "mine", path, *ask)[2] == (
        "attention-service: the stored layer is not that of the source: softcap: 30.0 stored, none in the source; "
        "rotary layout: half stored, none in the source; "
        "rotary inverse frequencies: (1.0, 1.0) stored, none in the source; "
        "rotary attention factor: 1.0 stored, none in the source; window right: 0 stored, none in the source\n"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--heads", 0),
        ("--heads", 5000),
        ("--heads", "two"),
        *(("--scale", value) for value in (0, -1, "nan", "inf", 1e-60)),
    ],
)
def test_an_option_that_cannot_be_is_named(run_command, tmp_path, option, value):
    code, out, err = run_command("import", file(tmp_path, gpt2(12)), "--name", "mine", option, value)
    assert (code, out) == (2, "")
    assert err.startswith(f"attention-service: Invalid value for '{option}': ")


NO_NAMES = ["../mine", "mine.safetensors/", "/etc/passwd", "Mine", "", "..", "a" * 65, "mine\n", "sdpa"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_no_layer_can_have_is_refused_by_every_command(run_command, tmp_path, name):
    path, rule = file(tmp_path, gpt2(12)), "must be 1 to 64 of a-z, 0-9, dot, underscore and hyphen, beginning with"
    for words, what in (
        (("import", path, "--name", name), "--name"),
        (("check", name, path), "NAME"),
        (("remove", name), "NAME"),
    ):
        code, out, err = run_command(*words)
        assert (code, out) == (1, "")
        assert err.startswith(f"attention-service: {what} {rule}")


def test_a_removed_layer_is_gone_and_the_others_stay(run_command, tmp_path):
    for name in ("mine", "other"):
        assert run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", name)[0] == 0
    code, out, err = run_command("remove", "mine")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"mine: removed {tmp_path}/layers/mine.safetensors",
        f"mine: a running service serves it until a restart, or with an admin key: {curl('DELETE')}",
    ]
    assert Store(tmp_path / "layers").names() == ["other"]
    why = f"{tmp_path}/layers has no layer mine; `layers list` names those that it has"
    assert run_command("remove", "mine") == (1, "", f"attention-service: {why}\n")


def test_a_link_is_removed_and_not_what_it_leads_to(run_command, tmp_path):
    assert run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", "mine")[0] == 0
    (tmp_path / "layers" / "link.safetensors").symlink_to("mine.safetensors")
    assert run_command("remove", "link")[0] == 0
    assert Store(tmp_path / "layers").names() == ["mine"]


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"PORT": "0"}, "http://127.0.0.1:8000"),
        ({"PORT": "x"}, "http://127.0.0.1:8000"),
        ({"TLS_CERT_FILE": "x"}, "https://127.0.0.1:8000"),
    ],
    ids=str,
)
def test_the_command_for_a_running_service_has_the_address_of_these_settings(
    run_command, tmp_path, monkeypatch, variables, address
):
    """An address that is not known, or not valid, does not fail an import."""
    for name, value in variables.items():
        monkeypatch.setenv(f"ATTENTION_{name}", value)
    code, out, _ = run_command("import", file(tmp_path, gpt2(12)), "--heads", 3, "--name", "mine")
    assert code == 0
    assert f"curl -X PUT {address}/v1/layers/mine " in out.splitlines()[-1]


@pytest.mark.parametrize("variable", [None, ""])
def test_every_command_uses_the_directory_that_make_run_serves(run_command, tmp_path, monkeypatch, variable):
    """An empty variable is as none, as for the service."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTENTION_LAYERS_DIR")
    if variable is not None:
        monkeypatch.setenv("ATTENTION_LAYERS_DIR", variable)
    path = file(tmp_path, gpt2(12))
    assert (
        run_command("import", path, "--heads", 3, "--name", "mine")[1].splitlines()[3]
        == "mine: wrote .layers/mine.safetensors"
    )
    makefile = (Path(cli.__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"\nLAYERS := {load_settings().layers_dir}\n" in makefile
    assert Store(load_settings().layers_dir).names() == ["mine"]
    assert run_command("check", "mine", path, "--heads", 3)[0] == 0
    assert len(run_command("list")[1].splitlines()) == 2
    assert run_command("remove", "mine")[1].startswith("mine: removed .layers/mine.safetensors\n")


def test_a_published_set_has_one_digest_and_a_damaged_layer_publishes_nothing(run_command, tmp_path):
    path, published = file(tmp_path, gpt2(12)), tmp_path / "published"
    run_command("import", path, "--name", "mine", "--heads", 3)
    code, digest, err = run_command("publish", published)
    assert (code, err, digest[:7], len(digest)) == (0, "", "sha256:", 72)
    assert run_command("publish", published) == (0, digest, "")
    before = (published / "layer-set.json").read_bytes()
    (tmp_path / "layers" / "other.safetensors").write_bytes(b"no layer")
    code, out, err = run_command("publish", published)
    assert (code, out) == (1, "")
    assert err.startswith('attention-service: layer "other": ')
    assert (published / "layer-set.json").read_bytes() == before
    (tmp_path / "layers" / "other.safetensors").unlink()
    assert run_command("publish", path) == (1, "", f"attention-service: {path} cannot be written: File exists\n")
