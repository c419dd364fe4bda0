"""What the policy said, as it is kept: each distinct word once, by its digest. Jobs name theirs by number.

A statement that writes a word to a job looks its number up by digest, so no process remembers numbers that a database
does not have. A word is kept before a job can name it: by itself where that can be done, else in the transaction of the
job. Whoever dies in between leaves a word that nobody names.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

from rota.infra.postgres import Database, Transaction, query
from rota.model.policy.constraints import budgets_of
from rota.model.policy.decision import PolicyDecision

STORE_DECISIONS = query(__package__, "words_keep")
READ_DECISIONS = query(__package__, "words_read")
CACHE_MAX: Final = 10_000

_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_DECODE = msgspec.msgpack.Decoder(PolicyDecision).decode


class StoredDecision(msgspec.Struct, frozen=True):
    """A word as it is kept."""

    digest: bytes
    told: bytes

    @property
    def decision(self) -> PolicyDecision:
        return _DECODE(self.told)


def encode_decision(word: PolicyDecision) -> StoredDecision:
    told = _ENCODE(word)
    return StoredDecision(sha256(told).digest(), told)


def store_arguments(words: Iterable[StoredDecision]) -> tuple[list[bytes], list[bytes], list[int | None]]:
    """Of words_keep.sql; in an order of their own, so that two who keep the same wait and never in a circle."""
    distinct = sorted({each.digest: each for each in words}.values(), key=lambda each: each.digest)
    limits = [budgets_of(each.decision.constraints).max_concurrent_jobs or None for each in distinct]
    return [each.digest for each in distinct], [each.told for each in distinct], limits


async def store_decisions(on: Database | Transaction, words: Iterable[StoredDecision]) -> None:
    arguments = store_arguments(words)
    if arguments[0]:
        await on.run(STORE_DECISIONS, *arguments)


class DecisionStore:
    """Words by number, read once each: what a number stands for never changes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._known: dict[int, PolicyDecision] = {}

    async def read(self, numbers: Iterable[int | None], *, on: Transaction | None = None) -> dict[int, PolicyDecision]:
        wanted = {number for number in numbers if number is not None}
        missing = [number for number in wanted if number not in self._known]
        if missing:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
                missing = sorted(wanted)
            for row in await (on or self.database).rows(READ_DECISIONS, missing):
                self._known[row["word"]] = _DECODE(row["told"])
        return {number: self._known[number] for number in wanted if number in self._known}
