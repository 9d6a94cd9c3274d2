"""`layers import | list | check` commands: manage stored layers from the terminal.

Invariants: A layer is checked completely before it is stored, and replaces another one only with `--replace`. `import` and
`check` run the layer in float32 on the CPU, and compare it with a float64 reference on the source's own tensors. Progress goes to
stderr, results to stdout.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import LayerError, LayerMissing
from service.layers.wording import about

if TYPE_CHECKING:
    from rich.console import Console

    from service.layers.store import StoredLayer

CHECK_ROWS = 24
CHECK_SEED = 7
# Over a few hundred products, errors of float32 against float64 are near 1e-6 of the largest value.
TOLERANCE = 1e-4
MAX_HEAD_BYTES = 64 * 1024
# As in layers/store.py, whose import takes seconds; a test compares them.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SDPA = "sdpa"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}

LAYERS_DIR = Path(".layers")  # the setting's default; an import of the settings takes 0.3 s
LayersDir = Annotated[
    Path, typer.Option("--layers-dir", envvar="ATTENTION_LAYERS_DIR", help="directory of stored layers")
]
Source = Annotated[Path, typer.Argument(help=".safetensors, directory with config.json, .npz, or torch state_dict")]
Number = Annotated[int | None, typer.Option("--layer", help="number of the layer in the checkpoint")]
Prefix = Annotated[str | None, typer.Option("--prefix", help="the layer's key prefix, instead of --layer")]
Family = Annotated[str | None, typer.Option("--family", help="naming scheme of the keys; default: detected")]
Heads = Annotated[int | None, typer.Option("--heads", help="number of heads, if the source does not record it")]
ZeroAttn = Annotated[bool, typer.Option("--add-zero-attn", help="the layer was made with add_zero_attn=True")]
Scale = Annotated[float | None, typer.Option("--scale", help="multiplier of query·key; default 1/sqrt(head width)")]
Map = Annotated[list[str] | None, typer.Option("--map", help="the keys: query=KEY key=KEY value=KEY output=KEY")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore", help="a key of the module that does not change attention, or a beginning that ends in a dot"
    ),
]
Fused = Annotated[str | None, typer.Option("--fused", help="qkv: one key holds all three: --map qkv=KEY output=KEY")]

app = typer.Typer(help="Import, list and check layers.", no_args_is_help=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: brackets and colons in the names of files are no markup."""
    from rich.console import Console  # it takes 0.1 s to import

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def separated(context: typer.Context, given: list[str], maps: list[str] | None) -> tuple[list[str], list[str]]:
    """Return a command's own arguments, and the pairs of --map: the command line gives all but the first pair as arguments."""
    words = [*given, *context.args]
    pairs = [word for word in words if re.match("(query|key|value|output|qkv)=", word)] if maps else []
    rest = [word for word in words if word not in pairs]
    if len(rest) < len(given):
        raise typer.BadParameter("SOURCE is missing; only pairs of --map are given")
    if len(rest) > len(given):
        raise typer.BadParameter(f"Got unexpected extra argument ({' '.join(rest[len(given) :])})")
    return rest, [word for text in maps or [] for word in text.split()] + pairs


@app.command("import", context_settings={"allow_extra_args": True})
def import_(
    context: typer.Context,
    source: Source,
    name: Annotated[str, typer.Option("--name", help="name of the served layer: a-z, 0-9, dot, underscore, hyphen")],
    layer: Number = None,
    prefix: Prefix = None,
    family: Family = None,
    heads: Heads = None,
    add_zero_attn: ZeroAttn = False,
    scale: Scale = None,
    map_: Map = None,
    fused: Fused = None,
    ignore: Ignore = None,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite another layer of this name")] = False,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Import one attention layer of a checkpoint into the layer directory."""
    chosen: Any = dict(layer=layer, prefix=prefix, family=family, heads=heads, add_zero_attn=add_zero_attn, scale=scale)
    chosen["ignore"] = ignore or ()
    (path,), pairs = separated(context, [str(source)], map_)
    with console(stderr=True).status("importing …"):
        from service.layers.families import FAMILIES
        from service.layers.importer import import_layer  # torch takes seconds to import
        from service.layers.key_map import parse_key_map

        stored = import_layer(path, name=name, key_map=parse_key_map(pairs, fused), **chosen)
        parity = _save(stored, layers_dir, replace=replace)
    spec, dtype = stored.spec, str(stored.dtype).removeprefix("torch.")
    sizes = f"{spec.query_width} wide, {spec.num_heads} heads of {spec.head_width}"
    typer.echo(f"{name}: family {stored.family}, {sizes}, {dtype}, {stored.digest[:19]}…")
    typer.echo(f"{name}: parity with float64: {parity}")
    if any(known.is_causal for known in FAMILIES if known.name == stored.family):
        typer.echo(f'{name}: its model masks the future; send "masks": [{{"kind": "causal"}}] with each request')


def _save(stored: StoredLayer, layers_dir: Path, *, replace: bool) -> str:
    """Store the layer, and return its parity in words.

    Raises LayerError if it has none or, without `replace`, if another layer or file has its name.
    """
    from service.layers.store import Store

    store = Store(layers_dir)
    try:
        held = None if replace or not layers_dir.is_dir() else store.load(stored.name)
    except LayerMissing:
        held = None
    except LayerError as error:
        raise LayerError(f"{error.message}; --replace overwrites the file") from error
    if held is not None and held.digest != stored.digest:
        raise LayerError(
            f'layer "{stored.name}" exists with other tensors or options, from {held.source}; '
            "choose another --name, or overwrite it with --replace"
        )
    with about(f'layer "{stored.name}" is not stored'):
        is_close, parity = _parity(stored, stored)
        if not is_close:
            raise LayerError(f"float32 is too far from its float64 reference, {parity}")
    store.save(stored)
    return parity


@app.command("list")
def list_(layers_dir: LayersDir = LAYERS_DIR) -> None:
    """List the stored layers, and report the files that are not stored layers; exit code 1 if there are any.

    It reads only the headers of the files; `layers check` and the service read the tensors too.
    """
    from rich.table import Table

    failures = []
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for column in ("name", "width", "heads", "dtype", "family", "digest", "source"):
        # Only the source is cut to the width of the terminal.
        table.add_column(column, no_wrap=True, ratio=1 if column == "source" else None)
    try:
        files = sorted(path for path in layers_dir.iterdir() if path.suffix == ".safetensors" and path.name[0] != ".")
    except OSError as error:
        raise LayerError(f"the layer directory {layers_dir} cannot be read: {error.strerror}") from None
    for path in files:
        try:
            table.add_row(path.stem, *_row(path))
        except LayerError as error:
            failures.append(f'layer "{path.stem}": {error.message}')
    console().print(table, highlight=True)
    for failure in failures:
        console(stderr=True).print(failure, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def _row(path: Path) -> tuple[str, ...]:
    """Return a row of the list from the header of a stored layer's file, without torch, which takes seconds to import."""
    import orjson

    if NAME.fullmatch(path.stem) is None or path.stem == SDPA:
        raise LayerError("no layer can have this name, so the service does not serve it")
    try:
        if not path.is_file():  # opening a named pipe would wait for a writer
            raise LayerError("the file is not a regular file")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = orjson.loads(file.read(min(size, MAX_HEAD_BYTES)))
        about, dtype = orjson.loads(head["__metadata__"]["spec"]), head["query.weight"]["dtype"]
        sizes = (str(about[name]) for name in ("query_width", "num_heads"))
        row = *sizes, _DTYPES.get(dtype, dtype), about["family"], about["digest"][7:19], about["source"]
    except OSError as error:
        raise LayerError(f"the file cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        row = (None,)
    if not all(isinstance(cell, str) and cell.isprintable() for cell in row):
        raise LayerError("the file is no stored layer; `layers import` makes one of a checkpoint")
    return row


@app.command(context_settings={"allow_extra_args": True})
def check(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="name of a stored layer")],
    source: Source,
    layer: Number = None,
    prefix: Prefix = None,
    family: Family = None,
    heads: Heads = None,
    add_zero_attn: ZeroAttn = False,
    scale: Scale = None,
    map_: Map = None,
    fused: Fused = None,
    ignore: Ignore = None,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Compare a stored layer with its source: print the largest absolute errors of output and weights."""
    chosen: Any = dict(layer=layer, prefix=prefix, family=family, heads=heads, add_zero_attn=add_zero_attn, scale=scale)
    chosen["ignore"] = ignore or ()
    (name, path), pairs = separated(context, [name, str(source)], map_)
    with console(stderr=True).status("checking …"):
        from service.layers.importer import import_layer
        from service.layers.key_map import parse_key_map
        from service.layers.store import Store

        stored = Store(layers_dir).load(name)
        origin = import_layer(path, name=name, key_map=parse_key_map(pairs, fused), **chosen)
    if stored.spec != origin.spec:
        raise LayerError("the stored layer and the source differ in their widths, heads, scale or biases")
    is_close, parity = _parity(stored, origin)
    same = "the same digest" if stored.digest == origin.digest else "another digest"
    typer.echo(f"{name}: {parity}; {same}: {'parity' if is_close else 'NO PARITY'}")
    if not is_close:
        raise typer.Exit(1)


def _parity(stored: StoredLayer, origin: StoredLayer) -> tuple[bool, str]:
    """Compare `stored` with the reference on the tensors of `origin`, on seeded random rows; return the errors in words too."""
    import numpy as np
    import torch

    from service.attention import reference
    from service.attention.call import Call, WeightsWanted
    from service.attention.layer import Layer

    spec, generator = stored.spec, np.random.default_rng(CHECK_SEED)
    query, key, value = (
        generator.standard_normal((CHECK_ROWS, width)).astype(np.float32)
        for width in (spec.query_width, spec.key_width, spec.value_width)
    )
    tensors = {name: tensor.to(torch.float64).numpy() for name, tensor in origin.tensors.items()}
    expected, expected_weights = reference.attend(spec, tensors, query, key, value)
    rows = [torch.from_numpy(x)[None] for x in (query, key, value)]
    call = Call(rows[0], rows[1], rows[2], weights=WeightsWanted("heads"))
    with torch.inference_mode():
        served = Layer(spec, stored.tensors, dtype=torch.float32, device=torch.device("cpu")).forward([call])[0]
    assert isinstance(served.weights, torch.Tensor), "form heads gives one tensor. This is a bug."
    output_error = float(np.abs(served.output[0].numpy() - expected).max())
    weights_error = float(np.abs(served.weights[0].numpy() - expected_weights).max())
    size = max(float(np.abs(expected).max()), math.ulp(1.0))
    is_close = output_error <= TOLERANCE * size and weights_error <= TOLERANCE
    return is_close, f"max abs error output {output_error:.3g} (largest value {size:.3g}), weights {weights_error:.3g}"
