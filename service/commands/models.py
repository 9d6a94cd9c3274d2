"""`models import` command: stores an encoder, its companion file and its layers, from the terminal.

Invariants: Everything is read and checked before the first file is written, and the companion file is written last: an
interrupted import leaves layers that the next one completes. What is there already is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.commands.layers import LAYERS_DIR, LayersDir, check_name, checked, holds, report, written
from service.commands.terminal import say, steps

app = typer.Typer(help="Import models, which take text.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Import models, which take text."""


@app.command("import")
def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory with config.json and tokenizer.json")],
    name: Annotated[str, typer.Option("--name", help="name of the model; its layers are NAME-l0, NAME-l1 …")],
    replace: Annotated[
        bool, typer.Option("--replace", help="overwrite another model or layers of these names")
    ] = False,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Import an encoder of the BERT family, with its attention layers, into the layer directory."""
    check_name(name, "--name")
    with steps() as step:
        step("loading torch")
        from service.layers.store import Store
        from service.models.importer import import_model
        from service.models.stored_model import ModelStore

        model, layers = import_model(directory, name=name, step=step)
        models, store = ModelStore(layers_dir), Store(layers_dir)
        is_new = replace or not holds(models, model)
        found = [(layer, *checked(store, layer, step, replace=replace)) for layer in layers]
        # All are checked before the first one is written.
        reports = [
            (layer, parity, is_absent and written(store, layer, step, replace=replace))
            for layer, parity, is_absent in found
        ]
        is_new = is_new and written(models, model, step, replace=replace)
    for layer, parity, is_new_layer in reports:
        report(layer, layers_dir, parity, is_new=is_new_layer)
    options, file = model.options, models.file(name)
    sizes = f"{len(layers)} layers, {options.width} wide, at most {options.max_tokens} tokens of {options.vocabulary}"
    say(f"{name}: family {model.family}, {sizes}, {model.digest[:19]}…")
    say(f"{name}: wrote {file}" if is_new else f"{name}: {file} holds it already")
    say(f"{name}: a running service that serves these layers has it now, another one after a restart")
