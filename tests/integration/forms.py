"""One request in every form that the service takes, and what came back as arrays."""

import base64
import dataclasses
import json

import ml_dtypes
import numpy as np
import safetensors

WIDTH, HEADS = 16, 4
DATATYPES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "bool": "BOOL",
    "int32": "INT32",
    "int64": "INT64",
}
SHORT = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL", "int32": "I32", "int64": "I64",
}  # fmt: skip
DTYPES = {
    **{name: np.dtype(name) for name in DATATYPES if name != "bfloat16"},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMPY = {datatype: DTYPES[name] for name, datatype in DATATYPES.items()}
OUTPUTS = ("output", "scores", "lse", "entropy", "present_key", "present_value")
BINARY = "application/vnd.safetensors"


@dataclasses.dataclass
class Request:
    """query [B, L, d] or [L, d] and so on; masks are (fields, values or None)."""

    query: np.ndarray
    key: np.ndarray | None = None
    value: np.ndarray | None = None
    masks: list[tuple[dict, np.ndarray | None]] = dataclasses.field(default_factory=list)
    weights: dict | None = None
    more: dict = dataclasses.field(default_factory=dict)
    """`scores`, `lse`, `entropy`, `present` and `layer_masks`."""
    places: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """`positions`, `key_positions`, `past_key` and `past_value`."""

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        named = {"query": self.query, "key": self.key, "value": self.value}
        return {name: array for name, array in named.items() if array is not None} | self.places

    def fields(self, write) -> dict:
        """The JSON of `/v1` with every tensor written by `write`."""
        body = {name: write(array) for name, array in self.tensors.items()}
        body["masks"] = [f if values is None else {**f, "values": write(values)} for f, values in self.masks]
        return body | self.asked

    @property
    def asked(self) -> dict:
        return self.more | ({} if self.weights is None else {"weights": self.weights})

    @property
    def float_dtypes(self) -> set[str]:
        values = [values for _, values in self.masks if values is not None]
        return {array.dtype.name for array in [*self.tensors.values(), *values] if array.dtype.name in FLOATS}

    @property
    def has_inference_form(self) -> bool:
        """The Open Inference Protocol has no windows, offsets and top k."""
        kinds = [fields["kind"] for fields, _ in self.masks]
        form = (self.weights or {}).get("form")
        is_plain = set(self.weights or {}) <= {"form"} and form != "top_k" and len(self.more.get("scores", {})) < 2
        aligned = all(f["kind"] != "causal" or "align" in f for f, _ in self.masks)
        return "window" not in kinds and len(set(kinds)) == len(kinds) and is_plain and aligned


def as_list(array: np.ndarray) -> dict:
    """An object with a flat list; every dtype's numbers are float64's, which JSON writes exactly."""
    flat = array.ravel()
    numbers = flat.tolist() if array.dtype.kind in "bi" else flat.astype(np.float64).tolist()
    data = ["-inf" if number == float("-inf") else number for number in numbers]
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def as_nested(array: np.ndarray):
    if array.dtype.kind in "bi":
        return array.tolist()
    return json.loads(json.dumps(array.astype(np.float64).tolist()).replace("-Infinity", '"-inf"'))


def as_base64(array: np.ndarray) -> dict:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def as_safetensors(request: Request, pad: int = 0) -> bytes:
    tensors = dict(request.tensors)
    for i, (_, values) in enumerate(request.masks):
        if values is not None:
            tensors[f"masks.{i}.values"] = values
    fields: dict = {"masks": [fields for fields, _ in request.masks], **request.asked}
    header: dict = {"__metadata__": {"request": json.dumps(fields)}}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": SHORT[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


# The axes that a mask may have, and those that need no name; by whether the query is a batch.
AXES = {False: ("s", "ls", "hls"), True: ("s", "ls", "hls", "bs", "bls", "bhls")}
OPTIONAL_AXES = {False: AXES[False], True: ("s", "bhls")}
INPUT_NAMES = {"attend": "attend_mask", "ignore": "ignore_mask", "bias": "bias", "lengths": "lengths"}


def as_inference(request: Request, *, binary: bool) -> tuple[bytes, int]:
    """The body and the length of its JSON."""
    tensors = dict(request.tensors)
    parameters: dict = {"binary_data_output": binary}
    for fields, values in request.masks:
        if fields["kind"] == "causal":
            parameters["causal"] = fields["align"]
        else:
            assert values is not None
            tensors[INPUT_NAMES[fields["kind"]]] = values
            axes = fields.get("axes")
            if request.query.ndim == 2 and fields["kind"] != "lengths":  # the batch axis is always there
                axes = "b" + (axes or AXES[False][values.ndim - 1])
            if axes is not None:
                parameters[INPUT_NAMES[fields["kind"]] + "_axes"] = axes
    if request.query.ndim == 2:
        tensors = {name: array[None] for name, array in tensors.items()}
    if request.weights is not None:
        parameters["weights"] = request.weights["form"]
    parameters |= {name: value["stage"] if name == "scores" else value for name, value in request.more.items()}
    inputs, data = [], b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        told = {"name": name, "shape": list(array.shape), "datatype": DATATYPES[array.dtype.name]}
        if binary:
            inputs.append({**told, "parameters": {"binary_data_size": len(raw)}})
            data += raw
        else:
            inputs.append({**told, "data": as_list(array)["data"]})
    head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    return head + data, len(head)


def read_json(answer: dict) -> dict[str, np.ndarray]:
    found = {name: _array(answer[name]) for name in OUTPUTS if name in answer}
    weights = answer["weights"]
    if isinstance(weights, dict) and "indices" in weights:
        return found | {f"weights.{name}": _array(tensor) for name, tensor in weights.items()}
    return found if weights is None else found | {"weights": _array(weights)}


def _array(tensor) -> np.ndarray:
    if isinstance(tensor, list):
        return np.array(tensor, np.float32)
    dtype = DTYPES[tensor["dtype"]]
    if isinstance(tensor["data"], str):
        return np.frombuffer(base64.b64decode(tensor["data"]), dtype).reshape(tensor["shape"])
    return np.array(tensor["data"], np.float64).astype(dtype).reshape(tensor["shape"])


def read_safetensors(content: bytes) -> dict[str, np.ndarray]:
    dtypes = {short: DTYPES[name] for name, short in SHORT.items()}
    return {
        name: np.frombuffer(bytes(told["data"]), dtypes[told["dtype"]]).reshape(told["shape"])
        for name, told in safetensors.deserialize(content)
    }


def read_inference(content: bytes, json_length: str | None) -> dict[str, np.ndarray]:
    head = len(content) if json_length is None else int(json_length)
    at, found = head, {}
    for output in json.loads(content[:head])["outputs"]:
        dtype = NUMPY[output["datatype"]]
        if "data" in output:
            array = np.array(output["data"], np.float64).astype(dtype)
        else:
            size = output["parameters"]["binary_data_size"]
            array = np.frombuffer(content[at : at + size], dtype)
            at += size
        found[output["name"]] = array.reshape(output["shape"])
    assert at == len(content)
    return found


async def answers(service, request: Request) -> dict[str, dict[str, np.ndarray]]:
    """The answers to one request, by the form in which it was sent."""
    found = {}
    writers = {"a flat list": as_list, "base64": as_base64}
    if request.float_dtypes == {"float32"}:
        writers["nested lists"] = as_nested
    for name, write in writers.items():
        answer = await service.attend(request.fields(write))
        assert answer.status_code == 200, answer.text
        found[name] = read_json(answer.json())
    path = "/v1/layers/small/attend"
    for pad in (0, 3):
        body = as_safetensors(request, pad)
        answer = await service.client.post(path, content=body, headers={"content-type": BINARY})
        assert answer.status_code == 200, answer.text
        found[f"safetensors, {pad}"] = read_safetensors(answer.content)
    if not request.has_inference_form:
        return found
    # 16-bit floats have no JSON form there.
    for binary in (True, False) if request.float_dtypes <= {"float32", "float64"} else (True,):
        body, head = as_inference(request, binary=binary)
        headers = {"inference-header-content-length": str(head)} if binary else {}
        answer = await service.client.post("/v2/models/small/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        read = read_inference(answer.content, answer.headers.get("inference-header-content-length"))
        if request.query.ndim == 2:
            read = {name: array[0] for name, array in read.items()}
        found[f"open inference, {binary}"] = read
    return found


def check_same_bits(found: dict[str, dict[str, np.ndarray]]) -> None:
    wanted = found["base64"]
    for form, tensors in found.items():
        assert tensors.keys() == wanted.keys(), form
        for name, array in tensors.items():
            assert array.dtype == wanted[name].dtype or form == "nested lists", (form, name)
            assert array.astype(wanted[name].dtype).tobytes() == wanted[name].tobytes(), (form, name)
