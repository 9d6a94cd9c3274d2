"""Answer rules: what an answer may be, whatever was asked (the first rule of `docs/internals/reliability.md`); which of the
refusals is right, they do not say.

Invariants: the status is one of the contract's; a refusal has the contract's form, a code that belongs to its status, at most
4 KiB, nothing of the input, of a path, a trace or a pointer; what is called JSON is JSON, without NaN.
"""

from __future__ import annotations

import json
import re

from tests.torture.raw_connection import Reply

# A word that inputs carry wherever a caller may put words; no answer may repeat it.
MARK = "zqx-marked"
MAX_REFUSAL_BYTES = 4096

CODES: dict[int, set[str]] = {
    400: {"bad_json", "json_too_deep", "duplicate_key", "bad_encoding", "bad_binary", "bad_request"},
    401: {"unauthorized"},
    403: {"forbidden"},
    404: {"layer_not_found", "model_not_found", "not_found"},
    405: {"method_not_allowed"},
    406: {"not_acceptable"},
    408: {"client_timeout"},
    409: {"layer_changed", "layers_fixed"},
    413: {"body_too_large", "decompressed_too_large", "cost_limit"},
    414: {"target_too_long"},
    415: {"unsupported_media_type", "unsupported_content_encoding"},
    422: {
        "bad_shape", "bad_dtype", "bad_mask", "mask_kind_required", "mask_axes_required", "causal_align_required",
        "positions_required", "layout_required", "non_finite", "masked_row", "unknown_field", "invalid",
    },
    429: {"queue_full", "rate_limited"},
    431: {"headers_too_large"},
    503: {"not_ready", "draining", "engine_down"},
    504: {"deadline_exceeded"},
}  # fmt: skip
_FIELDS = {"type", "title", "status", "detail", "code", "param", "request_id"}
_FORBIDDEN = re.compile(
    rb"zqx-marked|Traceback|site-packages|\.py\b|0x[0-9a-fA-F]{6,}|/usr/|/home/|/tmp/|simdjson|orjson|pydantic|Error:"
)
_INFERENCE_CODE = re.compile(r"\(([a-z_]+)\)$")


def violation(reply: Reply, *, is_inference: bool = False, is_head: bool = False) -> str | None:
    """Return the rule that an answer violates, in words; None if it violates none."""
    if is_head or reply.status < 400:
        return None if is_head else _violation_of_success(reply)
    return _violation_of_refusal(reply, is_inference=is_inference)


def _violation_of_refusal(reply: Reply, *, is_inference: bool) -> str | None:
    if reply.status not in CODES:
        return f"status {reply.status}"
    if len(reply.body) > MAX_REFUSAL_BYTES:
        return f"{reply.status} of {len(reply.body)} bytes"
    if found := _FORBIDDEN.search(reply.body):
        return f"{reply.status} echoes its input or tells of its innards: {found[0]!r}"
    try:
        told = strict_json(reply.body)
    except ValueError:
        # What the parser of the transport refuses has no route, hence no form yet; it is short and plain.
        return None if _is_transport(reply) else f"{reply.status} is not JSON"
    return _violation_of_inference(reply, told) if is_inference else _violation_of_problem(reply, told)


def strict_json(text: bytes) -> object:
    """Return what the text says; raise ValueError also for NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text.decode("utf-8"), parse_constant=refuse)


def _is_transport(reply: Reply) -> bool:
    return (
        reply.status == 400 and len(reply.body) < 100 and reply.headers.get("content-type", "").startswith("text/plain")
    )


def _violation_of_success(reply: Reply) -> str | None:
    kind = reply.headers.get("content-type", "")
    if reply.status == 307 and reply.headers.get("location") in ("docs", "explore"):  # from / to a page
        return None
    if reply.status not in (200, 204):
        return f"status {reply.status}"
    if "content-encoding" in reply.headers:
        return None
    try:
        if kind.startswith("application/json"):
            strict_json(reply.body)
        elif kind == "application/vnd.safetensors":
            length = int.from_bytes(reply.body[:8], "little")
            strict_json(reply.body[8 : 8 + length])
        elif "inference-header-content-length" in reply.headers:
            strict_json(reply.body[: int(reply.headers["inference-header-content-length"])])
    except ValueError:
        return f"a 200 of {kind} that is not"
    return None


def _violation_of_problem(reply: Reply, told: object) -> str | None:
    if not isinstance(told, dict) or set(told) != _FIELDS:
        return f"{reply.status} has other fields: {str(told)[:80]}"
    if reply.headers.get("content-type") != "application/problem+json" or told["status"] != reply.status:
        return f"{reply.status} is no problem details"
    if told["code"] not in CODES[reply.status]:
        return f"{reply.status} with the code {told['code']}"
    if told["request_id"] != reply.headers.get("x-request-id"):
        return f"{reply.status} with two request ids"
    if reply.status in (429, 503) and "retry-after" not in reply.headers:
        return f"{reply.status} without Retry-After"
    return "405 without Allow" if reply.status == 405 and "allow" not in reply.headers else None


def _violation_of_inference(reply: Reply, told: object) -> str | None:
    if not isinstance(told, dict) or set(told) != {"error"} or not isinstance(told["error"], str):
        return f"{reply.status} is no error of the Open Inference Protocol: {str(told)[:80]}"
    code = _INFERENCE_CODE.search(told["error"])
    known = set().union(*CODES.values())
    return None if code and code[1] in known else f"{reply.status} without a code of ours"
