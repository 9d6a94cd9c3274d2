"""`attend`, `attention` and `show` commands: ask from the terminal with or without a layer, save the answer, draw the weights.

Invariants: `show` requests the weights itself and draws one head. The caller gives the words on the axes, and their number must
be the number of rows. Only weights of the answer are drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.commands.layers import directory
from service.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from service.commands.asking import Reply

DEFAULT_URL = "http://127.0.0.1:8000"

Layer = Annotated[str, typer.Argument(help="name of a served layer")]
QueryFile = Annotated[Path | None, typer.Option("--query", help="query array, .npy: [L, d] or [B, L, d]")]
KeyFile = Annotated[Path | None, typer.Option("--key", help="key array, .npy; default: the query")]
ValueFile = Annotated[Path | None, typer.Option("--value", help="value array, .npy; default: the key")]
RequestFile = Annotated[Path | None, typer.Option("--request", help="complete request body as JSON, instead of arrays")]
Causal = Annotated[str | None, typer.Option("--causal", help="causal mask: top_left or bottom_right")]
Url = Annotated[str, typer.Option("--url", help="address of the service")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="ATTENTION_CLIENT_KEY", help="API key, if the service needs one", show_default=False
    ),
]
Local = Annotated[bool, typer.Option("--local", help="compute in this process instead of calling a service")]
LayersDir = Annotated[Path | None, typer.Option("--layers-dir", help="directory of stored layers, for --local")]


def attend(
    layer: Layer,
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="return attention weights too: heads or mean")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="write output and weights to this .npz")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    local: Local = False,
    layers_dir: LayersDir = None,
) -> None:
    """Send arrays through a layer and print or keep the answer."""
    body = _body(request, {"query": query, "key": key, "value": value}, causal)
    if weights is not None:
        body["weights"] = {"form": weights}
    reply = _ask(layer, body, directory(layers_dir) if local else url, api_key)
    _report(reply, out)


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
    weights: Annotated[
        str | None, typer.Option("--weights", help="heads or mean: return attention weights too")
    ] = None,
    scores: Annotated[str | None, typer.Option("--scores", help="scaled, capped or masked: return scores too")] = None,
    lse: Annotated[bool, typer.Option("--lse", help="return the log-sum-exp of the masked scores too")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="write output and all else to this .npz")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    local: Local = False,
) -> None:
    """Compute attention on arrays of your own, without a layer."""
    body = _body(request, {"query": query, "key": key, "value": value}, causal)
    options = dict(layout=layout, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=scale, softcap=softcap)
    body |= {name: option for name, option in options.items() if option is not None}
    if weights is not None:
        body["weights"] = {"form": weights}
    if scores is not None:
        body["scores"] = {"stage": scores}
    if lse:
        body["lse"] = True
    _report(_ask(None, body, Path() if local else url, api_key), out)


def _report(reply: Reply, out: Path | None) -> None:
    """Print what the answer holds, and write its arrays to `out` if that is given."""
    import numpy as np
    import orjson
    from rich.console import Console

    console = Console()
    if out is not None:
        try:
            with out.open("wb") as file:
                np.savez(file, allow_pickle=False, output=reply.output, **reply.weights)
        except OSError as error:
            raise InvalidInput(f"{out} cannot be written: {error.strerror}") from None
    console.print(f"output {_about(reply.output)}", highlight=False)
    for name, array in reply.weights.items():
        console.print(f"{name} {_about(array)}", highlight=False)
    console.print_json(orjson.dumps(reply.facts).decode())
    if out is not None:
        console.print(f"written to {out}", highlight=False)


def show(
    layer: Annotated[str | None, typer.Argument(help="name of a served layer; not with --weights")] = None,
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    head: Annotated[int, typer.Option("--head", min=0, help="which head to draw")] = 0,
    sequence: Annotated[int, typer.Option("--sequence", min=0, help="which sequence of a batch to draw")] = 0,
    tokens: Annotated[str | None, typer.Option("--tokens", help='words of the query rows: "the cat sat"')] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="draw these weights, .npz or .npy: [B, H, L, S], [B, L, S] or [L, S]"),
    ] = None,
    key_tokens: Annotated[
        str | None, typer.Option("--key-tokens", help="words of the key rows; default: --tokens")
    ] = None,
    legend: Annotated[bool, typer.Option("--legend", help="draw the marks * + . instead of colours")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    local: Local = False,
    layers_dir: LayersDir = None,
) -> None:
    """Draw one head's attention weights as a heat map."""
    from rich.console import Console

    from service.commands.heat_map import draw

    if (layer is None) == (weights is None):
        raise InvalidInput("give either a layer or --weights FILE")
    if weights is not None:
        drawn = _stored_head(weights, sequence, head)
    else:
        body = _body(request, {"query": query, "key": key, "value": value}, causal)
        drawn = _asked_head(layer, body, directory(layers_dir) if local else url, api_key, (sequence, head))
    rows, columns = drawn.shape
    queries = _words(tokens, rows, "--tokens")
    keys = _words(key_tokens, columns, "--key-tokens") if key_tokens or rows != columns else queries
    console, title = Console(), f"{layer or (weights and weights.name)}, head {head}"
    console.print(draw(drawn, queries, keys, title=title, use_legend=legend, width=console.width))


def _ask(layer: str | None, body: dict[str, Any], where: Path | str, api_key: str | None) -> Reply:
    """Ask the layer stored in a directory, or the service at a URL."""
    from service.commands.asking import asking

    with asking(where, api_key) as ask:
        return ask(layer, body)


def _body(request: Path | None, files: dict[str, Path | None], causal: str | None) -> dict[str, Any]:
    """Return the request body: the file unchanged, or the arrays; raises InvalidInput unless exactly one is given."""
    from service.commands.asking import load_array, tensor_field

    if (request is None) == (files["query"] is None):
        raise InvalidInput("give either --query FILE.npy or --request FILE.json")
    if request is not None:
        body = _json(request)
    else:
        body = {name: tensor_field(load_array(path)) for name, path in files.items() if path is not None}
    if causal is not None:
        masks = body.get("masks", [])
        if not isinstance(masks, list):
            raise InvalidInput("masks must be a list")
        body["masks"] = [*masks, {"kind": "causal", "align": causal}]
    return body


def _json(path: Path) -> dict[str, Any]:
    import orjson

    try:
        body = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        raise InvalidInput(f"{path} is not a readable JSON file") from None
    if not isinstance(body, dict):
        raise InvalidInput(f"{path} must hold one JSON object")
    return body


def _asked_head(
    layer: str | None, body: dict[str, Any], where: Path | str, api_key: str | None, place: tuple[int, int]
) -> np.ndarray:
    """Return [L, S] of the weights that the layer gives, for a sequence and a head."""
    sequence, head = place
    reply = _ask(layer, {**body, "weights": {"form": "heads", "heads": [head]}}, where, api_key)
    weights: np.ndarray = reply.weights["weights"]
    if weights.ndim == 3:  # noqa: PLR2004 (one sequence: [heads, L, S])
        weights = weights[None]
    if sequence >= len(weights):
        raise InvalidInput(f"--sequence must be below {len(weights)}, the number of sequences")
    found: np.ndarray = weights[sequence, 0]
    return found


def _stored_head(path: Path, sequence: int, head: int) -> np.ndarray:
    """Return [L, S] of weights in a file; raises InvalidInput for another shape, or a sequence or head that it lacks."""
    from service.commands.asking import load_array

    array = load_array(path, "weights")
    if array.ndim not in (2, 3, 4) or array.dtype.kind != "f":
        raise InvalidInput(
            f"{path} must hold weights [B, H, L, S], [B, L, S] or [L, S], got {array.dtype} {list(array.shape)}"
        )
    lead = {2: (), 3: (sequence,), 4: (sequence, head)}[array.ndim]
    for option, index, size in zip(("--sequence", "--head"), lead, array.shape, strict=False):
        if index >= size:
            raise InvalidInput(f"{option} must be below {size}")
    found: np.ndarray = array[lead]
    return found


def _words(text: str | None, count: int, option: str) -> list[str]:
    if text is None:
        return [str(i) for i in range(count)]
    words = text.split()
    if len(words) != count:
        raise InvalidInput(f"{option} has {len(words)} words for {count} rows")
    return words


def _about(array: np.ndarray) -> str:
    wide = array.astype("float64")
    return f"{array.dtype} {list(array.shape)}  min {wide.min():.4g}  mean {wide.mean():.4g}  max {wide.max():.4g}"
