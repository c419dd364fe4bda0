"""Pending replayer: the safety net for admission, so that no job waits for a lost message.

The leader looks, at start and then every `replayer.poll_interval`, for jobs that have been PENDING for longer than
`replayer.pending_age`, undecided and with no reason to wait, and has them decided. Deferred or throttled jobs carry
the time of their retry (`job.ts_ask_at`) and are decided then. Overdue approvals expire. Jobs that wait for other jobs
or for people are left to the events that release them.

Every decision goes through the admission controller, which only acts on PENDING jobs: a second leader, or one that was
paused and resumes, has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol
from uuid import UUID

import structlog

from rota.engine.admission.controller import BATCH_JOBS_MAX, AdmissionController, AdmissionOutcome
from rota.engine.admission.decision import UNDECIDED_REASON
from rota.engine.admission.transitions import approve
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres import Database, query
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
APPROVED: Final = Reason.APPROVED.value
REPLAYABLE_REASONS: Final = [UNDECIDED_REASON, APPROVED]
"""Reasons that only mean "not decided yet"."""
UNAVAILABLE_REASON: Final = Reason.POLICY_UNAVAILABLE.value
RETRY_INTERVAL_S: Final = 1.0
EXPIRE_INTERVAL_S: Final = 2.0

REPLAYED = metrics.counter(
    "rota_orphan_replayed", "Undecided jobs that the pending replayer had decided.", labels=("topic",)
)


class JobApprovals(Protocol):
    """Approvals of jobs. A grant moves its job by itself; this covers a grant whose process died before it did."""

    async def granted_jobs(self, jobs: Sequence[JobId]) -> Collection[JobId]:
        """Those of the jobs that may proceed."""
        ...

    async def expire(self) -> int:
        """Deny what was not approved in time; returns how many."""
        ...


class PendingReplayer(LeaderLoop):
    def __init__(
        self,
        database: Database,
        leases: Leases,
        controller: AdmissionController,
        pace: Pace | None = None,
        *,
        approvals: JobApprovals | None = None,
    ) -> None:
        super().__init__(leases, LEASE, kind="replayer", parallel=True)
        self.database = database
        self.controller = controller
        self.pace = pace or Pace()
        self.approvals = approvals

    def begin_term(self, _lease: Lease) -> Sequence[LeaderStep]:
        return [
            LeaderStep("replay", self.pace.poll_interval, self.replay),
            LeaderStep("retry_deferred", RETRY_INTERVAL_S, self.retry_deferred),
            *([LeaderStep("expire", EXPIRE_INTERVAL_S, self.approvals.expire)] if self.approvals is not None else []),
        ]

    async def replay(self) -> int:
        """Decide jobs that have been undecided for too long, oldest first; returns how many."""
        replayed = await self._replay_approved()
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(ORPHANS, self.pace.pending_age, REPLAYABLE_REASONS, BATCH_JOBS_MAX)
            for outcome in await self._decide([JobId(row["pk_job"]) for row in rows]):
                replayed += len(outcome.asked)
                for job in outcome.asked:
                    REPLAYED.labels(job.topic).inc()
            if len(rows) < BATCH_JOBS_MAX:
                break
        if replayed:
            log.warning("orphans_replayed", jobs=replayed)
        return replayed

    async def retry_deferred(self) -> int:
        """Retry due jobs; returns how many were decided. While the policy is unavailable, tries one batch only."""
        decided = 0
        for _ in range(PASSES_MAX):
            rows = await self.database.rows(DUE_FOR_RETRY, BATCH_JOBS_MAX)
            outcomes = await self._decide([JobId(row["pk_job"]) for row in rows])
            decided += sum(len(each.admitted) + len(each.denied) + len(each.held) for each in outcomes)
            if len(rows) < BATCH_JOBS_MAX or _policy_unavailable(outcomes):
                break
        return decided

    async def _decide(self, jobs: Sequence[JobId]) -> list[AdmissionOutcome]:
        return await self.controller.decide_isolated(jobs) if jobs else []

    async def _replay_approved(self) -> int:
        """Release approved jobs that are still held because the process that approved them died."""
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


def _policy_unavailable(outcomes: Sequence[AdmissionOutcome]) -> bool:
    """Whether the policy decided none of the jobs."""
    decisions = [decision for each in outcomes for decision in each.decisions.values()]
    return all(decision.reason == UNAVAILABLE_REASON for decision in decisions)
