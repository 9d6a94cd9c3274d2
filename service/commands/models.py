"""`models import` command: stores an encoder, its companion file and its layers, from the terminal.

Invariants: Everything is read and checked before the first file is written, and the companion file is written last: an
interrupted import leaves layers that the next one completes. What is there already is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.commands.layers import LAYERS_DIR, LayersDir, check_name, checked, report, written
from service.commands.terminal import say, steps
from service.errors import LayerError, LayerMissing
from service.layers.wording import about

if TYPE_CHECKING:
    from service.models.stored_model import ModelStore, StoredModel

app = typer.Typer(help="Import models, which take text.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Import models, which take text."""


@app.command("import")
def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory with config.json and tokenizer.json")],
    name: Annotated[str, typer.Option("--name", help="name of the model; its layers are NAME-l0, NAME-l1 …")],
    replace: Annotated[bool, typer.Option("--replace", help="overwrite another model or layers of these names")] = False,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Import an encoder of the BERT family, with its attention layers, into the layer directory."""
    check_name(name, "--name")
    with steps() as step:
        step("loading torch")
        from service.models.importer import import_model
        from service.models.stored_model import MODEL_SUFFIX, ModelStore

        model, layers = import_model(directory, name=name, step=step)
        store = ModelStore(layers_dir)
        is_new = replace or not _holds(store, model)
        results = [checked(layer, layers_dir, step, replace=replace) for layer in layers]
        new = [
            is_new_layer and written(layer, layers_dir, step, replace=replace)
            for layer, (_, is_new_layer) in zip(layers, results, strict=True)
        ]
        if is_new:
            step(f"writing {name}")
            with about(f"--layers-dir {layers_dir}"):
                store.save(model, replace=replace)
    for layer, (parity, _), is_new_layer in zip(layers, results, new, strict=True):
        report(layer, layers_dir, parity, is_new=is_new_layer)
    options, file = model.options, layers_dir / f"{name}{MODEL_SUFFIX}"
    sizes = f"{len(layers)} layers, {options.width} wide, at most {options.max_tokens} tokens of {options.vocabulary}"
    say(f"{name}: family {model.family}, {sizes}, {model.digest[:19]}…")
    say(f"{name}: wrote {file}" if is_new else f"{name}: {file} holds it already")
    say(f"{name}: a running service has it after a restart")


def _holds(store: ModelStore, model: StoredModel) -> bool:
    """Return whether the model is stored already; raise LayerError if another one, or a file that is none, has its name."""
    try:
        held = store.load(model.name)
    except LayerMissing:
        return False
    except LayerError as error:
        raise LayerError(f"{error.message}; --replace overwrites the file") from error
    if held.digest != model.digest:
        raise LayerError(
            f'model "{model.name}" exists with other tensors or options, from {held.source}; '
            "choose another --name, or overwrite it with --replace"
        )
    return True
