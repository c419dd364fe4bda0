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

from rota.engine.explain import Explainer
from rota.engine.explain_told import Explained
from rota.engine.gate import Decision, Gate
from rota.engine.jobs import Job, Jobs
from rota.engine.submit import planned
from rota.engine.submit_steps import Batch
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Transaction
from rota.model.job import Submission, Submitted


class DryRun(msgspec.Struct, frozen=True):
    gate: Decision
    job: Job
    """As it would be, or as it is where its key was used before; its id means nothing otherwise."""
    already: bool
    explained: Explained


class _Undo(Exception):
    """Ends the transaction."""


class _Inside:
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
    gate: Gate,
    *,
    may_be_critical: bool = False,
    clock: Clock | None = None,
) -> DryRun:
    """Errors are those of submitting."""
    batch = Batch(planned([given], may_be_critical=may_be_critical), gate, (clock or SystemClock()).now_ms())
    found: DryRun | None = None
    try:
        async with database.transaction() as tx:
            found = await _looked(tx, batch)
            raise _Undo  # noqa: TRY301  what the block is for
    except _Undo:
        assert found is not None, "it was looked at before it was undone"
        return found


async def _looked(tx: Transaction, batch: Batch) -> DryRun:
    submitted = await _written(tx, batch)
    inside = cast("Database", _Inside(tx))
    job = await Jobs(inside).get(submitted.job)
    explained = await Explainer(inside).explain(submitted.job)
    return DryRun(batch.decisions[0], job, submitted.already, explained)


async def _written(tx: Transaction, batch: Batch) -> Submitted:
    steps = batch.steps()
    step = next(steps)
    while True:
        try:
            step = steps.send(await tx.rows(step.query, *step.arguments))
        except StopIteration as end:
            [submitted] = end.value
            assert isinstance(submitted, Submitted)
            return submitted
