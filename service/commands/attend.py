"""`attend` and `show` commands: ask a layer from the terminal, save the answer, draw the weights.

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
    import numpy as np
    import orjson
    from rich.console import Console

    body = _body(request, {"query": query, "key": key, "value": value}, causal)
    if weights is not None:
        body["weights"] = {"form": weights}
    reply = _ask(layer, body, directory(layers_dir) if local else url, api_key)
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
    layer: Layer,
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    head: Annotated[int, typer.Option("--head", min=0, help="which head to draw")] = 0,
    sequence: Annotated[int, typer.Option("--sequence", min=0, help="which sequence of a batch to draw")] = 0,
    tokens: Annotated[str | None, typer.Option("--tokens", help='words of the query rows: "the cat sat"')] = None,
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

    body = _body(request, {"query": query, "key": key, "value": value}, causal)
    body["weights"] = {"form": "heads", "heads": [head]}
    reply = _ask(layer, body, directory(layers_dir) if local else url, api_key)
    weights = _one_head(reply, sequence)
    rows, columns = weights.shape
    queries = _words(tokens, rows, "--tokens")
    keys = _words(key_tokens, columns, "--key-tokens") if key_tokens or rows != columns else queries
    console = Console()
    title = f"{layer}, head {head}"
    console.print(draw(weights, queries, keys, title=title, use_legend=legend, width=console.width))


def _ask(layer: str, body: dict[str, Any], where: Path | str, api_key: str | None) -> Reply:
    """Ask the layer stored in a directory, or the service at a URL."""
    from service.commands.asking import ask_local, ask_server

    return ask_local(where, layer, body) if isinstance(where, Path) else ask_server(where, layer, body, api_key)


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


def _one_head(reply: Reply, sequence: int) -> np.ndarray:
    weights: np.ndarray = reply.weights["weights"]
    if weights.ndim == 3:  # noqa: PLR2004 (one sequence: [heads, L, S])
        weights = weights[None]
    if sequence >= len(weights):
        raise InvalidInput(f"--sequence must be below {len(weights)}, the number of sequences")
    head: np.ndarray = weights[sequence, 0]
    return head


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
