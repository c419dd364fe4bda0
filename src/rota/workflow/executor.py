"""The service that advances runs: looks when it has reason to, and every second in any case.

Reasons are ends of jobs that this server has brought about, timers that are due, and whoever has just started a run
here. What others have brought about they look at themselves; if they die, the next look of anybody finds it. A batch
that is refused is tried again run by run. While PostgreSQL is away nothing is advanced, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

import msgspec
import structlog

from rota.engine.completion.finisher import JobEnd
from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction, query
from rota.infra.postgres.failures import FAILURES
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.approvals import Approval
from rota.model.errors import RotaError, StaleFence, Unavailable
from rota.model.ids import JobId
from rota.model.settings.lifecycle import SagaSettings, WorkflowSettings
from rota.workflow.advance_transaction import BATCH, AdvanceResult, AdvanceTransaction
from rota.workflow.inbox_cursor import POLL_INTERVAL_S, InboxCursor
from rota.workflow.sagas import SagaPassResult

PENDING_WORK = query(__package__, "look")

log = structlog.get_logger(__name__)
MIN_PAUSE_S: Final = 0.002
LOCKED_RETRY_S: Final = 0.05
"""Until what somebody else is at is looked at again."""
FAILURE_BACKOFF_S: Final = 1.0

ADVANCE_FAILURES = metrics.counter(
    "rota_workflow_advance_failures", "Batches of runs that were not advanced.", labels=("reason",)
)


class PendingWork(msgspec.Struct, frozen=True):
    """What there is to do."""

    runs: bool
    sagas: bool
    in_ms: int | None
    """Until the next timer is due."""

    @property
    def pause_s(self) -> float:
        return POLL_INTERVAL_S if self.in_ms is None else min(POLL_INTERVAL_S, max(MIN_PAUSE_S, self.in_ms / 1000))


class RunExecutor:
    def __init__(
        self,
        database: Database,
        advancing: AdvanceTransaction,
        clock: Clock | None = None,
        *,
        workflow: WorkflowSettings | None = None,
        saga: SagaSettings | None = None,
    ) -> None:
        self.database = database
        self.advancing = advancing
        self.workflow = workflow or WorkflowSettings()
        self.saga = saga or SagaSettings()
        self.on_done: Callable[[AdvanceResult], None] = _ignore_result
        """Called after the commit."""
        self.on_happened: Callable[[AdvanceResult], None] = _ignore_result
        self.on_undone: Callable[[SagaPassResult], None] = _ignore_saga_result
        """Called with what came of a pass over sagas, after its commit."""
        self.on_asked: Callable[[Sequence[Approval]], None] = _ignore_approvals
        """Called with approvals that steps have asked for."""
        advancing.approving.wake = self.wake
        self.stop_job: Callable[[JobId], Awaitable[object]] = _ignore_job
        """Ends a job that was marked as ending; the leader does it a moment later in any case."""
        self._floor = InboxCursor(clock or SystemClock())
        self._reason = asyncio.Event()

    def wake(self) -> None:
        """There is something to look at."""
        self._reason.set()

    def on_jobs_ended(self, ends: Sequence[JobEnd]) -> None:
        """For `Finisher.listeners`."""
        if any(end.workflow_id is not None for end in ends):
            self._reason.set()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """One that locks runs: whoever is paused in it past the time of a run's lock is cut off."""
        return self.database.transaction(idle_s=self.workflow.run_lock_ttl)

    async def run(self, life: Lifecycle) -> None:
        looking = asyncio.create_task(self._poll_loop(), name="workflow.advancer")
        draining = asyncio.create_task(life.until_draining(), name="workflow.draining")
        life.ready()
        try:
            await asyncio.wait({looking, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            looking.cancel()
            draining.cancel()
            await asyncio.wait({looking, draining})
        if not looking.cancelled():
            looking.result()

    async def _poll_loop(self) -> None:
        is_told = False
        while True:
            self._reason.clear()
            try:
                pause_s = await self._advance_pending(is_told=is_told)
            except (RotaError, OSError, *FAILURES) as error:
                _report_failure(error)
                pause_s = FAILURE_BACKOFF_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._reason.wait()
            is_told = self._reason.is_set()

    async def _advance_pending(self, *, is_told: bool) -> float:
        """Do what there is to do, for as long as that gets anywhere; when to look again, in seconds."""
        if is_told:
            await self.advance_batch(since=self._floor.position())
        while True:
            since = self._floor.position()
            seen = PendingWork(*await self.database.row(PENDING_WORK, since) or ())
            advanced = await self.advance_batch(since=since) if seen.runs else 0
            if not advanced + (await self.advance_sagas() if seen.sagas else 0):
                return max(seen.pause_s, LOCKED_RETRY_S) if seen.runs else seen.pause_s

    async def advance_batch(self, most: int = BATCH, *, since: int = 0) -> int:
        """Advance a batch by news from number `since` on; how many runs were."""
        try:
            done = await self._commit_batch(most, since, alone=False)
        except (Unavailable, StaleFence):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was: told for the run that it befalls alone
            log.info("batch_refused", reason=str(error)[:200])
            done = await self._commit_batch(most, since, alone=True)
        if done.first is not None:
            self._floor.record_taken(done.first)
        await self.after_commit(done)
        return len(done.turns)

    async def advance_sagas(self) -> int:
        """What sagas have to hear and to do next; how much that was."""
        sagas = self.advancing.sagas
        told = SagaPassResult()
        async with asyncio.timeout(self.saga.rollback_timeout), self._saga_transaction() as tx:
            heard = await sagas.drain_inbox(tx, told)
        failpoints.after_send("saga.hear")
        self.on_undone(told)
        async with asyncio.timeout(self.saga.rollback_timeout), self._saga_transaction() as tx:
            told = await sagas.advance(tx)
        failpoints.after_send("saga.go_on")
        self.on_undone(told)
        if told.submitted:
            self.advancing.submitter.on_submitted(told.plans, told.submitted)
        return heard + told.count

    def _saga_transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self.database.transaction(idle_s=self.saga.lock_ttl)

    async def after_commit(self, done: AdvanceResult) -> None:
        """What follows a commit; whatever is not done here others find."""
        done.record_metrics()
        self.on_done(done)
        self.on_happened(done)
        if done.asked:
            self.on_asked(done.asked)
        if done.submitted:
            self.advancing.submitter.on_submitted(done.plans, done.submitted)
        for job in done.stops:
            with suppress(RotaError, *FAILURES):
                await self.stop_job(JobId(job))

    async def _commit_batch(self, most: int, since: int, *, alone: bool) -> AdvanceResult:
        async with self.transaction() as tx:
            done = await self.advancing.advance_pending(tx, most, since=since, alone=alone)
        failpoints.after_send("workflow.advance")
        return done


def _report_failure(error: Exception) -> None:
    reason = error.code if isinstance(error, RotaError) else type(error).__name__
    ADVANCE_FAILURES.labels(reason).inc()
    log.warning("runs_not_advanced", reason=reason, because=getattr(error, "sentence", str(error)))


def _ignore_result(_done: AdvanceResult) -> None:
    return None


def _ignore_saga_result(_told: SagaPassResult) -> None:
    return None


def _ignore_approvals(_asked: Sequence[Approval]) -> None:
    return None


async def _ignore_job(_job: JobId) -> None:
    return None
