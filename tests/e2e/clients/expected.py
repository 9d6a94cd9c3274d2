"""The answers of `/v1` to the same tensors, fetched with the standard library alone; every client must get these bits."""

import base64
import json
import urllib.request

import numpy as np

LAYER = "small"
WIDTH = 16
SEED = np.random.default_rng(7)
X = SEED.standard_normal((2, 5, WIDTH)).astype(np.float32)
KEYS = SEED.standard_normal((2, 7, WIDTH)).astype(np.float32)
MASK = np.tri(5, dtype=bool)[None].repeat(2, axis=0)


def tensor(array: np.ndarray) -> dict:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def attend(url: str, **body) -> dict[str, np.ndarray]:
    """Output and weights of a request to `/v1`; arrays go as they are."""
    fields = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in body.items()}
    request = urllib.request.Request(
        f"http://{url}/v1/layers/{LAYER}/attend", json.dumps(fields).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.load(answer)
    return {name: _array(found[name]) for name in ("output", "weights") if found[name] is not None}


def _array(found: dict) -> np.ndarray:
    if found["dtype"] == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(found["dtype"])
    return np.frombuffer(base64.b64decode(found["data"]), dtype).reshape(found["shape"])


def same_bits(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def run(checks: list) -> None:
    """Each check by its name, so that a failure says which."""
    import sys

    for check in checks:
        check(sys.argv[1])
        print("ok", check.__name__, flush=True)
