"""`layers import | list | check | remove | publish` commands: manage stored layers from the terminal.

Invariants: A layer is checked completely before it is stored, and replaces another one only with `--replace`. `import` and
`check` run the layer in float32 on the CPU, and compare it with its source (`parity.py`). Progress goes to stderr, results to
stdout. A running service is asked only with `--url`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.attention.spec import MAX_HEADS, MAX_SCALE, MIN_SCALE
from service.commands.layer_admin import curl, serve_at
from service.commands.terminal import console, say, steps
from service.errors import LayerError, LayerMissing
from service.layers.wording import about, bounded

if TYPE_CHECKING:
    from service.attention.spec import LayerSpec
    from service.layers.store import Store, StoredLayer
    from service.models.stored_model import ModelStore, StoredModel

    AnyStore = Store | ModelStore

MAX_HEAD_BYTES = 64 * 1024
# As in layers/directory.py, whose import takes seconds; a test compares them.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SDPA = "sdpa"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}

LAYERS_DIR = Path(".layers")  # the setting's default; an import of the settings takes 0.3 s
SUFFIX = ".safetensors"
LayersDir = Annotated[
    Path, typer.Option("--layers-dir", envvar="ATTENTION_LAYERS_DIR", help="directory of stored layers")
]
Source = Annotated[Path, typer.Argument(help=".safetensors, directory with config.json, .npz, or torch state_dict")]
Number = Annotated[int | None, typer.Option("--layer", help="number of the layer in the checkpoint")]
Prefix = Annotated[str | None, typer.Option("--prefix", help="the layer's key prefix, instead of --layer")]
Family = Annotated[str | None, typer.Option("--family", help="naming scheme of the keys; default: detected")]
Heads = Annotated[
    int | None,
    typer.Option("--heads", min=1, max=MAX_HEADS, help="number of heads, if the source does not record it"),
]
ZeroAttn = Annotated[bool, typer.Option("--add-zero-attn", help="the layer was made with add_zero_attn=True")]
Causal = Annotated[bool, typer.Option("--causal", help="the layer is causal, which torch does not store")]


def _checked_scale(value: float | None) -> float | None:
    if value is not None and not MIN_SCALE <= value <= MAX_SCALE:
        raise typer.BadParameter(f"{value:g} must be above 0, and in float32 neither 0 nor infinite")
    return value


Scale = Annotated[
    float | None,
    typer.Option("--scale", callback=_checked_scale, help="multiplier of query·key; default 1/sqrt(head width)"),
]
Map = Annotated[list[str] | None, typer.Option("--map", help="the keys: query=KEY key=KEY value=KEY output=KEY")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="a key of the module that does not change attention; may be given several times"),
]
Fused = Annotated[str | None, typer.Option("--fused", help="qkv: one key holds all three: --map qkv=KEY output=KEY")]

Url = Annotated[
    str | None,
    typer.Option("--url", help="address of a running service, which makes the change at once; needs an admin key"),
]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="ATTENTION_CLIENT_KEY", help="the admin key, for --url")]

app = typer.Typer(help="Import, list, check, remove and publish layers.", no_args_is_help=True)


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
    causal: Causal = False,
    scale: Scale = None,
    map_: Map = None,
    fused: Fused = None,
    ignore: Ignore = None,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite another layer of this name")] = False,
    url: Url = None,
    api_key: ApiKey = "",
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Import one attention layer of a checkpoint into the layer directory."""
    chosen: Any = dict(layer=layer, prefix=prefix, family=family, heads=heads, add_zero_attn=add_zero_attn, scale=scale)
    chosen |= dict(ignore=ignore or (), causal=causal)
    (path,), pairs = separated(context, [str(source)], map_)
    check_name(name, "--name")
    with steps() as step:
        stored = _imported(step, path, name=name, pairs=pairs, fused=fused, **chosen)
        from service.layers.store import Store

        store = Store(layers_dir)
        parity, is_new = checked(store, stored, step, replace=replace)
        is_new = is_new and written(store, stored, step, replace=replace)
    report(stored, layers_dir, parity, is_new=is_new)
    if url is None:
        say(f"{name}: a running service serves it after a restart, or {curl('PUT', name)}")
        return
    shown = url.rpartition("@")[2]  # no password
    with steps() as step, about(f'"{name}" is stored, but {shown} does not serve it'):
        step(f"waiting for {shown} to load it")
        serve_at(url, api_key, name, stored.digest, layers_dir)
    say(f"{name}: {shown} serves it now, {stored.digest[:19]}…")


def check_name(name: str, option: str) -> None:
    """Raise LayerError unless a layer may have the name; the store checks it too, but its import takes seconds."""
    if NAME.fullmatch(name) is None or name == SDPA:
        rule = "1 to 64 of a-z, 0-9, dot, underscore and hyphen, beginning with a letter or a digit, and not sdpa"
        raise LayerError(f"{option} must be {rule}")


def _imported(
    step: Callable[[str], None], path: str, *, name: str, pairs: list[str], fused: str | None, **chosen: Any
) -> StoredLayer:
    step("loading torch")
    from service.layers.importer import import_layer  # torch takes seconds to import
    from service.layers.key_map import parse_key_map

    step(f"reading {Path(path).name}")
    return import_layer(path, name=name, key_map=parse_key_map(pairs, fused), **chosen)


def report(stored: StoredLayer, layers_dir: Path, parity: str, *, is_new: bool) -> None:
    """Print what an import found."""
    from service.layers.wording import parts_text

    name, spec, dtype = stored.name, stored.spec, str(stored.dtype).removeprefix("torch.")
    sizes = f"{spec.query_width} wide, {spec.num_heads} heads of {spec.head_width}"
    say(f"{name}: family {stored.family}, {sizes}, {dtype}, {stored.digest[:19]}…")
    say(f"{name}: parity with float64: {parity}")
    if parts := parts_text(spec):
        say(f"{name}: with {parts}")
    file = layers_dir / f"{name}{SUFFIX}"
    say(f"{name}: wrote {file}" if is_new else f"{name}: {file} holds it already")


def checked(store: Store, stored: StoredLayer, step: Callable[[str], None], *, replace: bool) -> tuple[str, bool]:
    """Return the layer's parity in words, and whether it is to be written: not if it is there already.

    Raises LayerError if it has no parity or, without `replace`, if another layer or file has its name.
    """
    is_new = replace or not store.directory.is_dir() or not holds(store, stored)
    step(f"comparing {stored.name} with float64")
    from service.commands import parity

    with about(f'layer "{stored.name}" is not stored'):
        is_close, errors = parity.with_float64(stored, stored)
        if not is_close:
            raise LayerError(f"float32 is too far from its float64 reference, {errors}")
    return errors, is_new


def written(store: AnyStore, given: Any, step: Callable[[str], None], *, replace: bool) -> bool:
    """Store what is checked; return False if another import has just stored the same. Raises LayerError."""
    from service.layers.directory import LayerExists

    step(f"writing {given.name}")
    try:
        with about(f"--layers-dir {store.directory}"):
            store.save(given, replace=replace)
    except LayerExists as error:  # another import was faster
        if not holds(store, given):
            raise LayerError(f"{error.message}; --replace overwrites it") from None
        return False
    return True


def holds(store: AnyStore, given: StoredLayer | StoredModel) -> bool:
    """Return whether it is stored already; raise LayerError if another one, or a file that is none, has its name."""
    try:
        held = store.load(given.name)
    except LayerMissing:
        return False
    except LayerError as error:
        raise LayerError(f"{error.message}; --replace overwrites the file") from error
    if held.digest != given.digest:
        raise LayerError(
            f'{store.kind} "{given.name}" exists with other tensors or options, from {held.source}; '
            "choose another --name, or overwrite it with --replace"
        )
    return True


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
        files = sorted(path for path in layers_dir.iterdir() if path.suffix == SUFFIX and path.name[0] != ".")
    except OSError as error:
        raise LayerError(f"the layer directory {layers_dir} cannot be read: {error.strerror}") from None
    for path in files:
        try:
            table.add_row(path.stem, *_row(path))
        except LayerError as error:
            failures.append(f'layer "{path.stem}": {error.message}')
    console().print(table, highlight=True)
    for failure in failures:
        say(failure, err=True)
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
    causal: Causal = False,
    scale: Scale = None,
    map_: Map = None,
    fused: Fused = None,
    ignore: Ignore = None,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Compare a stored layer with its source: print the largest absolute errors of output and weights."""
    chosen: Any = dict(layer=layer, prefix=prefix, family=family, heads=heads, add_zero_attn=add_zero_attn, scale=scale)
    chosen |= dict(ignore=ignore or (), causal=causal)
    (name, path), pairs = separated(context, [name, str(source)], map_)
    check_name(name, "NAME")
    with steps() as step:
        step(f"reading layer {name}")
        from service.layers.store import Store

        stored = Store(layers_dir).load(name)
        origin = _imported(step, path, name=name, pairs=pairs, fused=fused, **chosen)
        if differences := _differences(stored.spec, origin.spec):
            raise LayerError(f"the stored layer is not that of the source: {differences}")
        step("comparing them")
        from service.commands.parity import with_source

        is_close, errors, reference = with_source(stored, origin, Path(path))
    same = "the same digest" if stored.digest == origin.digest else "another digest"
    say(f"{name}: {errors}; {same}: {'parity' if is_close else 'NO PARITY'} with {reference}")
    if not is_close:
        raise typer.Exit(1)


def _differences(stored: LayerSpec, origin: LayerSpec) -> str:
    """Return each field in which the two differ, with both values."""

    def values(spec: LayerSpec) -> dict[str, object]:
        found = {**dataclasses.asdict(spec), "biases": ", ".join(spec.biases) or "none"}
        parts = [(part, fields) for part, fields in found.items() if isinstance(fields, dict)]
        found |= {f"{part} {name}": one for part, fields in parts for name, one in fields.items()}
        kept = {name: one for name, one in found.items() if one is not None and not isinstance(one, dict)}
        return {name.removeprefix("num_").replace("_", " "): one for name, one in kept.items()}

    ours, theirs = values(stored), values(origin)
    differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    pairs = ((name, *(bounded(str(side.get(name, "none")), 60) for side in (ours, theirs))) for name in differing)
    return "; ".join(f"{name}: {one} stored, {other} in the source" for name, one, other in pairs)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="name of a stored layer")], layers_dir: LayersDir = LAYERS_DIR
) -> None:
    """Delete a stored layer; a running service serves it until a restart."""
    check_name(name, "NAME")
    file = layers_dir / f"{name}{SUFFIX}"
    try:
        file.unlink()
    except FileNotFoundError:
        raise LayerError(f"{layers_dir} has no layer {name}; `layers list` names those that it has") from None
    except OSError as error:
        raise LayerError(f"{file} is not removed: {error.strerror}") from None
    say(f"{name}: removed {file}")
    say(f"{name}: a running service serves it until a restart, or {curl('DELETE', name)}")


@app.command()
def publish(
    destination: Annotated[
        Path, typer.Argument(help="directory of the published set, on a volume or to be copied to a store")
    ],
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Publish all layers and models as a set, which services follow with ATTENTION_LAYERS_SOURCE; print its digest."""
    with steps() as step:
        step("checking and copying the layers and models")
        from service.layers.layer_set import publish as publish_set
        from service.layers.store import Store
        from service.models.stored_model import ModelStore

        stores: tuple[AnyStore, ...] = (Store(layers_dir), ModelStore(layers_dir))
        found = {store.file(name): store.load(name).digest for store in stores for name in store.names()}
        try:
            layer_set = publish_set(found, destination)
        except OSError as error:
            raise LayerError(f"{destination} cannot be written: {error.strerror}") from None
    say(layer_set.digest)
