"""Tokenizer: the tokens of a text by a model's own tokenizer.json, read by the library `tokenizers`.

Invariants: Nothing is cut off or padded, whatever the file says. Every id is below the model's vocabulary. No error repeats text
of a caller: those of the library hold it, so they are not chained. The library is imported with the first tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from service.errors import InvalidInput, LayerError

R = TypeVar("R")


class Tokens(NamedTuple):
    """One sequence, an entry for each token: `texts` are strings of the vocabulary, `types` segments.

    `offsets` are Unicode code points of the text that `sequences` names (0 = text, 1 = pair). Both are None for the tokens that
    the tokenizer adds, and of `Tokenizer.of_tokens`.
    """

    ids: Sequence[int]
    types: Sequence[int]
    texts: Sequence[str]
    offsets: Sequence[tuple[int, int] | None]
    sequences: Sequence[int | None]


class Tokenizer:
    def __init__(self, raw: bytes, vocabulary: int) -> None:
        """Read a tokenizer.json; raise LayerError if it is none, or if an id is not below `vocabulary`."""
        from tokenizers import Tokenizer as Library  # noqa: PLC0415 (a service without a model does not need it)

        library: Any = _guarded(lambda: Library.from_buffer(raw))
        if library is not None:
            library.no_truncation()
            library.no_padding()
        # A template may add tokens that the vocabulary does not have.
        added = _guarded(lambda: [*library.encode("").ids, *library.encode("", "").ids])
        if added is None:
            raise LayerError("tokenizer.json is not one that the library tokenizers reads")
        if (largest := max(0, *added, *library.get_vocab().values())) >= vocabulary:
            raise LayerError(f"tokenizer.json has the id {largest}, but the model has embeddings of {vocabulary} ids")
        self._library = library

    def of_text(self, text: str, pair: str | None = None, most: int | None = None) -> Tokens:
        """Return the tokens of a text or a pair, with those that the model's tokenizer adds.

        Raises InvalidInput, also for more than `most` tokens: before it makes lists of them, which holds up other threads.
        """
        for name, given in (("text", text), ("text_pair", pair)):
            if given is not None and not _is_unicode(given):
                raise InvalidInput(f"{name} has a lone surrogate, half of a character", param=f"/{name}")
        found = _guarded(lambda: self._library.encode(text, pair))
        if found is None:
            raise InvalidInput("the model's tokenizer has no tokens for this text", param="/text")
        if most is not None:
            check_length(len(found), most, "/text", " with those that the model adds")
        sequences = found.sequence_ids
        for place, name in enumerate(("text", "text_pair") if pair is not None else ("text",)):
            if place not in sequences:
                raise InvalidInput(f"{name} has no token; expected at least one visible character", param=f"/{name}")
        pairs = zip(found.offsets, sequences, strict=True)
        offsets = [None if sequence is None else span for span, sequence in pairs]
        return Tokens(found.ids, found.type_ids, found.tokens, offsets, sequences)

    def of_tokens(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens with these strings, all of type 0, and no others. Raises InvalidInput."""
        if not texts:
            raise InvalidInput("tokens is empty; expected at least one", param="/tokens")
        ids: list[Any] = [self._library.token_to_id(text) if _is_unicode(text) else None for text in texts]
        if None in ids:
            place = ids.index(None)
            hint = "expected a string of its vocabulary, as answers have it in tokens"
            raise InvalidInput(f"token {place} is none of the model's; {hint}", param=f"/tokens/{place}")
        nothing = [None] * len(ids)
        return Tokens(ids, [0] * len(ids), list(texts), nothing, nothing)


def check_length(found: int, most: int, param: str, which: str = "") -> None:
    """Raise InvalidInput for more than `most` tokens."""
    if found > most:
        words = f"the sequence has {found:,} tokens{which}, the model takes at most {most:,}; send a part"
        raise InvalidInput(words, param=param)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _guarded(work: Callable[[], R]) -> R | None:
    """Return what `work` returns, or None if the library fails; its panics are BaseExceptions."""
    try:
        return work()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None
