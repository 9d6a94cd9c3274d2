"""Model request: a text or tokens for a model; its JSON forms, and their checks, which tokenize and give a call with its cost.

Invariants: What a request asks of the layer is checked by `check_request`, with zeros in the place of the hidden states, so that
it means the same as on the layer's own route. No error repeats text. Run the checks off the event loop: a long text takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import orjson
import torch
from pydantic import BaseModel, Field

from service.batching.job import Cost
from service.errors import CostLimit, InvalidInput
from service.models.encoder import EncoderCall, placeholder
from service.models.served_model import ServedModel
from service.models.tokenizer import Tokens, check_length
from service.wire.answer import Answer, Batch, Timing, write_json, write_tensor
from service.wire.attend_request import (
    AnswerFacts,
    CheckedRequest,
    Encoding,
    EntropyField,
    Indices,
    LseField,
    MaskedRowsField,
    RequestLimits,
    ScoresSelection,
    WeightsSelection,
    check_request,
    decode_indices,
    read_model,
)
from service.wire.layouts import Layout
from service.wire.mask_kinds import MaskList
from service.wire.schemas import StrictModel, Tensor
from service.wire.tensors import TensorForm

MAX_TEXT = 2**17
"""Characters of a text, as of a pair: a tokenizer takes 0.1 s for as many, the slowest 3 s."""
_ONE_OF = "send text, or tokens"
EncodingField = Annotated[
    Encoding | None, Field(description="how the tensors of the answer are written; default: list")
]


class TextRequest(StrictModel):
    """One sequence: a text, a pair of texts, or tokens."""

    text: str | None = Field(default=None, description=f"at most {MAX_TEXT:,} characters; default: tokens")
    text_pair: str | None = Field(default=None, description="the second text of a pair; default: none")
    tokens: list[str] | None = Field(
        default=None, description="strings of the vocabulary, to which nothing is added; default: those of text"
    )
    encoding: EncodingField = None


class ModelAttendRequest(TextRequest):
    """One sequence for one layer of a model: the layer attends on the hidden states of the unmasked model in front of it."""

    layer: int = Field(description="from 0 to the number of layers - 1")
    masks: MaskList
    weights: WeightsSelection = None
    scores: ScoresSelection = None
    lse: LseField = False
    entropy: EntropyField = False
    masked_rows: MaskedRowsField = "zero"


class StatesRequest(TextRequest):
    """One sequence, for the hidden states of a model."""

    layers: Indices = Field(description="n is in front of layer n, the number of layers is behind the last; each once")


Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class Token(BaseModel):
    """`text` can be sent back in `tokens`; offsets and sequence are null for special tokens, and if tokens were sent."""

    text: str = Field(description="the string of the vocabulary")
    id: int = Field(description="its row in the vocabulary")
    offsets: Span | None = Field(description="begin and end in Unicode code points")
    sequence: int | None = Field(description="0 in text, 1 in text_pair")


class ModelName(BaseModel):
    name: str = Field(description="the model")
    digest: str = Field(description="sha256 of its tensors, options and layers")


class ModelAnswer(Answer):
    """As of the layer's own route, with the tokens."""

    tokens: list[Token] = Field(description="of the sequence, in order")
    model: ModelName = Field(description="whose tokens and states these are")


class StatesAnswer(BaseModel):
    states: Tensor = Field(description="[K, L, D], in the requested order, float32")
    layers: list[int] = Field(description="as requested")
    tokens: list[Token] = Field(description="of the sequence, in order")
    model: ModelName = Field(description="what answered")
    batch: Batch = Field(description="what shared the forward pass")
    timing_ms: Timing = Field(description="how long it took")


class ModelFacts(NamedTuple):
    """The facts of an answer: those of the call, and `more`, which the request knows; hidden states are of no one layer."""

    facts: AnswerFacts
    more: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        found = self.facts.to_json()
        if "layers" in self.more:
            del found["layer"], found["masked_rows"]
        return {**found, **self.more}


_OF_MODEL = {"layer", *TextRequest.model_fields}
Checked = tuple[CheckedRequest, dict[str, Any]]
"""A call that can run, and the facts of its answer that are known before it runs."""
Check = Callable[[Mapping[str, object], ServedModel, RequestLimits], Checked]


def check_model_attend(document: Mapping[str, object], model: ServedModel, limits: RequestLimits) -> Checked:
    """Check a request for attention; raises InvalidInput or a subclass, CostLimit, and MaskedRow."""
    body = read_model(ModelAttendRequest, document)
    depth = len(model.layers)
    if not 0 <= body.layer < depth:
        raise InvalidInput(f"layer must be from 0 to {depth - 1}: the model has {depth} layers", param="/layer")
    tokens, layer = _tokens(body, model), model.layers[body.layer]
    length, width = len(tokens.ids), layer.spec.query_width
    zeros = {"dtype": "float32", "shape": [length, width], "data": memoryview(bytearray(4 * length * width))}
    of_layer = {name: value for name, value in document.items() if name not in _OF_MODEL}
    found = check_request({"query": zeros, **of_layer}, layer.name, layer.spec, limits).counted()
    attend: Any = found.call._replace(query=placeholder(length, width))
    call: Any = EncoderCall(torch.tensor(tokens.ids), torch.tensor(tokens.types), body.layer, attend)
    cost = found.cost._replace(flops=found.cost.flops + model.encoder.flops(length, body.layer))
    more = {"layer": {"name": layer.name, "digest": layer.digest}, **_more(tokens, model)}
    return found._replace(call=call, cost=cost, form=_form(body)), more


def check_states(document: Mapping[str, object], model: ServedModel, limits: RequestLimits) -> Checked:
    """Check a request for hidden states; raises InvalidInput or a subclass, and CostLimit."""
    body = read_model(StatesRequest, document)
    states = decode_indices(body.layers, len(model.layers) + 1, "/layers") or ()
    tokens = _tokens(body, model)
    length = len(tokens.ids)
    cells = max(layer.spec.num_heads for layer in model.layers) * length**2
    flops, num_bytes = model.encoder.flops(length, max(states)), 4 * length * model.about.options.width
    cost = Cost(sequences=1, tokens=length, cells=cells, weights_bytes=0, input_bytes=num_bytes, flops=flops)
    limits.check(cost, 0)
    call: Any = EncoderCall(torch.tensor(tokens.ids), torch.tensor(tokens.types), states=states)
    return CheckedRequest(call, cost, Layout("bld"), _form(body)), {"layers": states, **_more(tokens, model)}


def _tokens(body: TextRequest, model: ServedModel) -> Tokens:
    """Return the tokens of the request; raises InvalidInput unless there are some and all have a position."""
    most = model.about.options.max_tokens
    if body.tokens is not None:
        if body.text is not None or body.text_pair is not None:
            raise InvalidInput(f"the request has both text and tokens; {_ONE_OF}", param="/tokens")
        check_length(len(body.tokens), most, "/tokens")
        return model.tokenizer.of_tokens(body.tokens)
    if body.text is None:
        has_pair = body.text_pair is not None
        words = "text_pair needs text" if has_pair else f"the request has neither text nor tokens; {_ONE_OF}"
        raise InvalidInput(words, param="/text_pair" if has_pair else "/text")
    for name, text in (("text", body.text), ("text_pair", body.text_pair or "")):
        if len(text) > MAX_TEXT:
            raise CostLimit(f"{name} has {len(text):,} characters, expected at most {MAX_TEXT:,}; send a part of it")
    return model.tokenizer.of_text(body.text, body.text_pair, most)


def _more(tokens: Tokens, model: ServedModel) -> dict[str, Any]:
    rows = zip(tokens.texts, tokens.ids, tokens.offsets, tokens.sequences, strict=True)
    fields = Token.model_fields
    return {
        "tokens": [dict(zip(fields, row, strict=True)) for row in rows],
        "model": {"name": model.about.name, "digest": model.digest},
    }


def _form(body: TextRequest) -> TensorForm:
    return TensorForm.BASE64 if body.encoding == "base64" else TensorForm.NESTED


def write_model_json(tensors: dict[str, torch.Tensor], facts: ModelFacts, form: TensorForm) -> Iterator[bytes]:
    """Yield the JSON of an attend answer, or of `states`, in pieces."""
    if "states" not in tensors:
        yield from write_json(tensors, facts, form)
        return
    yield b'{"states":'
    yield from write_tensor(tensors["states"], form)
    yield b"," + orjson.dumps(facts.to_json())[1:]
