"""Stored policy decisions: each distinct decision once, by its digest. Jobs refer to theirs by number.

A statement that assigns a decision to a job looks its number up by digest, so no process caches numbers that a
database does not have. A decision is stored before a job can refer to it: in a transaction of its own where possible,
else in that of the job. A crash in between leaves an unreferenced decision.
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
    """An encoded decision and its digest."""

    digest: bytes
    told: bytes

    @property
    def decision(self) -> PolicyDecision:
        return _DECODE(self.told)


def encode_decision(decision: PolicyDecision) -> StoredDecision:
    encoded = _ENCODE(decision)
    return StoredDecision(sha256(encoded).digest(), encoded)


def store_arguments(decisions: Iterable[StoredDecision]) -> tuple[list[bytes], list[bytes], list[int | None]]:
    """Arguments of words_keep, sorted by digest so that concurrent writers of the same decisions cannot deadlock."""
    distinct = sorted({each.digest: each for each in decisions}.values(), key=lambda each: each.digest)
    limits = [budgets_of(each.decision.constraints).max_concurrent_jobs or None for each in distinct]
    return [each.digest for each in distinct], [each.told for each in distinct], limits


async def store_decisions(on: Database | Transaction, decisions: Iterable[StoredDecision]) -> None:
    arguments = store_arguments(decisions)
    if arguments[0]:
        await on.run(STORE_DECISIONS, *arguments)


class DecisionStore:
    """Reads decisions by number and caches them: a number never changes its meaning."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._cache: dict[int, PolicyDecision] = {}

    async def read(self, numbers: Iterable[int | None], *, on: Transaction | None = None) -> dict[int, PolicyDecision]:
        requested = {number for number in numbers if number is not None}
        missing = [number for number in requested if number not in self._cache]
        if missing:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
                missing = sorted(requested)
            for row in await (on or self.database).rows(READ_DECISIONS, missing):
                self._cache[row["word"]] = _DECODE(row["told"])
        return {number: self._cache[number] for number in requested if number in self._cache}
