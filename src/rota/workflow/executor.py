"""The service that advances runs: on wake-ups, and every second in any case.

Wake-ups are ends of jobs and starts of runs on this server, and due timers. Other servers advance the runs they wake;
if one dies, the next poll of any server finds its work. A rejected batch is retried run by run. While PostgreSQL is
unavailable runs do not advance, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

import msgspec
import structlog

from rota.engine.completion.job_ends import JobEnd
from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction, query
from rota.infra.postgres.failures import FAILURES
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError, StaleFence, Unavailable
from rota.model.settings.lifecycle import SagaSettings, WorkflowSettings
from rota.workflow.advance_transaction import BATCH, AdvanceResult, AdvanceTransaction
from rota.workflow.inbox_cursor import POLL_INTERVAL_S, InboxCursor
from rota.workflow.notifier import RunNotifier
from rota.workflow.sagas import SagaPassResult

PENDING_WORK = query(__package__, "look")

log = structlog.get_logger(__name__)
MIN_PAUSE_S: Final = 0.002
LOCKED_RETRY_S: Final = 0.05
"""Until runs locked by another server are polled again."""
FAILURE_BACKOFF_S: Final = 1.0

ADVANCE_FAILURES = metrics.counter(
    "rota_workflow_advance_failures", "Batches of runs that failed to advance.", labels=("reason",)
)


class PendingWork(msgspec.Struct, frozen=True):
    """Whether runs or sagas have work, and when the next timer is due."""

    runs: bool
    sagas: bool
    in_ms: int | None
    """Until the next timer."""

    @property
    def pause_s(self) -> float:
        return POLL_INTERVAL_S if self.in_ms is None else min(POLL_INTERVAL_S, max(MIN_PAUSE_S, self.in_ms / 1000))


class RunExecutor:
    def __init__(
        self,
        database: Database,
        advancing: AdvanceTransaction,
        notifier: RunNotifier,
        clock: Clock | None = None,
        *,
        workflow: WorkflowSettings | None = None,
        saga: SagaSettings | None = None,
    ) -> None:
        self.database = database
        self.advancing = advancing
        self.workflow = workflow or WorkflowSettings()
        self.saga = saga or SagaSettings()
        self.notifier = notifier
        self._cursor = InboxCursor(clock or SystemClock())
        self._wake_up = advancing.has_news

    def wake(self) -> None:
        """Poll now."""
        self._wake_up.set()

    def on_jobs_ended(self, ends: Sequence[JobEnd]) -> None:
        """For `CompletionPublisher.listeners`."""
        if any(end.workflow_id is not None for end in ends):
            self._wake_up.set()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that locks runs; PostgreSQL ends it when it is idle for longer than the run lock's TTL."""
        return self.database.transaction(idle_s=self.workflow.run_lock_ttl)

    async def run(self, life: Lifecycle) -> None:
        poll_task = asyncio.create_task(self._poll_loop(), name="workflow.advancer")
        draining = asyncio.create_task(life.until_draining(), name="workflow.draining")
        life.ready()
        try:
            await asyncio.wait({poll_task, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poll_task.cancel()
            draining.cancel()
            await asyncio.wait({poll_task, draining})
        if not poll_task.cancelled():
            poll_task.result()

    async def _poll_loop(self) -> None:
        woken = False
        while True:
            self._wake_up.clear()
            try:
                pause_s = await self._advance_pending(woken=woken)
            except (RotaError, OSError, *FAILURES) as error:
                _report_failure(error)
                pause_s = FAILURE_BACKOFF_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake_up.wait()
            woken = self._wake_up.is_set()

    async def _advance_pending(self, *, woken: bool) -> float:
        """Do all pending work; returns the seconds until the next poll."""
        if woken:
            await self.advance_batch(since=self._cursor.position())
        while True:
            since = self._cursor.position()
            pending = PendingWork(*await self.database.row(PENDING_WORK, since) or ())
            advanced = await self.advance_batch(since=since) if pending.runs else 0
            if not advanced + (await self.advance_sagas() if pending.sagas else 0):
                return max(pending.pause_s, LOCKED_RETRY_S) if pending.runs else pending.pause_s

    async def advance_batch(self, most: int = BATCH, *, since: int = 0) -> int:
        """Advance a batch by inbox messages from id `since` on; returns the number of runs."""
        try:
            done = await self._commit_batch(most, since, alone=False)
        except (Unavailable, StaleFence):
            raise
        except Exception as error:  # noqa: BLE001 - the retry run by run logs and isolates it
            log.info("run_batch_rejected", reason=str(error)[:200])
            done = await self._commit_batch(most, since, alone=True)
        if done.first is not None:
            self._cursor.record_taken(done.first)
        await self.after_commit(done)
        return len(done.turns)

    async def advance_sagas(self) -> int:
        """Process ended compensations and start the next ones; returns how many."""
        sagas = self.advancing.sagas
        result = SagaPassResult()
        async with asyncio.timeout(self.saga.rollback_timeout), self._saga_transaction() as tx:
            processed = await sagas.drain_inbox(tx, result)
        failpoints.after_send("saga.hear")
        self.notifier.saga_pass_ended(result)
        async with asyncio.timeout(self.saga.rollback_timeout), self._saga_transaction() as tx:
            result = await sagas.advance(tx)
        failpoints.after_send("saga.go_on")
        self.notifier.saga_pass_ended(result)
        return processed + result.count

    def _saga_transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self.database.transaction(idle_s=self.saga.lock_ttl)

    async def after_commit(self, done: AdvanceResult) -> None:
        done.record_metrics()
        await self.notifier.runs_advanced(done)

    async def _commit_batch(self, most: int, since: int, *, alone: bool) -> AdvanceResult:
        async with self.transaction() as tx:
            done = await self.advancing.advance_pending(tx, most, since=since, alone=alone)
        failpoints.after_send("workflow.advance")
        return done


def _report_failure(error: Exception) -> None:
    reason = error.code if isinstance(error, RotaError) else type(error).__name__
    ADVANCE_FAILURES.labels(reason).inc()
    log.warning("run_advance_failed", reason=reason, because=getattr(error, "sentence", str(error)))
