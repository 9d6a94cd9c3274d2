"""`attend`, `sdpa`, `show`, `compare` and `golden`: the commands, with their options.

Invariants: `show` requests the weights itself, or reads those of an earlier answer, and draws one head. The words on the axes are
the tokens of a text, else the user gives them, one for each row. The references of `golden` never come from the service, and its
files are written before it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attention_client.cli.arguments import request_body, saved_request
from attention_client.cli.asking import URL, asking
from attention_client.cli.case_file import errors, read_case, tolerance, widened
from attention_client.cli.golden_vectors import VECTORS, golden_of
from attention_client.cli.heat_map import Words, asked_head, print_map, stored_head, text_head
from attention_client.cli.readings import found_in, readings_of
from attention_client.cli.terminal import Screen, progress
from attention_client.errors import ClientError, InvalidInput
from attention_client.request import extras


def with_suffix(*suffixes: str) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    def check(param: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            raise InvalidInput(f"{param.opts[0]} {path}: the file must end with {' or '.join(suffixes)}")
        return path

    return check


# The service's words about the list of heads that `show` makes of its one.
HEAD = {"weights.heads must be a non-empty list of different numbers": "--head must be a number"}

QueryFile = Annotated[Path | None, typer.Option("--query", help="query array, .npy: [L, d] or [B, L, d]")]
KeyFile = Annotated[Path | None, typer.Option("--key", help="key array, .npy; default: the query")]
ValueFile = Annotated[Path | None, typer.Option("--value", help="value array, .npy; default: the key")]
PositionsFile = Annotated[
    Path | None, typer.Option("--positions", help="positions of the query rows, .npy: [L] or [B, L]; default: 0, 1, …")
]
KeyPositionsFile = Annotated[
    Path | None, typer.Option("--key-positions", help="positions of the keys, .npy: [S] or [B, S]; default: the same")
]
LayerMasks = Annotated[
    str | None, typer.Option("--layer-masks", help='"none" leaves out the layer\'s own causal mask and window')
]
PastKeyFile = Annotated[Path | None, typer.Option("--past-key", help="keys before the first row, .npy: [Hkv, P, d]")]
PastValueFile = Annotated[Path | None, typer.Option("--past-value", help="their values, .npy: [Hkv, P, dv]")]
Present = Annotated[bool, typer.Option("--present", help="return all keys and values, the past of a later call")]
RequestFile = Annotated[
    Path | None, typer.Option("--request", help="complete request, .json or .safetensors, instead of arrays")
]
Causal = Annotated[str | None, typer.Option("--causal", help="causal mask: top_left or bottom_right")]
Masks = Annotated[
    list[str] | None,
    typer.Option(
        "--mask", help='a mask and its fields, repeatable: "causal align=top_left", "attend axes=bs values=FILE.npy"'
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help='return weights too: "heads", "mean", "contributions" or "top_k k=3"; also heads=[0] queries=[0,1]',
    ),
]
WeightsFile = Annotated[
    Path | None, typer.Option("--weights", help="draw these weights, .npz or .npy: [B, H, L, S], [B, L, S] or [L, S]")
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", help="write a picture to this .svg", callback=with_suffix(".svg"))
]
Scores = Annotated[str | None, typer.Option("--scores", help="scaled, capped or masked: return scores too")]
Lse = Annotated[bool, typer.Option("--lse", help="return the log-sum-exp of the masked scores too")]
Entropy = Annotated[bool, typer.Option("--entropy", help="return the entropy of each row of weights too, in nats")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="write the output to an .npy, or all arrays to an .npz", callback=with_suffix(".npy", ".npz")
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON, with nested lists")]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="ATTENTION_URL", help=f"address of the service; default: {URL}"),
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="ATTENTION_CLIENT_KEY", help="API key, if the service needs one")
]


def attend(
    layer: Annotated[str, typer.Argument(help="name of a served layer")],
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    positions: PositionsFile = None,
    key_positions: KeyPositionsFile = None,
    layer_masks: LayerMasks = None,
    past_key: PastKeyFile = None,
    past_value: PastValueFile = None,
    present: Present = False,
    request: RequestFile = None,
    causal: Causal = None,
    mask: Masks = None,
    weights: Weights = None,
    scores: Scores = None,
    lse: Lse = False,
    entropy: Entropy = False,
    out: Out = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Send arrays through a layer, and print or save the answer."""
    files = {"query": query, "key": key, "value": value, "past_key": past_key, "past_value": past_value}
    files |= {"positions": positions, "key_positions": key_positions}
    others = extras(scores, lse, entropy) | {"layer_masks": layer_masks, "present": present or None}
    body, options = request_body(request, files, causal, mask, weights, others)
    with asking(url, api_key, options) as ask:
        reply = ask(layer, body)
    reply.report(out, as_json=as_json)


def _array(name: str) -> Any:
    return typer.Option(f"--{name}", help=f"{name} array, .npy, with the axes of the layout")


def sdpa(
    query: Annotated[Path | None, _array("query")] = None,
    key: Annotated[Path | None, _array("key")] = None,
    value: Annotated[Path | None, _array("value")] = None,
    request: RequestFile = None,
    layout: Annotated[str | None, typer.Option("--layout", help="ld, bld, hld, lhd, bhld, blhd or packed")] = None,
    num_heads: Annotated[int | None, typer.Option("--num-heads", help="query heads, with layout packed")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="key and value heads, with packed")] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="factor of query·key; default: 1/√d")] = None,
    softcap: Annotated[float | None, typer.Option("--softcap", help="c: a score s becomes c·tanh(s/c)")] = None,
    causal: Causal = None,
    mask: Masks = None,
    weights: Weights = None,
    scores: Scores = None,
    lse: Lse = False,
    entropy: Entropy = False,
    out: Out = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Compute attention on arrays of your own, without a layer."""
    others: dict[str, Any] = {"layout": layout, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "scale": scale}
    others |= {"softcap": softcap, **extras(scores, lse, entropy)}
    body, options = request_body(request, {"query": query, "key": key, "value": value}, causal, mask, weights, others)
    with asking(url, api_key, options) as ask:
        reply = ask(None, body)
    reply.report(out, as_json=as_json)


def show(
    layer: Annotated[str | None, typer.Argument(help="name of a served layer; not with --text or --weights")] = None,
    text: Annotated[str | None, typer.Option("--text", help="draw a layer of a model on this text")] = None,
    text_pair: Annotated[str | None, typer.Option("--text-pair", help="a second text after --text")] = None,
    model: Annotated[str | None, typer.Option("--model", help="model of --text; default: the only one")] = None,
    number: Annotated[int | None, typer.Option("--layer", min=0, help="layer of the model; default: 0")] = None,
    query: QueryFile = None,
    key: KeyFile = None,
    value: ValueFile = None,
    request: RequestFile = None,
    causal: Causal = None,
    mask: Masks = None,
    head: Annotated[int | None, typer.Option("--head", min=0, help="which head to draw; default: 0")] = None,
    sequence: Annotated[int, typer.Option("--sequence", min=0, help="which sequence, or head of [H, L, S]")] = 0,
    tokens: Annotated[str | None, typer.Option("--tokens", help='words of the query rows: "the cat sat"')] = None,
    weights: WeightsFile = None,
    key_tokens: Annotated[str | None, typer.Option(help="words of the key rows; default: --tokens")] = None,
    legend: Annotated[bool, typer.Option("--legend", help="draw the marks * + . instead of colours")] = False,
    svg: SvgFile = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Draw one head's attention weights as a heat map."""
    if legend and svg:
        raise InvalidInput("--legend is of the terminal; --svg has its own scale")
    if (text_pair, model, number) != (None, None, None) if text is None else any((tokens, key_tokens, sequence)):
        raise InvalidInput("--text-pair, --model and --layer go with --text; --tokens, --key-tokens, --sequence do not")
    _check_source(layer, text, weights, any((query, key, value, request)), any((causal, mask)))
    words = _words(tokens, key_tokens, request)
    if weights is not None:
        drawn, title = stored_head(weights, sequence, head)
    else:
        of_text = {} if text is None else {"text": text, "text_pair": text_pair, "layer": number or 0}
        body, options = request_body(request, {"query": query, "key": key, "value": value}, causal, mask, None, of_text)
        with asking(url, api_key, options | HEAD) as ask:
            if text is None:
                drawn, title = asked_head(ask, layer, body, sequence, head or 0), f"{layer}, head {head or 0}"
            else:
                drawn, words, title = text_head(ask, model, body, head or 0)
    print_map(drawn, words, title, svg, use_legend=legend)


def _words(tokens: str | None, key_tokens: str | None, request: Path | None) -> list[Words]:
    """Return the words of query rows and keys: those of the options, else the labels of the request."""
    if request is not None and tokens is None and key_tokens is None:
        return saved_request(request)[1]
    return [None if given is None else given.split() for given in (tokens, key_tokens)]


def _check_source(layer: object, text: object, weights: object, has_arrays: object, has_masks: object) -> None:
    is_one = sum(source is not None for source in (layer, text, weights)) == 1
    if not is_one or (layer is None and has_arrays) or (weights and has_masks):
        words = "give either a layer or --weights FILE or --text"
        raise InvalidInput(f"{words}; arrays and a request go only with a layer, masks not with --weights")


def compare(
    case: Annotated[
        Path, typer.Argument(metavar="CASE", help="safetensors: query, key, value, output and perhaps mask")
    ],
    scale: Annotated[list[float] | None, typer.Option("--scale", help="try this scale too; may be repeated")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many readings to list, if fewer reproduce the output")] = 10,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Find the conventions of the kernel that computed an output.

    A reading is one combination of conventions. The metadata `request` (JSON) may fix layout, num_heads, num_kv_heads,
    scale, softcap and window. A reading reproduces the output if no number is off by more than a fraction of the output's
    largest magnitude: float64 1e-9, float32 1e-5, float16 4e-3, bfloat16 3e-2. Exit code 1 if none does.
    """
    read = read_case(case)
    readings, output = readings_of(read, scale or []), read.tensors["output"]
    screen = Screen()
    with asking(url, api_key) as ask, progress("readings", screen) as counted:
        found = sorted(one for reading in counted(readings) for one in found_in(ask, reading, output.dtype))
    limit = tolerance(widened(output), output.dtype)
    count = sum(one.absolute <= limit for one in found)
    screen.print(f"{case.name}, sha256 {read.sha256}", soft_wrap=True)
    screen.print(f"{count} of {len(found)} readings reproduce the {output.dtype} output within {limit:.3g}")
    table = Table("same", "max abs error", "max ULP", "reading", box=None, width=80)
    for one in found[: max(count, top)]:
        table.add_row("yes" if one.absolute <= limit else "no", f"{one.absolute:.3g}", f"{one.ulps:.3g}", one.words)
    screen.print(table)
    if not count:
        raise ClientError(
            f"no reading reproduces the output within {limit:.3g}; "
            f"the nearest, {found[0].words}, is off by {found[0].absolute:.3g}"
        )


def golden(
    out: Annotated[Path, typer.Option("--out", help="directory for the files; made if it is missing")],
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="seed of the inputs")] = 0,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Write test vectors for kernels, and compare the service with them.

    Exit code 1 if an answer is off by more than this fraction of its reference's largest magnitude: float64 1e-9,
    float32 1e-5, float16 4e-3, bfloat16 3e-2.
    """
    made = [golden_of(vector, seed) for vector in VECTORS]
    for one in made:
        one.write(out, seed)
    screen, shares = Screen(), []
    with asking(url, api_key) as ask, progress(f"of {len(made)} vectors", screen) as counted:
        for one in counted(made):
            vector, reply = one.vector, ask(None, one.body())
            lse_dtype = "float64" if vector.dtype == "float64" else "float32"
            for name, reference, dtype in (("output", one.output, vector.dtype), ("lse", one.lse, lse_dtype)):
                error, ulps = errors(reply.array(name, reference.shape).astype(float), reference, dtype)
                shares.append((error / tolerance(reference, dtype), f"{name} of {vector.name}"))
                screen.print(f"{vector.name:20} {name:6} max abs error {error:8.3g}, max ULP {ulps:.3g}")
    share, where = max(shares)
    text = f"{len(made)} vectors in {out}; the largest error is {share:.3g} of its tolerance, {where}"
    screen.print(text, soft_wrap=True)
    if share > 1:
        raise ClientError(f"the service's {where} is off by {share:.3g} times the tolerance")
