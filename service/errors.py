"""Every way a request or a layer can fail, as one family tree.

ServiceError
├── Rejected             the caller's request cannot be served as it stands; repeating it changes nothing
│   ├── Malformed        the bytes do not parse (BadRequest, BadJson, JsonTooDeep, DuplicateKey, BadEncoding,
│   │                    BadBinary)
│   ├── InvalidInput     they parse and are wrong (BadShape, BadDtype, BadMask, MaskKindRequired, CausalAlignRequired,
│   │                    NonFinite, MaskedRow, UnknownField)
│   ├── TooLarge         they are more than a request may be (BodyTooLarge, DecompressedTooLarge, CostLimit,
│   │                    TargetTooLong, HeadersTooLarge)
│   ├── NotServed        nothing answers to that (LayerNotFound, RouteNotFound, MethodNotAllowed, NotAcceptable,
│   │                    UnsupportedMediaType, UnsupportedContentEncoding)
│   ├── Denied           not to this caller (Unauthorized, Forbidden)
│   └── ClientTimeout    the headers or the body did not arrive in time
├── Refused              not now (QueueFull, RateLimited, LayerChanged, NotReady, Draining); each says when to come back
├── Failed               accepted, but not answered (DeadlineExceeded, EngineFailed, EngineDown)
└── LayerError           a checkpoint or a stored layer is not what it must be, not there at all (LayerMissing), or there is no
                         room for it here (LayerNotLoaded): command line and start-up; a change of layers makes an
                         InvalidInput, a LayerNotFound, a LayerChanged or a NotReady of it

Laws: `code` is stable and part of the contract; the message says what was expected and what came, in words and numbers,
and never repeats the caller's values, a path, or a library's text. No status code lives here: `api/problems.py` has the table.
The client raises the same classes; what it was told besides (`status`, `request_id`, `retry_after_s`) is None on this side.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """The root: a stable `code`, a sentence for people, and a JSON pointer to the field (`param`) where there is one."""

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


class CausalAlignRequired(InvalidInput):
    code = "causal_align_required"


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
    """No key, or none that is known: which of the two is not told."""

    code = "unauthorized"


class Forbidden(Denied):
    code = "forbidden"


class ClientTimeout(Rejected):
    code = "client_timeout"


class Refused(ServiceError):
    """Nothing is wrong with the request; `retry_after_s` whole seconds from now it may be taken."""

    code = "refused"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    code = "queue_full"


class RateLimited(Refused):
    code = "rate_limited"


class LayerChanged(Refused):
    """The file of a layer did not stay the same while the processes loaded it."""

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
    """Nothing is known to be wrong with its file: this process cannot load it."""

    code = "layer_not_loaded"


def codes_of(*branches: type[ServiceError]) -> frozenset[str]:
    """The codes below these branches, as far as this file tells them; where a branch has none, its own.

    A branch whose own code is told as well (`invalid`, `layer_error`) is named here.
    """
    found: set[str] = set()
    for branch in branches:
        below = [kind for kind in branch.__subclasses__() if kind.__module__ == __name__]
        found |= codes_of(*below)
        if not below or branch in (InvalidInput, LayerError):
            found.add(branch.code)
    return frozenset(found)
