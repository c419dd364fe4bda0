"""What those who run Rota look after: `app.jobs`, `app.dlq`, `app.ledger`, `app.keys`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack
from uuid import UUID

from rota.engine.jobs import JobLine
from rota.model.access import GrantSpec, Role
from rota.model.lifecycle import JobState
from rota.model.office import KeyMade, KeySpec, KeyTold, LedgerTold, LetterKind, Letters, Settled
from rota.queue.dead_letters import DeadLetter
from rota.sdk.options import Span, seconds
from rota.sdk.rooms import M, Room, at, call


class Wanted(TypedDict, total=False):
    """Which dead letters: those that agree with all that is given."""

    kind: LetterKind
    reason: str
    queue: str
    job: UUID


class Jobs(Room[M]):
    @call
    async def list(
        self,
        *,
        show: str = "",
        state: JobState | str = "",
        topic: str = "",
        reason: str = "",
        label: str = "",
        most: int = 50,
    ) -> Sequence[JobLine]:
        """The newest first; those that agree with all that is given, a label as "key=value"."""
        words = {"show": show, "state": state, "topic": topic, "reason": reason, "label": label}
        wanted = " ".join(f'{word}:"{value}"' for word, value in words.items() if value)
        return await self._list("/jobs", JobLine, most=most, q=wanted or None)


class DeadLetters(Room[M]):
    @call
    async def list(self, *, most: int = 50, **which: Unpack[Wanted]) -> Sequence[DeadLetter]:
        """What was given up, the oldest first."""
        return await self._list("/dlq", DeadLetter, most=most, **which)

    @call
    async def retry(self, ids: Sequence[int] | None = None, **which: Unpack[Wanted]) -> Settled:
        """Run frames and jobs among these again, as new jobs."""
        return await self._ask("POST", "/dlq/retry", Settled, again=False, body=_letters(ids, which))

    @call
    async def purge(self, ids: Sequence[int] | None = None, **which: Unpack[Wanted]) -> Settled:
        """Forget these."""
        return await self._ask("POST", "/dlq/purge", Settled, again=False, body=_letters(ids, which))


class Ledger(Room[M]):
    @call
    async def audit(self, show: str) -> LedgerTold:
        """What is booked, what the tables say and what Redis counts, compared while bookings go on."""
        return await self._ask("GET", at("shows", show, "ledger"), LedgerTold)

    @call
    async def repair(self, show: str) -> LedgerTold:
        """Bring counters to what PostgreSQL says is booked, and compare again."""
        return await self._ask("POST", at("shows", show, "ledger", "repair"), LedgerTold)


class Keys(Room[M]):
    @call
    async def list(self, *, revoked: bool = False) -> Sequence[KeyTold]:
        return await self._list("/keys", KeyTold, revoked=revoked)

    @call
    async def create(
        self, name: str, role: Role | str, *, shows: Sequence[str] = (), expires: Span | None = None
    ) -> KeyMade:
        """A key with this role in these shows, or in every one; its text is in this answer and never told again."""
        grants = tuple(GrantSpec(Role(role), show) for show in shows) or (GrantSpec(Role(role)),)
        expires_s = None if expires is None else seconds(expires, "time for a key to last")
        spec = KeySpec(name=name, grants=grants, expires_s=expires_s)
        return await self._ask("POST", "/keys", KeyMade, again=False, body=spec)

    @call
    async def revoke(self, key: str) -> KeyTold:
        """By its id. Refused everywhere within a second, and for good."""
        return await self._ask("DELETE", at("keys", key), KeyTold)


def _letters(ids: Sequence[int] | None, which: Wanted) -> Letters:
    return Letters(ids=None if ids is None else tuple(ids), **which)
