"""Dry run of a submission: validated, written and explained in one transaction that is always rolled back.

The transaction includes the queues it creates, so other sessions see none of it; meanwhile, submissions to a queue
that is new wait for it. A remote policy is not queried: the result then says that the job would wait for its decision.
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
    """The job as it would be written, or the existing job if its idempotency key was used before; otherwise its id is
    meaningless.
    """
    already: bool
    explained: JobExplanation


class _Rollback(Exception):
    """Rolls the transaction back."""


class _TransactionAsDatabase:
    """A read-only `Database` view of a transaction: readers see its uncommitted writes."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.rows, self.row, self.value = tx.rows, tx.row, tx.value

    @asynccontextmanager
    async def transaction(self, _isolation: str = "", *, readonly: bool = True) -> AsyncIterator[Transaction]:
        assert readonly, "a dry run only reads here"
        yield self._tx


async def dry_run(
    database: Database,
    submission: Submission,
    gate: AdmissionGate,
    *,
    may_be_critical: bool = False,
    clock: Clock | None = None,
) -> SubmissionDryRun:
    """Raises the same errors as submitting."""
    batch = SubmissionBatch(
        validate_submissions([submission], may_be_critical=may_be_critical), gate, (clock or SystemClock()).now_ms()
    )
    found: SubmissionDryRun | None = None
    try:
        async with database.transaction() as tx:
            found = await _evaluate(tx, batch)
            raise _Rollback  # noqa: TRY301 - always roll back
    except _Rollback:
        assert found is not None, "evaluated before the rollback"
        return found


async def _evaluate(tx: Transaction, batch: SubmissionBatch) -> SubmissionDryRun:
    submitted = await _write_batch(tx, batch)
    view = cast("Database", _TransactionAsDatabase(tx))
    job = await JobQueries(view).get(submitted.job)
    explained = await Explainer(view).explain(submitted.job)
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
