"""Errors: the class tree of every way in which a request or a layer can fail.

ServiceError
├── Rejected           the request cannot be served as it stands; repeating it changes nothing
│   ├── Malformed      the bytes do not parse
│   ├── InvalidInput   the bytes parse, but a value is invalid
│   ├── TooLarge       the request exceeds a limit
│   ├── NotServed      the service has no such resource, method or format
│   ├── LayersFixed    the layers of this service come from elsewhere, and no request changes them
│   ├── Denied         this caller may not do it
│   └── ClientTimeout  the headers or the body did not arrive in time
├── Refused            valid, but not accepted now; each has a time to retry after
├── Failed             valid, but not answered: too late, or a fault of the service
└── LayerError         a checkpoint or stored layer is invalid or missing, or this process cannot load it. The command line and
                       the start raise it; a layer rollout turns it into InvalidInput, LayerNotFound, LayerChanged or NotReady

Invariants: `code` is stable and part of the contract. A message states what was expected and what came, in words and numbers. In
an answer it never repeats the caller's values, a path, or a library's text; on the command line it names the user's files. No
status code lives here: `api/problems.py` has the table. The client has a tree of the same names, whose errors also carry the
`status` and `request_id` of the answer. Only a Refused and EngineDown have `retry_after_s`. What the command line prints passes
`printable`.
"""

from __future__ import annotations

import re
import unicodedata
from typing import ClassVar


class ServiceError(Exception):
    """Root of the tree: a stable `code`, a message, a JSON pointer to the field (`param`), and `shown`, which no log has."""

    code: ClassVar[str]
    retry_after_s: float | None = None

    def __init_subclass__(cls, *, code: str = "") -> None:
        cls.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, *, param: str | None = None, shown: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.shown = shown


class Rejected(ServiceError): ...


class Malformed(Rejected): ...


class BadRequest(Malformed):
    """The request line, a header or the framing of the body is not valid HTTP, or the host is not allowed. Let an HTTP library
    write the request; check what a proxy forwards, and `ATTENTION_ALLOWED_HOSTS`.
    """


class BadJson(Malformed):
    """The body is not valid JSON in UTF-8. Read the place in `detail`; JSON has no NaN and no Infinity."""


class JsonTooDeep(Malformed):
    """The JSON is nested deeper than `ATTENTION_MAX_JSON_DEPTH`. Nest it less; a request needs at most seven levels."""


class DuplicateKey(Malformed):
    """A JSON object has the same name twice. Send each field once; `detail` has its name, except where text is sent."""


class BadEncoding(Malformed):
    """Base64 or a compressed body is damaged. Check for cut or escaped text, and that Content-Encoding names the right coding."""


class BadBinary(Malformed):
    """The lengths in a binary body do not match its bytes. Use a safetensors library or check Inference-Header-Content-Length."""


class InvalidInput(Rejected, code="invalid"):
    """A field has a value that it does not take. `param` points to the field, and `detail` says what is expected."""


class BadShape(InvalidInput):
    """A tensor's shape fits neither the layer nor the other tensors. `detail` says which shape is expected; GET
    /v1/layers/{layer} gives the widths.
    """


class BadDtype(InvalidInput):
    """A value or a dtype is not of the kind that the field takes. `detail` names the index and what is expected."""


class BadMask(InvalidInput):
    """A mask's values, shape, axes or options are wrong. `detail` lists the shapes that fit; a mask of floats is a `bias`."""


class MaskKindRequired(InvalidInput):
    """A mask does not say what its values mean. Write `{"kind": "attend", "values": …}` (true: may attend) or `"ignore"` (true:
    must not).
    """


class MaskAxesRequired(InvalidInput):
    """A mask of 2 or 3 axes has two readings in a batch. Set `axes`; `detail` lists both readings."""


class CausalAlignRequired(InvalidInput):
    """A causal mask over different numbers of queries and keys has two readings. Set `align` to `top_left` or `bottom_right`, or
    give `offset`.
    """


class PositionsRequired(InvalidInput):
    """A layer uses positions, and rows and keys of different numbers have two usual readings. Send `positions` and
    `key_positions`; `detail` has both.
    """


class LayoutRequired(InvalidInput):
    """A tensor of 3 axes has several readings in attention without a layer. Set `layout`."""


class NonFinite(InvalidInput):
    """A tensor has a NaN, an infinity, or a number beyond its dtype's range. `detail` has its index; only a bias takes -inf."""


class MaskedRow(InvalidInput):
    """The masks leave a query without a key, and `masked_rows` is `"error"`. Correct the masks, or set `"zero"` to get zeros."""


class UnknownField(InvalidInput):
    """The request has a field that the service does not know. `detail` lists the known fields and the nearest one, and gives the
    names of other libraries' fields here.
    """


class TooLarge(Rejected): ...


class BodyTooLarge(TooLarge):
    """The body is larger than `ATTENTION_MAX_BODY_BYTES`. Send tensors as safetensors or in base64, or fewer sequences."""


class DecompressedTooLarge(TooLarge):
    """The decompressed body exceeds `ATTENTION_MAX_BODY_BYTES`. Send tensors as safetensors or in base64, or fewer sequences."""


class CostLimit(TooLarge):
    """The request exceeds a limit of rows, scores, numbers or memory. `detail` says how to send less."""


class TargetTooLong(TooLarge):
    """The path and query are longer than `ATTENTION_MAX_TARGET_BYTES`. Put data into the body."""


class HeadersTooLarge(TooLarge):
    """The header fields exceed `ATTENTION_MAX_HEADERS` or `ATTENTION_MAX_HEADER_BYTES`. Send fewer or shorter ones; look for
    large cookies.
    """


class NotServed(Rejected): ...


class LayerNotFound(NotServed):
    """No layer of that name is served. GET /v1/layers lists the names; `attention-service layers import` stores one in the layer
    directory; a restart, or PUT /v1/layers/{layer} with an admin key, serves it.
    """


class ModelNotFound(NotServed):
    """No model of that name is in the layer directory. GET /v1/models lists the names; `attention-service models import` stores
    one there.
    """


class RouteNotFound(NotServed, code="not_found"):
    """The service has no such path. /docs lists the paths."""


class MethodNotAllowed(NotServed):
    """The path exists, but not with this method. The header Allow lists the methods."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class NotAcceptable(NotServed):
    """Accept or Accept-Encoding allows nothing that the service can write. `detail` lists what the header must allow."""


class UnsupportedMediaType(NotServed):
    """The service cannot read the body's Content-Type. Send application/json or application/vnd.safetensors."""


class UnsupportedContentEncoding(NotServed):
    """The body is compressed in a way that the service cannot read. Send it plain, or compress it once: `/v1` takes gzip and
    zstd, `/v2` gzip and deflate.
    """


class LayersFixed(Rejected):
    """Layers cannot be changed by a request here: they come from elsewhere. Change them there; `detail` says where."""


class Denied(Rejected): ...


class Unauthorized(Denied):
    """The key is missing or unknown; the error does not reveal which. Send `Authorization: Bearer <key>` or `X-API-Key`."""


class Forbidden(Denied):
    """The key's role may not do this, or layers cannot be changed here. Changes need a key of role `admin` in
    `ATTENTION_API_KEYS_FILE`.
    """


class ClientTimeout(Rejected):
    """The headers or body came too late. Send faster, or raise `ATTENTION_HEADER_TIMEOUT_S` or `ATTENTION_BODY_TIMEOUT_S`."""


class Refused(ServiceError):
    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        """The caller may retry after `retry_after_s` whole seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    """The request would wait too long, or the queue is full. Repeat it after Retry-After seconds; if that recurs, add workers."""


class RateLimited(Refused):
    """The key (without keys: all clients) exceeded `ATTENTION_RATE_LIMIT_PER_S`. Repeat it after Retry-After seconds."""


class LayerChanged(Refused):
    """The layer's file changed while the processes loaded it, or another change of the layer came first. GET the layer, then
    repeat the change if it is still needed.
    """


class NotReady(Refused):
    """The service is not ready, has no free connection, or cannot change a layer now. Repeat it after Retry-After seconds; GET
    /readyz gives the reason if the service is not ready.
    """


class Draining(Refused):
    """The service is shutting down. Send the request to another instance."""


class Failed(ServiceError): ...


class DeadlineExceeded(Failed):
    """The answer was not ready before the deadline. Allow more time in X-Request-Timeout-Ms, or send less work."""


class EngineFailed(Failed):
    """The service has a fault. The log has its traceback under the request id; please report it."""


class EngineDown(Failed):
    """The computation of this process has failed or hangs, and the process is replaced. Repeat it after Retry-After seconds."""

    retry_after_s = 5


class LayerError(ServiceError):
    """A checkpoint or stored layer is invalid."""


class LayerMissing(LayerError):
    """The directory has no file of the layer."""


class LayerNotLoaded(LayerError):
    """This process cannot load the layer; no fault of its file is known."""


def raised_kinds(*branches: type[ServiceError]) -> list[type[ServiceError]]:
    """Return the classes of these branches that are raised, in the order of this file: those with a docstring."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, branches)]
    return [kind for kind in kinds if kind.__doc__]


# Characters that control a terminal, end a line or change the direction, without the joiners, which scripts and emoji need.
_HARMFUL = ("Cc", "Cf", "Cs", "Zl", "Zp")
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Return one line that is safe for a terminal, with escapes in the place of harmful characters.

    Text of a file, a server or a caller could otherwise hide our words or forge a second message.
    """
    harmful = {char for char in text if unicodedata.category(char) in _HARMFUL and char not in _JOINERS}
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in harmful})
