"""Jobs and words on the wire, each kind encoded and decoded once: of a thousand jobs few kinds are new.

What is remembered is a pure function of what it is remembered by, so forgetting it costs time and nothing else. Each
table forgets all of it when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from rota.infra.rpc.protobuf import decode, encode
from rota.model.policy import decision as model
from rota.policy.grpc import messages

CACHE_MAX: Final = 20_000
KEY_BYTES_MAX: Final = 4096
"""Longer descriptions of a job are made anew each time."""

K = TypeVar("K")
V = TypeVar("V")

_encode_key: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class Memo(Generic[K, V]):
    def __init__(self, make: Callable[[K], V], most: int = CACHE_MAX) -> None:
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


class KernelClientCodec:
    """For who asks: questions as they are sent, words as they are heard."""

    def __init__(self) -> None:
        self._sent: dict[bytes, bytes] = {}
        self._heard = Memo(_decode_decision)

    def encode_questions(self, questions: Sequence[model.PolicyRequestGroup]) -> messages.RawBatchRequest:
        return messages.RawBatchRequest(
            tuple(
                messages.RawQuestion(self._cached_request_bytes(each.asked), messages.pack_ids(each.jobs))
                for each in questions
            )
        )

    def decode_decisions(self, reply: messages.RawBatchReply) -> list[model.PolicyDecision]:
        """Raises InvalidInput for what makes no sense."""
        return [self._heard(data) if len(data) <= KEY_BYTES_MAX else _decode_decision(data) for data in reply.words]

    def _cached_request_bytes(self, asked: model.PolicyRequest) -> bytes:
        form = _encode_key(asked)
        known = self._sent.get(form)
        if known is None:
            known = encode(messages.request_to_message(asked))
            if len(self._sent) >= CACHE_MAX:
                self._sent.clear()
            if len(form) <= KEY_BYTES_MAX:
                self._sent[form] = known
        return known


class KernelServerCodec:
    """For who is asked: questions as they are heard, words as they are sent."""

    def __init__(self) -> None:
        self._heard = Memo(_decode_request)
        self._sent: dict[int, tuple[model.PolicyDecision, bytes]] = {}

    def decode_questions(self, request: messages.RawBatchRequest) -> list[model.PolicyRequestGroup]:
        """Raises InvalidInput for what makes no sense."""
        return [
            model.PolicyRequestGroup(self._cached_request(each.asked), messages.unpack_ids(each.jobs))
            for each in request.questions
        ]

    def encode_decisions(self, words: Sequence[model.PolicyDecision], fail_mode: str) -> messages.RawBatchReply:
        return messages.RawBatchReply(tuple(map(self._cached_decision_bytes, words)), fail_mode)

    def _cached_request(self, data: bytes) -> model.PolicyRequest:
        return self._heard(data) if len(data) <= KEY_BYTES_MAX else _decode_request(data)

    def _cached_decision_bytes(self, word: model.PolicyDecision) -> bytes:
        """Words of a policy are few objects, alive as long as it is; one is kept here, so that no other has its id."""
        if word.apart:
            return encode(messages.decision_to_message(word))
        known = self._sent.get(id(word))
        if known is None:
            if len(self._sent) >= CACHE_MAX:
                self._sent.clear()
            known = self._sent[id(word)] = word, encode(messages.decision_to_message(word))
        return known[1]


def _decode_decision(data: bytes) -> model.PolicyDecision:
    return messages.decision_of_message(decode(data, messages.PolicyDecisionMessage))


def _decode_request(data: bytes) -> model.PolicyRequest:
    return messages.request_of_message(decode(data, messages.PolicyRequestMessage))
