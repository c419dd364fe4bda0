"""The pending replayer: the net below the gatekeeper, so that no job waits for a message that was lost.

One leader looks, at once and then every `replayer.poll_interval`, for jobs that were PENDING for longer than
`replayer.pending_age` and have neither been decided about nor say what they wait for, and has them decided. Jobs whose
policy gave no word, or throttles them, say when they are to be asked about again (`job.ts_ask_at`), and are. Approvals
that nobody gave in time expire. What waits for something else (another job, people) is left to whoever brings that
about.

Everything goes through the gatekeeper, which acts on PENDING jobs only: a second leader, or one that was paused and
wakes up, asks in vain and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Protocol
from uuid import UUID

import structlog

from rota.engine.gate import UNDECIDED
from rota.engine.gatekeeper import BATCH, Gatekeeper, Judged
from rota.engine.submit_admit import approve
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.ids import JobId
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import Replayer as Pace

ORPHANS = query(__package__, "replay_orphans")
WAITING = query(__package__, "replay_waiting")
HELD = query(__package__, "replay_approvals")

log = structlog.get_logger(__name__)
LEASE: Final = "rota:replayer:pending"
PASSES_MAX: Final = 100
APPROVED: Final = "approved"
UNTOLD: Final = [UNDECIDED, APPROVED]
"""Reasons that say no more than that somebody has yet to look."""
SILENT: Final = Reason.POLICY_UNAVAILABLE.value
ASK_AGAIN_S: Final = 1.0
EXPIRE_S: Final = 2.0

REPLAYED = metrics.counter("rota_orphan_replayed", "Jobs taken up again that nobody worked on.", labels=("topic",))


class Approvals(Protocol):
    """Who knows what was approved. An approval that was granted moves its job itself; this is for one that did not."""

    async def granted(self, jobs: Sequence[JobId]) -> Collection[JobId]:
        """Those of the jobs that may go on."""
        ...

    async def expire(self) -> int:
        """Deny what nobody approved in time; returns how many."""
        ...


class Replayer:
    def __init__(
        self,
        database: Database,
        leases: Leases,
        gatekeeper: Gatekeeper,
        pace: Pace | None = None,
        *,
        approvals: Approvals | None = None,
    ) -> None:
        self.database = database
        self.leases = leases
        self.gatekeeper = gatekeeper
        self.pace = pace or Pace()
        self.approvals = approvals
        self._leadership = Leadership(leases, LEASE, self._lead, kind="replayer")

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self._leadership.serve(life)

    async def _lead(self, _lease: Lease) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._every(self.pace.poll_interval, self.replay))
            tasks.create_task(self._every(ASK_AGAIN_S, self.ask_again))
            if self.approvals is not None:
                tasks.create_task(self._every(EXPIRE_S, self.approvals.expire))

    async def _every(self, pause_s: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await work()
            await self.leases.clock.sleep(pause_s)

    async def replay(self) -> int:
        """Jobs that nobody has decided about in time, the oldest first; returns how many were taken up."""
        replayed = await self._replay_approved()
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(ORPHANS, self.pace.pending_age, UNTOLD, BATCH)
            for judged in await self._judged([JobId(row["pk_job"]) for row in rows]):
                replayed += len(judged.asked)
                for job in judged.asked:
                    REPLAYED.labels(job.topic).inc()
            if len(rows) < BATCH:
                break
        if replayed:
            log.warning("orphans_replayed", jobs=replayed)
        return replayed

    async def ask_again(self) -> int:
        """Jobs that are to be asked about again by now; returns how many are decided. While the policy is silent one
        batch is asked about, and the rest rests."""
        decided = 0
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(WAITING, BATCH)
            judged = await self._judged([JobId(row["pk_job"]) for row in rows])
            decided += sum(len(each.admitted) + len(each.denied) + len(each.held) for each in judged)
            if len(rows) < BATCH or _silent(judged):
                break
        return decided

    async def _judged(self, jobs: Sequence[JobId]) -> list[Judged]:
        return await self.gatekeeper.judge_apart(jobs) if jobs else []

    async def _replay_approved(self) -> int:
        """Approved, and held all the same: whoever approved them died in between."""
        if self.approvals is None:
            return 0
        moved, after = 0, UUID(int=0)
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(HELD, self.pace.pending_age, after, BATCH)
            if not rows:
                break
            after = rows[-1]["pk_job"]
            granted = await self.approvals.granted([JobId(row["pk_job"]) for row in rows])
            async with self.database.transaction() as tx:
                moved += len(await approve(tx, sorted(granted)))
        return moved


def _silent(judged: Sequence[Judged]) -> bool:
    """Whether the policy gave no word at all."""
    decisions = [decision for each in judged for decision in each.decisions.values()]
    return all(decision.reason == SILENT for decision in decisions)
