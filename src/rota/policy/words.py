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
from rota.model.policy import Word
from rota.model.policy_effects import budgets_of

KEEP = query(__package__, "words_keep")
READ = query(__package__, "words_read")
REMEMBERED: Final = 10_000

_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode
_DECODE = msgspec.msgpack.Decoder(Word).decode


class Said(msgspec.Struct, frozen=True):
    """A word as it is kept."""

    digest: bytes
    told: bytes

    @property
    def word(self) -> Word:
        return _DECODE(self.told)


def said(word: Word) -> Said:
    told = _ENCODE(word)
    return Said(sha256(told).digest(), told)


def keep_arguments(words: Iterable[Said]) -> tuple[list[bytes], list[bytes], list[int | None]]:
    """Of words_keep.sql; in an order of their own, so that two who keep the same wait and never in a circle."""
    distinct = sorted({each.digest: each for each in words}.values(), key=lambda each: each.digest)
    limits = [budgets_of(each.word.constraints).max_concurrent_jobs or None for each in distinct]
    return [each.digest for each in distinct], [each.told for each in distinct], limits


async def keep(on: Database | Transaction, words: Iterable[Said]) -> None:
    arguments = keep_arguments(words)
    if arguments[0]:
        await on.run(KEEP, *arguments)


class Words:
    """Words by number, read once each: what a number stands for never changes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._known: dict[int, Word] = {}

    async def of(self, numbers: Iterable[int | None], *, on: Transaction | None = None) -> dict[int, Word]:
        wanted = {number for number in numbers if number is not None}
        missing = [number for number in wanted if number not in self._known]
        if missing:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
                missing = sorted(wanted)
            for row in await (on or self.database).rows(READ, missing):
                self._known[row["word"]] = _DECODE(row["told"])
        return {number: self._known[number] for number in wanted if number in self._known}
