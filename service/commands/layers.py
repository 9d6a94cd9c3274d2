"""`layers import | list | check` commands: manage stored layers from the terminal.

Invariants: A layer is checked completely before it is stored. `check` compares the stored layer, run as it is served (float32, on
the CPU), with a float64 reference on the source's own tensors. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import LayerError

if TYPE_CHECKING:
    from service.layers.stored_layer import StoredLayer

CHECK_ROWS = 24
CHECK_SEED = 7
# Over a few hundred products, errors of float32 against float64 are near 1e-6 of the largest value.
TOLERANCE = 1e-4

LayersDir = Annotated[Path | None, typer.Option("--layers-dir", help="directory of stored layers")]
Source = Annotated[Path, typer.Argument(help=".safetensors, directory with config.json, .npz, or torch state_dict")]
Number = Annotated[int | None, typer.Option("--layer", help="number of the layer in the checkpoint")]
Prefix = Annotated[str | None, typer.Option("--prefix", help="the layer's key prefix, instead of --layer")]
Family = Annotated[str | None, typer.Option("--family", help="naming scheme of the keys; default: detected")]
Heads = Annotated[int | None, typer.Option("--heads", help="number of heads, if the source does not record it")]
ZeroAttn = Annotated[bool, typer.Option("--add-zero-attn", help="the layer was made with add_zero_attn=True")]
Scale = Annotated[float | None, typer.Option("--scale", help="multiplier of query·key; default 1/sqrt(head width)")]

app = typer.Typer(help="Import, list and check layers.", no_args_is_help=True)


def directory(given: Path | None) -> Path:
    """Return the option if it is given, else the setting."""
    from service.settings import load_settings  # keeps `--help` fast

    return given if given is not None else load_settings().layers_dir


@app.command("import")
def import_(
    source: Source,
    name: Annotated[str, typer.Option("--name", help="name of the served layer: a-z, 0-9, dot, underscore, hyphen")],
    layer: Number = None,
    prefix: Prefix = None,
    family: Family = None,
    heads: Heads = None,
    add_zero_attn: ZeroAttn = False,
    scale: Scale = None,
    layers_dir: LayersDir = None,
) -> None:
    """Take one attention layer out of a checkpoint and store it."""
    from rich.console import Console

    with Console(stderr=True).status("importing …"):
        from service.layers.importer import import_layer  # torch takes seconds to import
        from service.layers.store import Store

        stored = import_layer(
            source,
            name=name,
            layer=layer,
            prefix=prefix,
            family=family,
            heads=heads,
            add_zero_attn=add_zero_attn,
            scale=scale,
        )
        Store(directory(layers_dir)).save(stored)
    spec = stored.spec
    sizes = f"{spec.query_width} wide, {spec.num_heads} heads of {spec.head_width}"
    Console(highlight=False).print(f"{name}: {sizes}, {stored.family}, {stored.digest[:19]}…")


@app.command("list")
def list_(layers_dir: LayersDir = None) -> None:
    """List the stored layers, and say of each file that cannot be read why."""
    from rich.console import Console
    from rich.table import Table

    from service.layers.catalog import load_all
    from service.layers.store import Store

    with Console(stderr=True).status("reading …"):
        found = load_all(Store(directory(layers_dir)), strict=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "width", "heads", "dtype", "family", "source", "digest"):
        table.add_column(column, overflow="fold")
    for name, stored in found.layers.items():
        spec = stored.spec
        dtype, sizes = str(stored.dtype).removeprefix("torch."), (str(spec.query_width), str(spec.num_heads))
        table.add_row(name, *sizes, dtype, stored.family, stored.source, stored.digest[7:19])
    Console().print(table)
    for name, error in found.failures.items():
        Console(stderr=True, highlight=False).print(f"{name}: {error.message}", markup=False)
    if found.failures:
        raise typer.Exit(1)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="name of a stored layer")],
    source: Source,
    layer: Number = None,
    prefix: Prefix = None,
    family: Family = None,
    heads: Heads = None,
    add_zero_attn: ZeroAttn = False,
    scale: Scale = None,
    layers_dir: LayersDir = None,
) -> None:
    """Compare a stored layer with its source: print the largest absolute errors of output and weights."""
    from rich.console import Console

    with Console(stderr=True).status("checking …"):
        from service.layers.importer import import_layer
        from service.layers.store import Store

        stored = Store(directory(layers_dir)).load(name)
        origin = import_layer(
            source,
            name=name,
            layer=layer,
            prefix=prefix,
            family=family,
            heads=heads,
            add_zero_attn=add_zero_attn,
            scale=scale,
        )
        if stored.spec != origin.spec:
            raise LayerError("the stored layer and the source differ in their widths, heads, scale or biases")
        output_error, weights_error, size = _errors(stored, origin)
    same = "the same digest" if stored.digest == origin.digest else "another digest"
    is_close = output_error <= TOLERANCE * size and weights_error <= TOLERANCE
    Console(highlight=False).print(
        f"{name}: max abs error output {output_error:.3g} (largest value {size:.3g}), weights {weights_error:.3g}; {same}: "
        f"{'parity' if is_close else 'NO PARITY'}"
    )
    if not is_close:
        raise typer.Exit(1)


def _errors(stored: StoredLayer, origin: StoredLayer) -> tuple[float, float, float]:
    """Return the max abs errors of output and weights, and the reference's largest output, on seeded random rows."""
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
    call = Call(stored.name, rows[0], rows[1], rows[2], weights=WeightsWanted("heads"))
    with torch.inference_mode():
        served = Layer(spec, stored.tensors, dtype=torch.float32, device=torch.device("cpu")).forward([call])[0]
    assert isinstance(served.weights, torch.Tensor), "form heads gives one tensor. This is a bug."
    output_error = float(np.abs(served.output[0].numpy() - expected).max())
    weights_error = float(np.abs(served.weights[0].numpy() - expected_weights).max())
    return output_error, weights_error, max(float(np.abs(expected).max()), math.ulp(1.0))
