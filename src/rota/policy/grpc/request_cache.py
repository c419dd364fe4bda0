"""Codecs for policy requests and decisions, with caches: of a thousand jobs few are distinct.

A cached value is a pure function of its key, so eviction costs time only. A full table is cleared.
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
"""Longer keys are not cached."""

K = TypeVar("K")
V = TypeVar("V")

_encode_key: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class Memo(Generic[K, V]):
    def __init__(self, make: Callable[[K], V], max_entries: int = CACHE_MAX) -> None:
        self._make = make
        self._max_entries = max_entries
        self._entries: dict[K, V] = {}

    def __call__(self, key: K) -> V:
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= self._max_entries:
                self._entries.clear()
            found = self._entries[key] = self._make(key)
        return found


class KernelClientCodec:
    """The client side: encodes questions and decodes decisions."""

    def __init__(self) -> None:
        self._encoded: dict[bytes, bytes] = {}
        self._decoded = Memo(_decode_decision)

    def encode_questions(self, questions: Sequence[model.PolicyRequestGroup]) -> messages.RawBatchRequest:
        return messages.RawBatchRequest(
            tuple(
                messages.RawQuestion(self._cached_request_bytes(each.asked), messages.pack_ids(each.jobs))
                for each in questions
            )
        )

    def decode_decisions(self, reply: messages.RawBatchReply) -> list[model.PolicyDecision]:
        """Raises InvalidInput for a malformed message."""
        return [self._decoded(data) if len(data) <= KEY_BYTES_MAX else _decode_decision(data) for data in reply.words]

    def _cached_request_bytes(self, request: model.PolicyRequest) -> bytes:
        key = _encode_key(request)
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = encode(messages.request_to_message(request))
            if len(self._encoded) >= CACHE_MAX:
                self._encoded.clear()
            if len(key) <= KEY_BYTES_MAX:
                self._encoded[key] = encoded
        return encoded


class KernelServerCodec:
    """The server side: decodes questions and encodes decisions."""

    def __init__(self) -> None:
        self._decoded = Memo(_decode_request)
        self._encoded: dict[int, tuple[model.PolicyDecision, bytes]] = {}

    def decode_questions(self, request: messages.RawBatchRequest) -> list[model.PolicyRequestGroup]:
        """Raises InvalidInput for a malformed message."""
        return [
            model.PolicyRequestGroup(self._cached_request(each.asked), messages.unpack_ids(each.jobs))
            for each in request.questions
        ]

    def encode_decisions(self, decisions: Sequence[model.PolicyDecision], fail_mode: str) -> messages.RawBatchReply:
        return messages.RawBatchReply(tuple(map(self._cached_decision_bytes, decisions)), fail_mode)

    def _cached_request(self, data: bytes) -> model.PolicyRequest:
        return self._decoded(data) if len(data) <= KEY_BYTES_MAX else _decode_request(data)

    def _cached_decision_bytes(self, decision: model.PolicyDecision) -> bytes:
        """A policy has few decision objects; a cached one is kept alive so that no other object gets its id()."""
        if decision.apart:
            return encode(messages.decision_to_message(decision))
        encoded = self._encoded.get(id(decision))
        if encoded is None:
            if len(self._encoded) >= CACHE_MAX:
                self._encoded.clear()
            encoded = self._encoded[id(decision)] = decision, encode(messages.decision_to_message(decision))
        return encoded[1]


def _decode_decision(data: bytes) -> model.PolicyDecision:
    return messages.decision_of_message(decode(data, messages.PolicyDecisionMessage))


def _decode_request(data: bytes) -> model.PolicyRequest:
    return messages.request_of_message(decode(data, messages.PolicyRequestMessage))
