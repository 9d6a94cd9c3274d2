"""Errors: the exception tree of the client, which mirrors that of the service.

Invariants: the `code` of an error response names the class. The classes, their codes and their parents are those of
`service/errors.py` (tests/contract/test_client_errors.py compares them). `ClientError` holds errors that only the client detects.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """Base class: a stable `code`, a message, and `param`, a JSON pointer to the field, or None.

    `status`, `request_id` and `retry_after_s` (seconds) come from the answer; each is None if it is not known.
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
    """The request is wrong; sending it again unchanged fails again."""

    code = "rejected"


class Malformed(Rejected):
    """The request does not parse."""

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
    """The request parses, but a field has a value that is not valid."""

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
    """The service has nothing at this path, or not for this method or media type."""

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
    """The API key is missing, unknown, or lacks the role."""

    code = "denied"


class Unauthorized(Denied):
    code = "unauthorized"


class Forbidden(Denied):
    code = "forbidden"


class ClientTimeout(Rejected):
    code = "client_timeout"


class Refused(ServiceError):
    """The service does not accept the request now; send it again after `retry_after_s` seconds."""

    code = "refused"


class QueueFull(Refused):
    code = "queue_full"


class RateLimited(Refused):
    code = "rate_limited"


class LayerChanged(Refused):
    """The file of a layer changed while the worker processes loaded it."""

    code = "layer_changed"


class NotReady(Refused):
    code = "not_ready"


class Draining(Refused):
    code = "draining"


class Failed(ServiceError):
    """The service accepted the request but could not answer it."""

    code = "failed"


class DeadlineExceeded(Failed):
    code = "deadline_exceeded"


class EngineFailed(Failed):
    code = "engine_failed"


class EngineDown(Failed):
    code = "engine_down"


class LayerError(ServiceError):
    """A checkpoint or a stored layer is not valid."""

    code = "layer_error"


class LayerMissing(LayerError):
    code = "layer_missing"


class LayerNotLoaded(LayerError):
    code = "layer_not_loaded"


class ClientError(ServiceError):
    """A failure that only the client detects."""

    code = "client_error"


class ConnectionFailed(ClientError):
    """No answer: connection refused or cut, unknown host, or a proxy that cannot reach the service (`status` 502)."""

    code = "connection_failed"


class BadAnswer(ClientError):
    """The answer is damaged, too large, or does not come from an attention service."""

    code = "bad_answer"
