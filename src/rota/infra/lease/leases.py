"""Leases: locks with a TTL, granted and checked by PostgreSQL.

A lock with a TTL alone does not exclude: its holder may be paused, resume after the lease went to another, and write.
So every grant has a *fence* (fencing token), a number issued by PostgreSQL that only increases and that every write
under the lease carries. Responsibilities:
- PostgreSQL's clock alone decides expiry; no local clock is ever compared with it;
- `rota.lease_acquire` grants to one holder at a time, with a higher fence each time, also after release, expiry and
  prune;
- `guard` fails a transaction whose lease is not the latest grant or has expired, even without a new holder, and blocks
  takeover until that transaction ends (a paused holder can prolong this by its own TTL at most);
- `LeaseContext` stops the work under a lost lease;
- `Database` reserves connections for renewals and releases, so that other work cannot delay them. Acquiring uses the
  normal pool: a busy process takes on nothing more.

Crash cases: if the holder dies, or a caller of `acquire` is cancelled, its leases expire after their TTL; a cancelled
`hold` releases them. After a lost reply to an acquire, retrying with the same holder name finds the same grant; after a
lost reply to a renewal or release, retrying changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

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
GATHER_S: Final = 0.002
"""How long a renewal waits for others to go with it."""


class RenewalBatch:
    """Leases that are renewed in one statement."""

    task: asyncio.Task[set[str]]

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}


class Leases:
    """Acquires leases for one process (`owner`, shown in `rota.lease.holder`)."""

    def __init__(self, database: Database, owner: str | None = None, clock: Clock | None = None) -> None:
        self.database = database
        self.owner = owner or replica_name()
        self.clock = clock or SystemClock()
        self._batches: dict[float, RenewalBatch] = {}
        """By TTL, while they are being gathered."""

    def hold(self, name: str, *, kind: str, ttl_s: float, wait_s: float = 0.0, release: bool = True) -> LeaseContext:
        """`async with` this: the body runs under the lease and is cancelled with `LeaseLost` when the lease is lost.

        Waits up to `wait_s` for it, then raises `LeaseHeld`. With `release=False` the lease is kept until it expires,
        so that work to be done once per window is not repeated by the next caller.
        """
        return LeaseContext(self, name, kind=kind, ttl_s=ttl_s, wait_s=wait_s, release=release)

    def new_holder(self) -> str:
        """A holder name for one attempt; acquiring again with it is idempotent."""
        return f"{self.owner}/{secrets.token_hex(8)}"

    async def acquire(
        self, names: Sequence[str], *, kind: str, ttl_s: float, holder: str | None = None, waiting: bool = False
    ) -> LeaseAcquireResult:
        """Take the free `names`, without waiting. `waiting` requests a notification when others are released."""
        holder = holder or self.new_holder()
        rows = await self.database.rows(ACQUIRE, names, holder, ttl_s, waiting)
        failpoints.after_send("lease.acquire")
        granted = [Lease(row["name"], kind, row["fence"], holder, ttl_s) for row in rows if row["fence"] is not None]
        LEASES_ACQUIRED.labels(kind).inc(len(granted))
        failpoints.hit("lease.after_acquire")
        return LeaseAcquireResult(granted, {row["name"]: row["left_s"] for row in rows if row["fence"] is None})

    async def renew(self, leases: Sequence[Lease]) -> set[str]:
        """Restart the TTL of each; returns the names still held. The others are lost for good."""
        failpoints.hit("lease.before_renew")
        names, fences = _columns(leases)
        rows = await self.database.rows(RENEW, names, fences, [lease.ttl_s for lease in leases], urgent=True)
        failpoints.after_send("lease.renew")
        return {row["name"] for row in rows}

    async def renew_together(self, lease: Lease, timeout_s: float) -> bool:
        """Renew it in one statement with those of the same TTL that are due now; returns whether it is still held.

        A caller that is cancelled leaves the statement to the others. It cannot revive a lease that was released.
        """
        batch = self._batches.get(lease.ttl_s)
        if batch is None or batch.task.done() or lease.name in batch.leases:
            batch = self._batches[lease.ttl_s] = RenewalBatch()
            batch.task = asyncio.create_task(self._renew_batch(batch, lease.ttl_s, timeout_s), name="lease.renew_batch")
            batch.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have gone
        batch.leases[lease.name] = lease
        return lease.name in await asyncio.shield(batch.task)

    async def _renew_batch(self, batch: RenewalBatch, ttl_s: float, timeout_s: float) -> set[str]:
        await asyncio.sleep(GATHER_S)
        if self._batches.get(ttl_s) is batch:
            del self._batches[ttl_s]
        async with asyncio.timeout(timeout_s):
            return await self.renew(list(batch.leases.values()))

    async def release(self, leases: Sequence[Lease]) -> set[str]:
        """Release; returns the names that were still held. Idempotent."""
        failpoints.hit("lease.before_release")
        names, fences = _columns(leases)
        rows = await self.database.rows(RELEASE, names, fences, urgent=True)
        failpoints.after_send("lease.release")
        return {row["name"] for row in rows}

    async def guard(self, tx: Transaction, *leases: Lease) -> None:
        """Fail `tx` with `StaleFence` unless every lease is still held. Call it before the transaction's writes.

        Until `tx` ends no other holder can take these leases over, however long its COMMIT takes. `tx` must be read
        committed: an older snapshot would not show a release or a renewal.
        """
        assert leases, "a guard needs a lease"
        assert tx.isolation == "read committed", "a guard works in read committed transactions only"
        names, fences = _columns(leases)
        idle_limit_s = min(self.database.target.transaction_idle_s, *(lease.ttl_s for lease in leases))
        try:
            await tx.run(GUARD, names, fences, str(max(1, round(idle_limit_s * 1000))))
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE_FENCE_SQLSTATE:
                raise
            for lease in leases:
                FENCE_REJECTIONS.labels(lease.kind).inc()
            raise StaleFence(
                f"The lease {' or '.join(names)} expired or has a new holder, so this write was refused: stop this"
                " work; the new holder continues it.",
                leases=names,
                fences=fences,
            ) from error
        failpoints.hit("lease.after_guard")

    async def prune(self, older_than_s: float, limit: int = 1000) -> int:
        """Delete leases unused for long, such as those of finished jobs; returns the number."""
        return await self.database.run(PRUNE, older_than_s, limit)


def _columns(leases: Sequence[Lease]) -> tuple[list[str], list[int]]:
    return [lease.name for lease in leases], [lease.fence for lease in leases]
