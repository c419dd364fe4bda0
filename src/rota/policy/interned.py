"""Jobs and words on the wire, each kind encoded and decoded once: of a thousand jobs few kinds are new.

What is remembered is a pure function of what it is remembered by, so forgetting it costs time and nothing else. Each
table forgets all of it when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from rota.infra.rpc.protobuf import decode, encode
from rota.model import policy as model
from rota.policy import wire

REMEMBERED: Final = 20_000
KEY_MAX: Final = 4096
"""Longer descriptions of a job are made anew each time."""

K = TypeVar("K")
V = TypeVar("V")

_FORM: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class Memo(Generic[K, V]):
    def __init__(self, make: Callable[[K], V], most: int = REMEMBERED) -> None:
        self._make = make
        self._most = most
        self._known: dict[K, V] = {}

    def __call__(self, key: K) -> V:
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[key] = self._make(key)
        return found


class Asking:
    """For who asks: questions as they are sent, words as they are heard."""

    def __init__(self) -> None:
        self._sent: dict[bytes, bytes] = {}
        self._heard = Memo(_word_heard)

    def request(self, questions: Sequence[model.Question]) -> wire.RawBatchRequest:
        return wire.RawBatchRequest(
            tuple(wire.RawQuestion(self._asked(each.asked), wire.ids_sent(each.jobs)) for each in questions)
        )

    def words(self, reply: wire.RawBatchReply) -> list[model.Word]:
        """Raises InvalidInput for what makes no sense."""
        return [self._heard(data) if len(data) <= KEY_MAX else _word_heard(data) for data in reply.words]

    def _asked(self, asked: model.Asked) -> bytes:
        form = _FORM(asked)
        known = self._sent.get(form)
        if known is None:
            known = encode(wire.asked_sent(asked))
            if len(self._sent) >= REMEMBERED:
                self._sent.clear()
            if len(form) <= KEY_MAX:
                self._sent[form] = known
        return known


class Answering:
    """For who is asked: questions as they are heard, words as they are sent."""

    def __init__(self) -> None:
        self._heard = Memo(_asked_heard)
        self._sent: dict[int, tuple[model.Word, bytes]] = {}

    def questions(self, request: wire.RawBatchRequest) -> list[model.Question]:
        """Raises InvalidInput for what makes no sense."""
        return [model.Question(self._asked(each.asked), wire.ids_heard(each.jobs)) for each in request.questions]

    def reply(self, words: Sequence[model.Word], fail_mode: str) -> wire.RawBatchReply:
        return wire.RawBatchReply(tuple(map(self._word, words)), fail_mode)

    def _asked(self, data: bytes) -> model.Asked:
        return self._heard(data) if len(data) <= KEY_MAX else _asked_heard(data)

    def _word(self, word: model.Word) -> bytes:
        """Words of a policy are few objects, alive as long as it is; one is kept here, so that no other has its id."""
        if word.apart:
            return encode(wire.word_sent(word))
        known = self._sent.get(id(word))
        if known is None:
            if len(self._sent) >= REMEMBERED:
                self._sent.clear()
            known = self._sent[id(word)] = word, encode(wire.word_sent(word))
        return known[1]


def _word_heard(data: bytes) -> model.Word:
    return wire.word_heard(decode(data, wire.Word))


def _asked_heard(data: bytes) -> model.Asked:
    return wire.asked_heard(decode(data, wire.Asked))
