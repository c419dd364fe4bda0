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

from rota.engine.admission.controller import BATCH_JOBS_MAX, AdmissionController, AdmissionOutcome
from rota.engine.admission.decision import UNDECIDED_REASON
from rota.engine.admission.transitions import approve
from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.ids import JobId
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import ReplayerSettings as Pace

ORPHANS = query(__package__, "replay_orphans")
DUE_FOR_RETRY = query(__package__, "replay_waiting")
AWAITING_APPROVAL = query(__package__, "replay_approvals")

log = structlog.get_logger(__name__)
LEASE: Final = "rota:replayer:pending"
PASSES_MAX: Final = 100
APPROVED: Final = "approved"
REPLAYABLE_REASONS: Final = [UNDECIDED_REASON, APPROVED]
"""Reasons that say no more than that somebody has yet to look."""
UNAVAILABLE_REASON: Final = Reason.POLICY_UNAVAILABLE.value
RETRY_INTERVAL_S: Final = 1.0
EXPIRE_INTERVAL_S: Final = 2.0

REPLAYED = metrics.counter("rota_orphan_replayed", "Jobs taken up again that nobody worked on.", labels=("topic",))


class JobApprovals(Protocol):
    """Who knows what was approved. An approval that was granted moves its job itself; this is for one that did not."""

    async def granted_jobs(self, jobs: Sequence[JobId]) -> Collection[JobId]:
        """Those of the jobs that may go on."""
        ...

    async def expire(self) -> int:
        """Deny what nobody approved in time; returns how many."""
        ...


class PendingReplayer:
    def __init__(
        self,
        database: Database,
        leases: Leases,
        gatekeeper: AdmissionController,
        pace: Pace | None = None,
        *,
        approvals: JobApprovals | None = None,
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
            tasks.create_task(self._run_every(self.pace.poll_interval, self.replay))
            tasks.create_task(self._run_every(RETRY_INTERVAL_S, self.retry_deferred))
            if self.approvals is not None:
                tasks.create_task(self._run_every(EXPIRE_INTERVAL_S, self.approvals.expire))

    async def _run_every(self, pause_s: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await work()
            await self.leases.clock.sleep(pause_s)

    async def replay(self) -> int:
        """Jobs that nobody has decided about in time, the oldest first; returns how many were taken up."""
        replayed = await self._replay_approved()
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(ORPHANS, self.pace.pending_age, REPLAYABLE_REASONS, BATCH_JOBS_MAX)
            for judged in await self._decide([JobId(row["pk_job"]) for row in rows]):
                replayed += len(judged.asked)
                for job in judged.asked:
                    REPLAYED.labels(job.topic).inc()
            if len(rows) < BATCH_JOBS_MAX:
                break
        if replayed:
            log.warning("orphans_replayed", jobs=replayed)
        return replayed

    async def retry_deferred(self) -> int:
        """Jobs that are to be asked about again by now; returns how many are decided. While the policy is silent one
        batch is asked about, and the rest rests."""
        decided = 0
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(DUE_FOR_RETRY, BATCH_JOBS_MAX)
            judged = await self._decide([JobId(row["pk_job"]) for row in rows])
            decided += sum(len(each.admitted) + len(each.denied) + len(each.held) for each in judged)
            if len(rows) < BATCH_JOBS_MAX or _policy_unavailable(judged):
                break
        return decided

    async def _decide(self, jobs: Sequence[JobId]) -> list[AdmissionOutcome]:
        return await self.gatekeeper.decide_isolated(jobs) if jobs else []

    async def _replay_approved(self) -> int:
        """Approved, and held all the same: whoever approved them died in between."""
        if self.approvals is None:
            return 0
        moved, after = 0, UUID(int=0)
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(AWAITING_APPROVAL, self.pace.pending_age, after, BATCH_JOBS_MAX)
            if not rows:
                break
            after = rows[-1]["pk_job"]
            granted = await self.approvals.granted_jobs([JobId(row["pk_job"]) for row in rows])
            async with self.database.transaction() as tx:
                moved += len(await approve(tx, sorted(granted)))
        return moved


def _policy_unavailable(judged: Sequence[AdmissionOutcome]) -> bool:
    """Whether the policy gave no word at all."""
    decisions = [decision for each in judged for decision in each.decisions.values()]
    return all(decision.reason == UNAVAILABLE_REASON for decision in decisions)
