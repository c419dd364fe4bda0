"""One idempotency key for many submissions: they are written together, so one row tells whether they exist. No I/O.

The row names the first job. The ids of the others follow from its id, so a repetition is answered without a list.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from hashlib import shake_256
from typing import Final
from uuid import UUID

import msgspec
from asyncpg.pgproto.pgproto import UUID as DriverUUID

from rota.infra.postgres import Query, query
from rota.infra.postgres.foreign import Rows
from rota.model.errors import IdempotencyConflict
from rota.model.ids import ENTROPY_BYTES, JobId, uuid7_bytes
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult

TAKE_KEY: Final = query(__package__, "submit_take_key")
KNOWN_KEY: Final = query(__package__, "submit_known_key")
STATES: Final = query(__package__, "submit_states")
NUMBER_BITS: Final = 14
"""Of the random bits of an id, the first hold its number in the bulk, so that ids ascend."""
TAKE_ATTEMPTS_MAX: Final = 10
"""A key that is not taken and not known either has expired in between, or its show is unknown."""

KeyStatements = Generator[tuple[Query, tuple[object, ...]], Rows, list[SubmitResult] | None]


class BulkKey(msgspec.Struct, frozen=True):
    show: str
    """Of the first submission."""
    key: str
    digest: bytes
    """Of all submissions."""

    def statements(self, ids: Sequence[JobId]) -> KeyStatements:
        """Takes the key for these jobs, in the transaction that writes them. Returns the jobs that exist under it."""
        for _ in range(TAKE_ATTEMPTS_MAX):
            if (yield TAKE_KEY, (self.show, self.key, ids[0], self.digest)):
                return None
            for row in (yield KNOWN_KEY, (self.show, self.key)):
                first, digest = row[0], row[1]
                if first == ids[0]:
                    return None  # taken by an earlier attempt of this transaction
                if digest != self.digest:
                    raise IdempotencyConflict(
                        f"The idempotency key {self.key!r} was used for other submissions, beginning with job {first}:"
                        " use a new key, or repeat exactly what was submitted with it.",
                        job=str(first),
                    )
                found = following_ids(first, len(ids))
                states = {state[0]: JobState(state[1]) for state in (yield STATES, (found,))}
                return [SubmitResult(job, states.get(job), already=True) for job in found]
        return None


def bulk_ids(count: int, now_ms: int) -> list[JobId]:
    """New ids in ascending order, all of which follow from the first."""
    return following_ids(UUID(bytes=_numbered(now_ms, 0, secrets.token_bytes(8))), count)


def following_ids(first: UUID, count: int) -> list[JobId]:
    """The ids of a bulk of so many jobs, by that of its first."""
    assert count <= 1 << NUMBER_BITS, "a bulk has more jobs than numbers"
    now_ms, noise = first.int >> 80, shake_256(first.bytes).digest(8 * count)
    others = (_numbered(now_ms, number, noise[8 * number : 8 * number + 8]) for number in range(1, count))
    return [JobId(DriverUUID(each)) for each in (first.bytes, *others)]


def _numbered(now_ms: int, number: int, noise: bytes) -> bytes:
    """An id with this number in the first random bits."""
    low = (number & 3) << 60 | int.from_bytes(noise, "big") >> 4
    return uuid7_bytes(now_ms, ((number >> 2) << 68 | low).to_bytes(ENTROPY_BYTES, "big"))
