"""Dry run of a submission: validated, written and explained in one transaction that is always rolled back.

The transaction includes the queues it creates, so other sessions see none of it; meanwhile, submissions to a queue
that is new wait for it. The policy is asked before the transaction and counts nothing against velocity limits. A
process that knows no policy, while the servers have one, says that the job would wait for their decision.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from rota.api.explanation import JobExplanation
from rota.api.jobs import JobView
from rota.engine.admission.decision import (
    ALLOWED,
    DEFERRED,
    AdmissionDecision,
    AdmissionVerdict,
    AllowAll,
    PolicyPreview,
    PrecheckResult,
)
from rota.engine.explain.ended_jobs import explain_ended_job
from rota.engine.explain.explainer import Explainer
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.statements import SubmissionBatch, new_job_ids
from rota.engine.submission.submitter import validate_submissions
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.model.job_states import JobState
from rota.model.jobs.submission import Submission, SubmitResult


class SubmissionDryRun(msgspec.Struct, frozen=True):
    gate: AdmissionDecision
    """What the policy says now, also about a job that would wait for others first."""
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
    preview: PolicyPreview | None,
    *,
    may_be_critical: bool = False,
    clock: Clock | None = None,
) -> SubmissionDryRun:
    """Raises the same errors as submitting. Without `preview` this process knows no policy."""
    [plan] = validate_submissions([submission], may_be_critical=may_be_critical)
    decision = await preview(plan) if preview is not None else ALLOWED
    now_ms = (clock or SystemClock()).now_ms()
    decided = PrecheckResult([decision])
    batch = SubmissionBatch([plan], AllowAll(), now_ms, ids=new_job_ids(1, now_ms), ahead=decided)
    found: SubmissionDryRun | None = None
    try:
        async with database.transaction() as tx:
            found = await _evaluate(tx, batch, decision)
            raise _Rollback  # noqa: TRY301 - always roll back
    except _Rollback:
        assert found is not None, "evaluated before the rollback"
        return found


async def _evaluate(tx: Transaction, batch: SubmissionBatch, decision: AdmissionDecision) -> SubmissionDryRun:
    submitted = await _write_batch(tx, batch)
    view = cast("Database", _TransactionAsDatabase(tx))
    job = await JobQueries(view).get(submitted.job)
    if not submitted.already and decision is ALLOWED and job.reason == DEFERRED.reason:
        decision = DEFERRED  # the servers have a policy: PostgreSQL queues nothing that was not decided
    if not submitted.already and decision.verdict is AdmissionVerdict.DENY and not batch.plans[0].after:
        job = _denied(job, decision)
        explained = await explain_ended_job(view, job, job.layers)
    else:
        explained = await Explainer(view).explain(submitted.job)
    return SubmissionDryRun(decision, job, submitted.already, explained)


def _denied(job: JobView, decision: AdmissionDecision) -> JobView:
    """As the admission controller would end it; a job that does not exist cannot be remediated."""
    policy = None if job.policy is None else msgspec.structs.replace(job.policy, remediations=())
    return msgspec.structs.replace(job, state=JobState.DENIED, reason=decision.reason, policy=policy)


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
