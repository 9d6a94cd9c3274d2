"""References: the right answer to every question, to the last bit, taken before the load.

Laws: the target itself is asked, alone, one request at a time: the service promises the same bits alone and in any company, so
what differs later is a fault; a question's three forms must agree before there is a reference at all; the digest tells
whether two workers took the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from attention_load.answer import Unreadable, differing_bits, read_answer
from attention_load.question import FORMS, Question
from attention_load.target import Target, TargetFailed


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    question: Question
    arrays: Mapping[str, np.ndarray]

    def difference(self, body: bytes, content_type: str) -> str:
        """In words how an answer differs from this one; empty where it has the same bits."""
        try:
            return differing_bits(self.arrays, read_answer(body, content_type))
        except Unreadable as error:
            return str(error)


def take_references(target: Target, questions: Iterable[Question]) -> list[Reference]:
    """Raises TargetFailed, also where the forms of one question disagree."""
    return [_take(target, question) for question in questions]


def _take(target: Target, question: Question) -> Reference:
    reference: Reference | None = None
    for form, content_type in FORMS.items():
        body = target.attend(question.layer, question.bodies[form], content_type)
        if reference is None:
            reference = Reference(question, _read(body, content_type))
        elif told := reference.difference(body, content_type):
            first = next(iter(FORMS))
            raise TargetFailed(f"asked alone, {question.kind} to {question.layer} as {form} is not as {first}: {told}")
    assert reference is not None, "There are forms. This is a bug."
    return reference


def _read(body: bytes, content_type: str) -> dict[str, np.ndarray]:
    try:
        return read_answer(body, content_type)
    except Unreadable as error:
        raise TargetFailed(str(error)) from error


def references_digest(references: Iterable[Reference]) -> str:
    digest = hashlib.sha256()
    for reference in references:
        for name, array in sorted(reference.arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
