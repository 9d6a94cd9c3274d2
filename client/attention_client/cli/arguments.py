"""Arguments: the files and options of a command as a request body in JSON; an error is one sentence with the file's path."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.arrays import Raw, read
from attention_client.errors import InvalidInput
from attention_client.masks import given


def by_option(message: str, options: Mapping[str, str]) -> str:
    """Return an error's message in which the words of the command line stand for fields: where a clause begins, or after "in"."""
    fields = "|".join(re.escape(name) for name in sorted(options, key=len, reverse=True))
    place = rf"(?:^|(?<=[,;] )|(?<= in )|(?<=dtype of ))({fields})(?![\w\]])(\.(?=\w))?"
    return re.sub(place, lambda found: options[found[1]] + ": " * bool(found[2]), message)


def request_body(
    request: Path | None,
    files: dict[str, Path | None],
    causal: str | None,
    masks: list[str] | None,
    weights: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the request: that of the file `request` or one of the arrays in `files`, plus masks, weights and `others`.

    None leaves one of the others to the file. Also the words of the command line that give a field, by its name in an error.
    Raises InvalidInput unless either a file or a query is given, or a text among `others`.
    """
    arrays = {name: path for name, path in files.items() if path is not None}
    if arrays if request is not None else "query" not in arrays and "text" not in (others or {}):
        raise InvalidInput("give either --query FILE.npy, perhaps with --key and --value, or --request FILE.json")
    body = {} if request is None else saved_request(request)[0]
    body |= {name: tensor_field(load_array(path)) for name, path in arrays.items()} | given(**others or {})
    fields = {**files, **(others or {})} if request is None else given(**others or {})
    options = {name: f"--{name.replace('_', '-')}" for name in fields}
    added = [(_fields("--mask", "kind", text), f'--mask "{text}"') for text in masks or ()]
    if causal is not None:
        added.append(({"kind": "causal", "align": causal}, "--causal"))
    if added:
        found = body.get("masks", [])
        if not isinstance(found, list):
            raise InvalidInput(f"masks in {request} must be a list")
        options |= {f"masks[{place}]": words for place, (_, words) in enumerate(added, len(found))}
        body["masks"] = [*found, *(mask for mask, _ in added)]
    if weights is not None:
        body["weights"], options["weights"] = _fields("--weights", "form", weights), "--weights"
    if body.get("encoding") in (None, "list"):  # how the answer writes its arrays: base64 keeps every digit
        body["encoding"] = "base64"
    return body, options


def _fields(option: str, first: str, text: str) -> dict[str, Any]:
    """Return the object that an option gives as one word and name=value pairs; the service checks the names and values.

    A value that is not JSON is text; for `values` it is the path of an array's file.
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, sign, value = word.partition("=")
        is_first = not found
        if is_first == bool(sign) or name in found:  # the first word alone has no "="
            raise InvalidInput(
                f'{option}: "{word}" is not understood: write a {first} and then name=value, each once, with blanks between them'
            )
        if is_first:
            found[first] = word
            continue
        try:
            found[name] = json.loads(value, parse_constant=dict[str, Any]().__getitem__)
        except (LookupError, ValueError, RecursionError):
            found[name] = tensor_field(load_array(Path(value))) if name == "values" else value
    if not found:
        raise InvalidInput(f"{option}: the {first} is missing")
    return found


def saved_request(path: Path) -> tuple[dict[str, Any], list[list[str] | None]]:
    """Return the request in a file, and the labels of its query rows and of its keys where the file has them.

    The file is the request as JSON, or `{"request": …, "labels": …, "key_labels": …}`, or a safetensors file with these three in
    its metadata. Raises InvalidInput, also for a duplicate key, which the service could not see.
    """
    is_binary = path.suffix.lower() == ".safetensors"
    try:
        found = _of_safetensors(path.read_bytes()) if is_binary else _json(path.read_bytes().decode())
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise InvalidInput(f"{path} is not a {'safetensors file of a request' if is_binary else 'JSON file'}") from None
    body = found.get("request", found) if isinstance(found, dict) else None
    if not isinstance(body, dict):
        raise InvalidInput(f"the request in {path} must be a JSON object")
    labels = [None if body is found else found.get(name) for name in ("labels", "key_labels")]
    for words in labels:
        if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise InvalidInput(f"the labels in {path} must be lists of texts")
    return body, labels


def _of_safetensors(content: bytes) -> dict[str, Any]:
    tensors, metadata = read(content)
    found = {name: _json(text) for name, text in metadata.items() if name != "format"}
    body = found.setdefault("request", {})
    for name, raw in tensors.items():
        mask = re.fullmatch(r"masks\.(\d+)\.values", name)
        place = body if mask is None else body["masks"][int(mask[1])]
        place[name if mask is None else "values"] = _of_raw(raw)
    return found


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_members)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise InvalidInput("an object of the request has a duplicate key")
    return members


def tensor_field(array: np.ndarray) -> dict[str, Any]:
    """Return an array as the contract's base64 tensor object."""
    return _of_raw(Raw(array.dtype.name, array.astype(array.dtype.newbyteorder("<"), copy=False)))


def _of_raw(raw: Raw) -> dict[str, Any]:
    data = base64.b64encode(raw.bits.tobytes()).decode()
    return {"dtype": raw.dtype, "shape": list(raw.bits.shape), "data": data}


def load_array(path: Path, name: str | None = None) -> np.ndarray:
    """Return the array of a .npy file; with a `name` also that array of an .npz file, or its only array."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if name is not None and not isinstance(found, np.ndarray):
                found = found[name if name in found or len(found) != 1 else next(iter(found))]
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from None
    except KeyError:
        raise InvalidInput(f"{path} has no array called {name}") from None
    except Exception as error:  # for damaged bytes numpy and zipfile raise a dozen unrelated types
        raise InvalidInput(f"{path} is not a readable {'.npy or .npz' if name else '.npy'} file") from error
    if not isinstance(found, np.ndarray):
        raise InvalidInput(f"{path} must hold one array (.npy)")
    return found
