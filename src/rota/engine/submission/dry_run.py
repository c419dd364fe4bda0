"""What would become of a submission: everything is checked and written as if it were meant, explained, and undone.

It is one transaction that is always rolled back, queues that it needs included, so nobody else sees any of it; while it
lasts, a moment, others who submit to a queue that is new wait. A policy that has to be asked is not asked: then the
answer is that the job would wait for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from rota.api.explanation import JobExplanation
from rota.engine.admission.decision import AdmissionDecision, AdmissionGate
from rota.engine.explain.explainer import Explainer
from rota.engine.queries.jobs import JobQueries, JobView
from rota.engine.submission.statements import SubmissionBatch
from rota.engine.submission.submitter import validate_submissions
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.model.jobs.submission import Submission, SubmitResult


class SubmissionDryRun(msgspec.Struct, frozen=True):
    gate: AdmissionDecision
    job: JobView
    """As it would be, or as it is where its key was used before; its id means nothing otherwise."""
    already: bool
    explained: JobExplanation


class _Rollback(Exception):
    """Ends the transaction."""


class _TransactionAsDatabase:
    """A transaction as a database, for those who read: what they see is what was written in it."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.rows, self.row, self.value = tx.rows, tx.row, tx.value

    @asynccontextmanager
    async def transaction(self, _isolation: str = "", *, readonly: bool = True) -> AsyncIterator[Transaction]:
        assert readonly, "nothing more is written"
        yield self._tx


async def dry_run(
    database: Database,
    given: Submission,
    gate: AdmissionGate,
    *,
    may_be_critical: bool = False,
    clock: Clock | None = None,
) -> SubmissionDryRun:
    """Errors are those of submitting."""
    batch = SubmissionBatch(
        validate_submissions([given], may_be_critical=may_be_critical), gate, (clock or SystemClock()).now_ms()
    )
    found: SubmissionDryRun | None = None
    try:
        async with database.transaction() as tx:
            found = await _evaluate(tx, batch)
            raise _Rollback  # noqa: TRY301  what the block is for
    except _Rollback:
        assert found is not None, "it was looked at before it was undone"
        return found


async def _evaluate(tx: Transaction, batch: SubmissionBatch) -> SubmissionDryRun:
    submitted = await _write_batch(tx, batch)
    inside = cast("Database", _TransactionAsDatabase(tx))
    job = await JobQueries(inside).get(submitted.job)
    explained = await Explainer(inside).explain(submitted.job)
    return SubmissionDryRun(batch.decisions[0], job, submitted.already, explained)


async def _write_batch(tx: Transaction, batch: SubmissionBatch) -> SubmitResult:
    steps = batch.statements()
    step = next(steps)
    while True:
        try:
            step = steps.send(await tx.rows(step.query, *step.arguments))
        except StopIteration as end:
            [submitted] = end.value
            assert isinstance(submitted, SubmitResult)
            return submitted
