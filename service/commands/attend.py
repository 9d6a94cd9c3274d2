"""`attend`, `attention` and `show` commands: ask from the terminal with or without a layer, save the answer, draw the weights.

Invariants: `show` requests the weights itself, or reads those of an earlier answer, and draws one head. The user gives the words
on the axes; there must be one for each row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.commands.layers import LAYERS_DIR
from service.commands.options import ApiKey, Local, Url, console, service_url
from service.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from service.commands.asking import Ask, Reply

QueryFile = Annotated[Path | None, typer.Option("--query", help="query array, .npy: [L, d] or [B, L, d]")]
KeyFile = Annotated[Path | None, typer.Option("--key", help="key array, .npy; default: the query")]
ValueFile = Annotated[Path | None, typer.Option("--value", help="value array, .npy; default: the key")]
RequestFile = Annotated[Path | None, typer.Option("--request", help="complete request body as JSON, instead of arrays")]
Causal = Annotated[str | None, typer.Option("--causal", help="causal mask: top_left or bottom_right")]
Masks = Annotated[
    list[str] | None,
    typer.Option(
        "--mask", help='a mask and its fields, repeatable: "causal align=top_left", "attend axes=bs values=FILE.npy"'
    ),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help='return weights too: "heads", "mean" or "top_k k=3"; also heads=[0] queries=[0,1]'),
]
Out = Annotated[Path | None, typer.Option("--out", help="write the output to this .npy, or all arrays to an .npz")]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON, with nested lists")]
LayersDir = Annotated[Path, typer.Option("--layers-dir", envvar="ATTENTION_LAYERS_DIR", help="layers for --local")]


def attend(
    layer: Annotated[str, typer.Argument(help="name of a served layer")],
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    mask: Masks = None,
    weights: Weights = None,
    out: Out = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
    local: Local = False,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Send arrays through a layer, and print or save the answer."""
    from service.commands.asking import asking

    body = _body(request, {"query": query, "key": key, "value": value}, causal, mask, weights)
    with asking(layers_dir if local else service_url(url), api_key) as ask:
        reply = ask(layer, body)
    _report(reply, out, as_json=as_json)


def attention(
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    layout: Annotated[str | None, typer.Option("--layout", help="ld, bld, hld, lhd, bhld, blhd or packed")] = None,
    num_heads: Annotated[int | None, typer.Option("--num-heads", help="query heads, with layout packed")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="key and value heads, with packed")] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="factor of query·key; default: 1/√d")] = None,
    softcap: Annotated[float | None, typer.Option("--softcap", help="c: a score s becomes c·tanh(s/c)")] = None,
    causal: Causal = None,
    mask: Masks = None,
    weights: Weights = None,
    scores: Annotated[str | None, typer.Option("--scores", help="scaled, capped or masked: return scores too")] = None,
    lse: Annotated[bool, typer.Option("--lse", help="return the log-sum-exp of the masked scores too")] = False,
    out: Out = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
    local: Local = False,
) -> None:
    """Compute attention on arrays of your own, without a layer."""
    from service.commands.asking import asking

    body = _body(request, {"query": query, "key": key, "value": value}, causal, mask, weights)
    options = dict(layout=layout, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=scale, softcap=softcap)
    body |= {name: option for name, option in options.items() if option is not None}
    if scores is not None:
        body["scores"] = {"stage": scores}
    if lse:
        body["lse"] = True
    with asking(Path() if local else service_url(url), api_key) as ask:
        reply = ask(None, body)
    _report(reply, out, as_json=as_json)


def _report(reply: Reply, out: Path | None, *, as_json: bool) -> None:
    """Print the answer as JSON or a summary of it; write its arrays to `out` if that is given."""
    import orjson

    if out is not None:
        _write(reply, out)
    if as_json:
        lists = {name: _lists(array) for name, array in reply.arrays.items()}
        typer.echo(orjson.dumps(lists | reply.facts).decode())
        return
    screen = console()
    for name, array in reply.arrays.items():
        screen.print(f"{name} {_about(array)}")
    screen.print_json(orjson.dumps(reply.facts).decode())
    if out is not None:
        what = "the output alone is " if out.suffix == ".npy" and len(reply.arrays) > 1 else ""
        screen.print(f"{what}written to {out}", soft_wrap=True)


def _write(reply: Reply, out: Path) -> None:
    import numpy as np

    try:
        with out.open("wb") as file:
            if out.suffix == ".npy":
                np.save(file, reply.arrays["output"], allow_pickle=False)
            else:
                np.savez(file, allow_pickle=False, **reply.arrays)
    except OSError as error:
        raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None


def _lists(array: np.ndarray) -> Any:
    """Return nested lists; "nan", "inf" and "-inf" stand for numbers that JSON does not have, as in the service's answers."""
    import numpy as np

    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    return np.where(np.isfinite(array), array.astype(object), array.astype("U8")).tolist()


def show(
    layer: Annotated[str | None, typer.Argument(help="name of a served layer; not with --weights")] = None,
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    mask: Masks = None,
    head: Annotated[int | None, typer.Option("--head", min=0, help="which head to draw; default: 0")] = None,
    sequence: Annotated[int, typer.Option("--sequence", min=0, help="which sequence, or head of [H, L, S]")] = 0,
    tokens: Annotated[str | None, typer.Option("--tokens", help='words of the query rows: "the cat sat"')] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="draw these weights, .npz or .npy: [B, H, L, S], [B, L, S] or [L, S]"),
    ] = None,
    key_tokens: Annotated[
        str | None, typer.Option("--key-tokens", help="words of the key rows; default: --tokens")
    ] = None,
    legend: Annotated[bool, typer.Option("--legend", help="draw the marks * + . instead of colours")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    local: Local = False,
    layers_dir: LayersDir = LAYERS_DIR,
) -> None:
    """Draw one head's attention weights as a heat map."""
    from service.commands.asking import asking

    if (layer is None) == (weights is None) or (weights and any((query, key, value, request, causal, mask))):
        raise InvalidInput("give either a layer or --weights FILE, and arrays, a request and masks only with a layer")
    if weights is not None:
        drawn, title = _stored_head(weights, sequence, head)
    else:
        body = _body(request, {"query": query, "key": key, "value": value}, causal, mask)
        with asking(layers_dir if local else service_url(url), api_key) as ask:
            drawn = _asked_head(ask, layer, body, sequence, head or 0)
        title = f"{layer}, head {head or 0}"
    _draw_map(drawn, tokens, key_tokens, title, use_legend=legend)


def _draw_map(weights: np.ndarray, tokens: str | None, key_tokens: str | None, title: str, *, use_legend: bool) -> None:
    from service.commands.heat_map import draw

    rows, columns = weights.shape
    queries = _words(tokens, rows, "--tokens")
    keys = _words(key_tokens, columns, "--key-tokens") if key_tokens or rows != columns else queries
    screen = console()
    screen.print(draw(weights, queries, keys, title=title, use_legend=use_legend, width=screen.width))


def _body(
    request: RequestFile, files: dict[str, Path | None], causal: Causal, masks: Masks, weights: Weights = None
) -> dict[str, Any]:
    """Return the request body: that of the file `request` or one of the arrays in `files`, plus the masks and the weights.

    Raises InvalidInput unless exactly one of the two is given.
    """
    from service.commands.asking import load_array, tensor_field

    given = {name: path for name, path in files.items() if path is not None}
    if given if request is not None else "query" not in given:
        raise InvalidInput("give either --query FILE.npy, perhaps with --key and --value, or --request FILE.json")
    body = {} if request is None else _json(request)
    body |= {name: tensor_field(load_array(path)) for name, path in given.items()}
    added = [_fields("kind", text) for text in masks or ()]
    if causal is not None:
        added.append({"kind": "causal", "align": causal})
    if added:
        found = body.get("masks", [])
        if not isinstance(found, list):
            raise InvalidInput("masks must be a list")
        body["masks"] = [*found, *added]
    if weights is not None:
        body["weights"] = _fields("form", weights)
    return body


def _fields(first: str, text: str) -> dict[str, Any]:
    """Return the object that an option gives as one word and name=value pairs; the service checks the names and values.

    A value that is not JSON is text; for `values` it is the path of an array's file.
    """
    import orjson

    from service.commands.asking import load_array, tensor_field

    found: dict[str, Any] = {}
    for word in text.split():
        name, sign, value = word.partition("=")
        is_first = not found
        if is_first == bool(sign) or name in found:  # the first word alone has no "="
            raise InvalidInput(
                f'"{word}" is not understood: write a {first} and then name=value, each once, with blanks between them'
            )
        if is_first:
            found[first] = word
            continue
        try:
            found[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            found[name] = tensor_field(load_array(Path(value))) if name == "values" else value
    if not found:
        raise InvalidInput(f"the {first} is missing")
    return found


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises InvalidInput, or the service's error for a duplicate key, which orjson drops."""
    import orjson

    from service.wire.json_document import parse

    try:
        raw = path.read_bytes()
        body: dict[str, Any] = orjson.loads(raw)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError:
        raise InvalidInput(f"{path} is not a JSON file") from None
    parse(raw, max_depth=1024, max_numbers=2**62)
    return body


def _asked_head(ask: Ask, layer: str | None, body: dict[str, Any], sequence: int, head: int) -> np.ndarray:
    """Return the weights [L, S] that the layer computes for one sequence and head; raises InvalidInput for a missing sequence."""
    reply = ask(layer, {**body, "weights": {"form": "heads", "heads": [head]}})
    weights = reply.array("weights", (1, None, None), (None, 1, None, None))
    sequences: list[np.ndarray] = [*weights.reshape(-1, *weights.shape[-2:])]
    if sequence >= len(sequences):
        raise InvalidInput(f"--sequence must be below {len(sequences)}, the number of sequences")
    return sequences[sequence]


def _stored_head(path: Path, sequence: int, head: int | None) -> tuple[np.ndarray, str]:
    """Return the weights [L, S] of one sequence and head in a file, and their title; raises InvalidInput if it lacks them."""
    from service.commands.asking import load_array

    array = load_array(path, "weights")
    found = f"{array.dtype} {list(array.shape)}"
    if array.ndim not in (2, 3, 4) or array.dtype.kind != "f" or not array.size:
        raise InvalidInput(f"{path} must hold weights [B, H, L, S], [B, L, S] or [L, S], got {found}")
    has_heads = array.ndim == 4  # noqa: PLR2004 ([B, H, L, S])
    if head is not None and not has_heads:
        raise InvalidInput(f"{path} has no heads to choose from: {found}; --sequence chooses from [H, L, S]")
    table = array.reshape(-1, array.shape[1] if has_heads else 1, *array.shape[-2:])
    for option, index, size in zip(("--sequence", "--head"), (sequence, head or 0), table.shape, strict=False):
        if index >= size:
            raise InvalidInput(f"{option} must be below {size}")
    return table[sequence, head or 0], f"{path.name}, head {head or 0}" if has_heads else path.name


def _words(text: str | None, count: int, option: str) -> list[str]:
    words = [str(i) for i in range(count)] if text is None else text.split()
    if len(words) != count:
        raise InvalidInput(f"{option} has {len(words)} words for {count} rows")
    return words


def _about(array: np.ndarray) -> str:
    about, wide = f"{array.dtype} {list(array.shape)}", array.astype("float64")
    return f"{about}  min {wide.min():.4g}  mean {wide.mean():.4g}  max {wide.max():.4g}" if array.size else about
