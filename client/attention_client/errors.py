"""Errors: every way a call can fail, as the tree of classes that the service has too.

Invariants: a problem's `code` names the class; the classes, their codes and their parents are those of `service/errors.py`
(tests/contract/test_client_errors.py compares them); `ClientError` holds what only this side can notice.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """The root: a stable `code`, a message, and a JSON pointer to the field (`param`) where there is one.

    `status`, `request_id` and `retry_after_s` (seconds) are those of the answer; None where there was none.
    """

    code: ClassVar[str]
    status: int | None = None
    request_id: str | None = None
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Rejected(ServiceError):
    """The request cannot be served as it stands; a repetition changes nothing."""

    code = "rejected"


class Malformed(Rejected):
    """The bytes do not parse."""

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
    """The fields parse and are wrong."""

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
    """The request is larger than a limit of the service."""

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
    """Nothing answers at that path, or not in that form."""

    code = "not_served"


class LayerNotFound(NotServed):
    code = "layer_not_found"


class RouteNotFound(NotServed):
    code = "not_found"


class MethodNotAllowed(NotServed):
    code = "method_not_allowed"
    allow = ""


class NotAcceptable(NotServed):
    code = "not_acceptable"


class UnsupportedMediaType(NotServed):
    code = "unsupported_media_type"


class UnsupportedContentEncoding(NotServed):
    code = "unsupported_content_encoding"


class Denied(Rejected):
    """The key is missing, unknown, or lacks the role."""

    code = "denied"


class Unauthorized(Denied):
    code = "unauthorized"


class Forbidden(Denied):
    code = "forbidden"


class ClientTimeout(Rejected):
    code = "client_timeout"


class Refused(ServiceError):
    """The request is not accepted now; `retry_after_s` says when to send it again."""

    code = "refused"


class QueueFull(Refused):
    code = "queue_full"


class RateLimited(Refused):
    code = "rate_limited"


class LayerChanged(Refused):
    """The file of a layer changed while the processes loaded it."""

    code = "layer_changed"


class NotReady(Refused):
    code = "not_ready"


class Draining(Refused):
    code = "draining"


class Failed(ServiceError):
    """The request was accepted and not answered."""

    code = "failed"


class DeadlineExceeded(Failed):
    code = "deadline_exceeded"


class EngineFailed(Failed):
    code = "engine_failed"


class EngineDown(Failed):
    code = "engine_down"


class LayerError(ServiceError):
    """A checkpoint or a stored layer is not what it must be."""

    code = "layer_error"


class LayerMissing(LayerError):
    code = "layer_missing"


class LayerNotLoaded(LayerError):
    code = "layer_not_loaded"


class ClientError(ServiceError):
    """A failure that only the client can notice."""

    code = "client_error"


class ConnectionFailed(ClientError):
    """No answer: refused, cut off, no such host, or a proxy that could not reach the service (`status` 502)."""

    code = "connection_failed"


class BadAnswer(ClientError):
    """An answer that is damaged, or not of this service."""

    code = "bad_answer"
