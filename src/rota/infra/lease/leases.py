"""Leases: locks with a time to live, granted and checked by PostgreSQL.

A lock with a time to live excludes nobody by itself: its holder may be paused, wake up after the lease went to another,
and write. Hence every grant has a *fence*, a number that PostgreSQL issues, that only rises, and that every write made
under the lease carries. Who keeps what:
- PostgreSQL's clock alone decides when a lease runs out; no clock of ours is ever compared with it;
- `rota.lease_acquire` grants to one at a time, with a higher fence each time, also after release, expiry and prune;
- `guard` fails a transaction whose lease is not the last grant or has run out, even if nobody took over, and keeps
  others from taking over until that transaction ends (a paused holder can prolong this by its own ttl, not more);
- `Hold` ends the work under a lease that was lost;
- `Database` keeps connections aside for renewals and releases, so that no work of ours makes them wait. To ask for a
  lease is work like any other: a process that is busy takes on nothing more.

If the holder dies, or is cancelled while it asks, its leases are free when their time is over. If the reply to an
acquire is lost, asking again in the same name finds the same grant; if the reply to a renewal or a release is lost,
asking again changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import asyncpg

from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease.grant import FENCE_REJECTIONS, LEASES_ACQUIRED, Lease, LeaseAcquireResult
from rota.infra.lease.lease_context import LeaseContext
from rota.infra.postgres import Database, Transaction, query
from rota.infra.replica import replica_name
from rota.model.errors import StaleFence

ACQUIRE = query(__package__, "acquire")
RENEW = query(__package__, "renew")
RELEASE = query(__package__, "release")
GUARD = query(__package__, "guard")
PRUNE = query(__package__, "prune")

STALE_FENCE_SQLSTATE = "RT001"


class Leases:
    """Asks for leases in the name of one process (`owner`, shown in `rota.lease.holder`)."""

    def __init__(self, database: Database, owner: str | None = None, clock: Clock | None = None) -> None:
        self.database = database
        self.owner = owner or replica_name()
        self.clock = clock or SystemClock()

    def hold(self, name: str, *, kind: str, ttl_s: float, wait_s: float = 0.0, release: bool = True) -> LeaseContext:
        """`async with` this: the body runs under the lease and is cancelled with `LeaseLost` when the lease is lost.

        Waits up to `wait_s` for it, then raises `LeaseHeld`. With `release=False` the lease is kept until its time is
        over, so that work that must be done once per window is not done again by the next who asks.
        """
        return LeaseContext(self, name, kind=kind, ttl_s=ttl_s, wait_s=wait_s, release=release)

    def new_holder(self) -> str:
        """A name for one try to get leases; asking again with it is harmless."""
        return f"{self.owner}/{secrets.token_hex(8)}"

    async def acquire(
        self, names: Sequence[str], *, kind: str, ttl_s: float, holder: str | None = None, waiting: bool = False
    ) -> LeaseAcquireResult:
        """Take what is free among `names`, at once. `waiting` asks for a notification when a taken one is released."""
        holder = holder or self.new_holder()
        rows = await self.database.rows(ACQUIRE, names, holder, ttl_s, waiting)
        failpoints.after_send("lease.acquire")
        granted = [Lease(row["name"], kind, row["fence"], holder, ttl_s) for row in rows if row["fence"] is not None]
        LEASES_ACQUIRED.labels(kind).inc(len(granted))
        failpoints.hit("lease.after_acquire")
        return LeaseAcquireResult(granted, {row["name"]: row["left_s"] for row in rows if row["fence"] is None})

    async def renew(self, leases: Sequence[Lease]) -> set[str]:
        """Give each its full time again; returns the names that are still held. The others are lost for good."""
        failpoints.hit("lease.before_renew")
        names, fences = _columns(leases)
        rows = await self.database.rows(RENEW, names, fences, [lease.ttl_s for lease in leases], urgent=True)
        failpoints.after_send("lease.renew")
        return {row["name"] for row in rows}

    async def release(self, leases: Sequence[Lease]) -> set[str]:
        """Give back; returns the names that were still ours. Doing it again changes nothing."""
        failpoints.hit("lease.before_release")
        names, fences = _columns(leases)
        rows = await self.database.rows(RELEASE, names, fences, urgent=True)
        failpoints.after_send("lease.release")
        return {row["name"] for row in rows}

    async def guard(self, tx: Transaction, *leases: Lease) -> None:
        """Fail `tx` with `StaleFence` unless each lease still holds. Call it before the writes of the transaction.

        Until `tx` ends nobody can take these leases over, however long its COMMIT takes. With a snapshot from before
        the guard it would not see a release, or miss a renewal: `tx` must be read committed.
        """
        assert leases, "a guard needs a lease"
        assert tx.isolation == "read committed", "a guard works in read committed transactions only"
        names, fences = _columns(leases)
        patience_s = min(self.database.target.idle_in_transaction_s, *(lease.ttl_s for lease in leases))
        try:
            await tx.run(GUARD, names, fences, str(max(1, round(patience_s * 1000))))
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE_FENCE_SQLSTATE:
                raise
            for lease in leases:
                FENCE_REJECTIONS.labels(lease.kind).inc()
            raise StaleFence(
                f"The lease {' or '.join(names)} ran out or went to somebody else, so this write was refused: stop this"
                " work; the new holder goes on with it.",
                leases=names,
                fences=fences,
            ) from error
        failpoints.hit("lease.after_guard")

    async def prune(self, older_than_s: float, limit: int = 1000) -> int:
        """Forget leases nobody has held for long, such as those of finished jobs; returns how many."""
        return await self.database.run(PRUNE, older_than_s, limit)


def _columns(leases: Sequence[Lease]) -> tuple[list[str], list[int]]:
    return [lease.name for lease in leases], [lease.fence for lease in leases]
