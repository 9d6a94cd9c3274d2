"""Errors: the class tree of every way in which a request or a layer can fail.

ServiceError
├── Rejected             the request cannot be served as it stands; repeating it changes nothing
│   ├── Malformed        the bytes do not parse (BadRequest, BadJson, JsonTooDeep, DuplicateKey, BadEncoding,
│   │                    BadBinary)
│   ├── InvalidInput     the bytes parse, but a value is invalid (BadShape, BadDtype, BadMask, MaskKindRequired,
│   │                    MaskAxesRequired, CausalAlignRequired, NonFinite, MaskedRow, UnknownField)
│   ├── TooLarge         the request exceeds a limit (BodyTooLarge, DecompressedTooLarge, CostLimit, TargetTooLong,
│   │                    HeadersTooLarge)
│   ├── NotServed        the service has no such resource, method or format (LayerNotFound, RouteNotFound, MethodNotAllowed,
│   │                    NotAcceptable, UnsupportedMediaType, UnsupportedContentEncoding)
│   ├── Denied           this caller may not do it (Unauthorized, Forbidden)
│   └── ClientTimeout    the headers or the body did not arrive in time
├── Refused              not now (QueueFull, RateLimited, LayerChanged, NotReady, Draining); each has a time to retry after
├── Failed               accepted, but not answered (DeadlineExceeded, EngineFailed, EngineDown)
└── LayerError           a checkpoint or stored layer is invalid or missing (LayerMissing), or this process cannot load it
                         (LayerNotLoaded). The command line and the start raise it; a layer rollout turns it into
                         InvalidInput, LayerNotFound, LayerChanged or NotReady

Invariants: `code` is stable and part of the contract. A message states what was expected and what came, in words and numbers; it
never repeats the caller's values, a path, or a library's text. No status code lives here: `api/problems.py` has the table. The
client raises the same classes and sets `status`, `request_id` and `retry_after_s`. In the service they are None, except
`retry_after_s` of Refused.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """Root of the tree: a stable `code`, a message for people, and a JSON pointer to the field (`param`) if there is one."""

    code: ClassVar[str]
    status: int | None = None
    request_id: str | None = None
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Rejected(ServiceError):
    code = "rejected"


class Malformed(Rejected):
    code = "malformed"


class BadRequest(Malformed):
    code = "bad_request"


class BadJson(Malformed):
    code = "bad_json"


class JsonTooDeep(Malformed):
    code = "json_too_deep"


class DuplicateKey(Malformed):
    code = "duplicate_key"


class BadEncoding(Malformed):
    code = "bad_encoding"


class BadBinary(Malformed):
    code = "bad_binary"


class InvalidInput(Rejected):
    code = "invalid"


class BadShape(InvalidInput):
    code = "bad_shape"


class BadDtype(InvalidInput):
    code = "bad_dtype"


class BadMask(InvalidInput):
    code = "bad_mask"


class MaskKindRequired(InvalidInput):
    code = "mask_kind_required"


class MaskAxesRequired(InvalidInput):
    code = "mask_axes_required"


class CausalAlignRequired(InvalidInput):
    code = "causal_align_required"


class LayoutRequired(InvalidInput):
    code = "layout_required"


class NonFinite(InvalidInput):
    code = "non_finite"


class MaskedRow(InvalidInput):
    code = "masked_row"


class UnknownField(InvalidInput):
    code = "unknown_field"


class TooLarge(Rejected):
    code = "too_large"


class BodyTooLarge(TooLarge):
    code = "body_too_large"


class DecompressedTooLarge(TooLarge):
    code = "decompressed_too_large"


class CostLimit(TooLarge):
    code = "cost_limit"


class TargetTooLong(TooLarge):
    code = "target_too_long"


class HeadersTooLarge(TooLarge):
    code = "headers_too_large"


class NotServed(Rejected):
    code = "not_served"


class LayerNotFound(NotServed):
    code = "layer_not_found"


class RouteNotFound(NotServed):
    code = "not_found"


class MethodNotAllowed(NotServed):
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class NotAcceptable(NotServed):
    code = "not_acceptable"


class UnsupportedMediaType(NotServed):
    code = "unsupported_media_type"


class UnsupportedContentEncoding(NotServed):
    code = "unsupported_content_encoding"


class Denied(Rejected):
    code = "denied"


class Unauthorized(Denied):
    """The key is missing or unknown; the error does not reveal which."""

    code = "unauthorized"


class Forbidden(Denied):
    code = "forbidden"


class ClientTimeout(Rejected):
    code = "client_timeout"


class Refused(ServiceError):
    """The request is valid but not accepted now; the caller may retry after `retry_after_s` whole seconds."""

    code = "refused"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    code = "queue_full"


class RateLimited(Refused):
    code = "rate_limited"


class LayerChanged(Refused):
    """The layer's file changed while the processes loaded it, or another change of the layer came first."""

    code = "layer_changed"


class NotReady(Refused):
    code = "not_ready"


class Draining(Refused):
    code = "draining"


class Failed(ServiceError):
    code = "failed"


class DeadlineExceeded(Failed):
    code = "deadline_exceeded"


class EngineFailed(Failed):
    code = "engine_failed"


class EngineDown(Failed):
    code = "engine_down"


class LayerError(ServiceError):
    code = "layer_error"


class LayerMissing(LayerError):
    code = "layer_missing"


class LayerNotLoaded(LayerError):
    """This process cannot load the layer; no fault of its file is known."""

    code = "layer_not_loaded"


def codes_of(*branches: type[ServiceError]) -> frozenset[str]:
    """Return the codes of these branches' subclasses in this file; a branch without subclasses gives its own.

    InvalidInput and LayerError are raised themselves too, so their codes (`invalid`, `layer_error`) are included.
    """
    found: set[str] = set()
    for branch in branches:
        below = [kind for kind in branch.__subclasses__() if kind.__module__ == __name__]
        found |= codes_of(*below)
        if not below or branch in (InvalidInput, LayerError):
            found.add(branch.code)
    return frozenset(found)
