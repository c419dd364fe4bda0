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

from rota.engine.finish import JobEnd
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction, query
from rota.infra.postgres.failures import FAILURES
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.approval import Approval
from rota.model.errors import RotaError, StaleFence, Unavailable
from rota.model.ids import JobId
from rota.model.settings.lifecycle import Saga, Workflow
from rota.workflow.advancing import BATCH, Advancing, Done
from rota.workflow.floor import LOOK_S, Floor
from rota.workflow.sagas import GoneOn

LOOK = query(__package__, "look")

log = structlog.get_logger(__name__)
LEAST_S: Final = 0.002
HELD_S: Final = 0.05
"""Until what somebody else is at is looked at again."""
AFTER_FAILURE_S: Final = 1.0

FAILED = metrics.counter(
    "rota_workflow_advance_failures", "Batches of runs that were not advanced.", labels=("reason",)
)


class Seen(msgspec.Struct, frozen=True):
    """What there is to do."""

    runs: bool
    sagas: bool
    in_ms: int | None
    """Until the next timer is due."""

    @property
    def pause_s(self) -> float:
        return LOOK_S if self.in_ms is None else min(LOOK_S, max(LEAST_S, self.in_ms / 1000))


class Advancer:
    def __init__(
        self,
        database: Database,
        advancing: Advancing,
        clock: Clock | None = None,
        *,
        workflow: Workflow | None = None,
        saga: Saga | None = None,
    ) -> None:
        self.database = database
        self.advancing = advancing
        self.workflow = workflow or Workflow()
        self.saga = saga or Saga()
        self.on_done: Callable[[Done], None] = _ignore
        """Called after the commit."""
        self.on_happened: Callable[[Done], None] = _ignore
        self.on_undone: Callable[[GoneOn], None] = _unsaid
        """Called with what came of a pass over sagas, after its commit."""
        self.on_asked: Callable[[Sequence[Approval]], None] = _untold
        """Called with approvals that steps have asked for."""
        advancing.approving.wake = self.wake
        self.stop_job: Callable[[JobId], Awaitable[object]] = _leave
        """Ends a job that was marked as ending; the leader does it a moment later in any case."""
        self._floor = Floor(clock or SystemClock())
        self._reason = asyncio.Event()

    def wake(self) -> None:
        """There is something to look at."""
        self._reason.set()

    def heard(self, ends: Sequence[JobEnd]) -> None:
        """For `Finisher.listeners`."""
        if any(end.workflow_id is not None for end in ends):
            self._reason.set()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """One that locks runs: whoever is paused in it past the time of a run's lock is cut off."""
        return self.database.transaction(idle_s=self.workflow.run_lock_ttl)

    async def run(self, life: Lifecycle) -> None:
        looking = asyncio.create_task(self._look_on(), name="workflow.advancer")
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

    async def _look_on(self) -> None:
        is_told = False
        while True:
            self._reason.clear()
            try:
                pause_s = await self._go_on(is_told=is_told)
            except (RotaError, OSError, *FAILURES) as error:
                _tell(error)
                pause_s = AFTER_FAILURE_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._reason.wait()
            is_told = self._reason.is_set()

    async def _go_on(self, *, is_told: bool) -> float:
        """Do what there is to do, for as long as that gets anywhere; when to look again, in seconds."""
        if is_told:
            await self.once(since=self._floor.since())
        while True:
            since = self._floor.since()
            seen = Seen(*await self.database.row(LOOK, since) or ())
            advanced = await self.once(since=since) if seen.runs else 0
            if not advanced + (await self.undo() if seen.sagas else 0):
                return max(seen.pause_s, HELD_S) if seen.runs else seen.pause_s

    async def once(self, most: int = BATCH, *, since: int = 0) -> int:
        """Advance a batch by news from number `since` on; how many runs were."""
        try:
            done = await self._batch(most, since, alone=False)
        except (Unavailable, StaleFence):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was: told for the run that it befalls alone
            log.info("batch_refused", reason=str(error)[:200])
            done = await self._batch(most, since, alone=True)
        if done.first is not None:
            self._floor.took(done.first)
        await self.after(done)
        return len(done.turns)

    async def undo(self) -> int:
        """What sagas have to hear and to do next; how much that was."""
        sagas = self.advancing.sagas
        told = GoneOn()
        async with asyncio.timeout(self.saga.rollback_timeout), self._undoing() as tx:
            heard = await sagas.hear(tx, told)
        faults.reply("saga.hear")
        self.on_undone(told)
        async with asyncio.timeout(self.saga.rollback_timeout), self._undoing() as tx:
            told = await sagas.go_on(tx)
        faults.reply("saga.go_on")
        self.on_undone(told)
        if told.submitted:
            self.advancing.submitter.on_submitted(told.plans, told.submitted)
        return heard + told.count

    def _undoing(self) -> AbstractAsyncContextManager[Transaction]:
        return self.database.transaction(idle_s=self.saga.lock_ttl)

    async def after(self, done: Done) -> None:
        """What follows a commit; whatever is not done here others find."""
        done.tell()
        self.on_done(done)
        self.on_happened(done)
        if done.asked:
            self.on_asked(done.asked)
        if done.submitted:
            self.advancing.submitter.on_submitted(done.plans, done.submitted)
        for job in done.stops:
            with suppress(RotaError, *FAILURES):
                await self.stop_job(JobId(job))

    async def _batch(self, most: int, since: int, *, alone: bool) -> Done:
        async with self.transaction() as tx:
            done = await self.advancing.take(tx, most, since=since, alone=alone)
        faults.reply("workflow.advance")
        return done


def _tell(error: Exception) -> None:
    reason = error.code if isinstance(error, RotaError) else type(error).__name__
    FAILED.labels(reason).inc()
    log.warning("runs_not_advanced", reason=reason, because=getattr(error, "sentence", str(error)))


def _ignore(_done: Done) -> None:
    return None


def _unsaid(_told: GoneOn) -> None:
    return None


def _untold(_asked: Sequence[Approval]) -> None:
    return None


async def _leave(_job: JobId) -> None:
    return None
