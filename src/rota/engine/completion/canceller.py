"""Terminates a job early: cancelled, past its deadline, denied, given up. All of these use this path.

First the job is marked (`ends_as`, final once set); from then on no frame of it starts. Then its frames end wherever
they are: waiting ones immediately, running ones by closing their attempt and sending a stop to the worker. A frame
that a dispatcher has just claimed comes back parked, or is booked and found by the next pass. Each pass is one
idempotent transaction; if the process dies between two, the leader continues (`rota.engine.recovery.reconciler`).

A proc remains until its worker reports that the frame has stopped, or is lost: running frames count against quota.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final
from uuid import UUID

import structlog

from rota.engine.completion.job_ends import COUNT_ENDS, END_AS, finish_jobs
from rota.engine.completion.publisher import CompletionPublisher, CompletionResult
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.nats import Bus
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import NatsUnavailable, TooLarge
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.protocol import CANCEL_SUBJECT, CancelFrames, encode
from rota.model.reasons import Reason
from rota.model.token_ranges import TokenRange, to_ranges
from rota.queue import Queue

OPEN_LAYERS = query(__package__, "job_open_layers")
LOCK = query(__package__, "job_lock")
PROCS = query(__package__, "job_procs")

log = structlog.get_logger(__name__)
PASSES_MAX: Final = 3
MAX_BATCH: Final = 4096


class JobCanceller:
    def __init__(self, database: Database, bus: Bus, queue: Queue, publisher: CompletionPublisher) -> None:
        self.database = database
        self._bus = bus
        self._queue = queue
        self._publisher = publisher

    async def terminate(self, job: JobId, state: JobState, reason: str) -> JobState | None:
        """Terminate a live job in this state, or the state it is already ending in; None: no such live job.

        On return the job has ended, except for frames that were being assigned: those end later.
        """
        assert state.terminal, "a job ends in a terminal state"
        row = await self.database.row(END_AS, job, state.value, reason)
        if row is None:
            return None
        failpoints.hit("ender.after_mark")
        await self.finish_termination(job)
        return JobState(row["ends_as"])

    async def finish_termination(self, job: UUID) -> None:
        """Run passes over a marked job until nothing is left, at most `PASSES_MAX`."""
        for _ in range(PASSES_MAX):
            if await self.continue_termination(job):
                break

    async def cancel(self, job: JobId, actor: str) -> bool:
        """Whether the job was live. Writes an audit entry with `actor`."""
        if not await request_cancellation(self.database, job, actor):
            return False
        await self.terminate(job, JobState.CANCELLED, Reason.CANCELLED.value)
        return True

    async def continue_termination(self, job: UUID) -> bool:
        """One pass over a job that is ending; True if nothing is left."""
        async with self.database.transaction() as tx:
            result, stopped = await self._termination_pass(tx, job)
        await self._publisher.publish(result)
        if stopped:
            await self._send_cancel(stopped)
        return bool(result.finished) or not stopped

    async def _termination_pass(self, tx: Transaction, job: UUID) -> tuple[CompletionResult, list[TokenRange]]:
        await tx.row(LOCK, job)
        layers = await tx.rows(OPEN_LAYERS, job)
        result = CompletionResult()
        if not layers:
            return result, []
        ends_as, reason = layers[0]["ends_as"], layers[0]["reason"]
        ended: dict[UUID, int] = defaultdict(int)
        for layer in layers:
            waiting = await self._queue.cancel_waiting(job, layer["pk_layer"], on=tx)
            ended[layer["pk_layer"]] += layer["unqueued"] or waiting
        stopped = await self._close_running(tx, job, ended)
        finished = await tx.value(COUNT_ENDS, list(ended), list(ended.values()), ends_as, 0)
        result.finished = await finish_jobs(tx, finished, reason)
        failpoints.hit("ender.before_commit")
        return result, stopped

    async def _close_running(self, tx: Transaction, job: UUID, ended: dict[UUID, int]) -> list[TokenRange]:
        rows = {row["token"]: row["pk_layer"] for row in await tx.rows(PROCS, job, MAX_BATCH)}
        closed = await self._queue.cancel_running(rows, on=tx) if rows else None
        for token, layer in rows.items():
            if closed is not None and token not in closed.refused:
                ended[layer] += 1
        return to_ranges(rows)

    async def _send_cancel(self, tokens: list[TokenRange]) -> None:
        """Best effort: the leader repeats it while a worker holds the frames."""
        try:
            await self._bus.publish_core(CANCEL_SUBJECT, encode(CancelFrames(tokens)))
        except (NatsUnavailable, TooLarge):
            log.info("cancel_publish_failed", runs=len(tokens))


async def request_cancellation(database: Database, job: JobId, actor: str) -> bool:
    """Whether the job was live; from here on no frame of it starts, and the servers terminate it."""
    async with database.transaction() as tx:
        row = await tx.row(END_AS, job, JobState.CANCELLED.value, Reason.CANCELLED.value)
        if row is None:
            return False
        await audit.append(tx, [AuditEntry(actor, "job.cancel", f"job:{job}")])
    return True
