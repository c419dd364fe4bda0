"""Claims: positions of one lane handed to a dispatcher, as columns. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import asyncpg
import msgspec

from rota.infra.postgres import Record
from rota.model.ids import JobId, LayerId
from rota.queue.tokens import CLAIM_MAX, tokens_in


class ClaimedRange(msgspec.Struct, frozen=True):
    """Consecutive frames of one layer, claimed together. `tokens` and `frames` have equal length and order."""

    tokens: range
    job: JobId
    layer: LayerId
    frames: range
    attempt: int
    payload: bytes | None


class ClaimRequest(msgspec.Struct, frozen=True):
    """Up to `want` frames from these lanes, in order."""

    lanes: Sequence[int]
    want: int


class Claim(msgspec.Struct, frozen=True):
    """Up to 512 consecutive positions; each column has one value per entry, in order."""

    id: int
    lane: int
    first_seq: int
    n: int
    skipped: Sequence[int]
    """Tokens in this range that were cancelled before the claim; they are not part of it."""
    sizes: Sequence[int]
    jobs: Sequence[UUID]
    layers: Sequence[UUID]
    first_frames: Sequence[int]
    attempts: Sequence[int]
    payloads: Sequence[bytes | None]

    @classmethod
    def of(cls, row: Record) -> Claim:
        skipped: asyncpg.BitString | None = row["skipped"]
        return cls(
            row["claim_id"],
            row["lane_id"],
            row["first_seq"],
            row["n"],
            tokens_in(row["claim_id"], skipped) if skipped is not None else (),
            row["sizes"],
            row["jobs"],
            row["layers"],
            row["frames"],
            row["attempts"],
            row["payloads"],
        )

    @property
    def frames(self) -> int:
        return self.n - len(self.skipped)

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of the claimed frames: a range, unless some were cancelled before."""
        whole = range(self.id * CLAIM_MAX, self.id * CLAIM_MAX + self.n)
        return sorted(set(whole).difference(self.skipped)) if self.skipped else whole

    def ranges(self) -> Iterator[ClaimedRange]:
        token = self.id * CLAIM_MAX
        skipped = set(self.skipped)
        columns = zip(self.sizes, self.jobs, self.layers, self.first_frames, self.attempts, self.payloads, strict=True)
        for size, job, layer, frame, attempt, payload in columns:
            for part in _ranges_without(range(token, token + size), skipped):
                first = frame + part.start - token
                yield ClaimedRange(part, JobId(job), LayerId(layer), range(first, first + len(part)), attempt, payload)
            token += size


class ClaimResult(msgspec.Struct):
    """What a request got."""

    claims: list[Claim]
    locked: bool = False
    """Another session was claiming from one of its lanes, or parking or cancelling in it, so there may be more."""

    @property
    def frames(self) -> int:
        return sum(claim.frames for claim in self.claims)


def _ranges_without(tokens: range, skipped: set[int]) -> Iterator[range]:
    """The parts of `tokens` between skipped ones."""
    if not skipped:
        yield tokens
        return
    first = tokens.start
    for token in [*sorted(skipped.intersection(tokens)), tokens.stop]:
        if first < token:
            yield range(first, token)
        first = token + 1
