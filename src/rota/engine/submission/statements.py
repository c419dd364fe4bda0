"""The SQL statements of a submission, independent of the driver. No I/O.

`SubmissionBatch.statements` is a generator: it yields a statement, receives its rows, and returns the submit results.
So the same code runs on our own pool, in a caller's transaction, and on any sync or async driver.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any, Final
from uuid import UUID

import msgspec
from asyncpg.pgproto.pgproto import UUID as DriverUUID

from rota.accounting.resources import unknown_name_error
from rota.engine.admission.decision import (
    DEFERRED,
    WAITING_ON_JOB,
    AdmissionDecision,
    AdmissionGate,
    DeferAll,
    PrecheckResult,
    admission_message,
)
from rota.engine.submission.bulk_key import BulkKey
from rota.engine.submission.columns import SubmissionColumns, queue_columns
from rota.engine.submission.single_job import INSERT_ONE, fits_one_row, single_arguments
from rota.infra.blob_store import PUT as PUT_BLOBS
from rota.infra.blob_store import put_arguments
from rota.infra.outbox.outbox import ADD as OUTBOX_ADD
from rota.infra.postgres import Query, query
from rota.infra.postgres.foreign import Rows
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused
from rota.model.ids import ENTROPY_BYTES, JobId, LayerId, uuid7_bytes
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult
from rota.model.jobs.validation import ValidatedSubmission
from rota.policy.decision_store import STORE_DECISIONS, store_arguments
from rota.queue.queue import ENSURE_QUEUE

INSERT = query(__package__, "submit_insert")
QUEUES = query(__package__, "submit_queues")
NAMES = query(__package__, "submit_names")
UNKNOWN_JOBS = query(__package__, "submit_unknown")
ADD_DEPENDENCIES = query(__package__, "submit_wait")

_KINDS: Final = {"unknown_show": "show", "unknown_folder": "folder", "unknown_dept": "dept"}


class Statement(msgspec.Struct, frozen=True):
    query: Query
    arguments: tuple[object, ...]
    ahead: bool = False
    """Commit it separately where possible, because other transactions may wait for it."""


Statements = Generator[Statement, Rows, list[SubmitResult]]


class StaleDecision(Exception):
    """Nothing was written: the policy decision has expired, or jobs need a decision that was not requested."""


class SubmissionBatch:
    """Submissions that are written together (at least one), with the ids of their jobs."""

    def __init__(
        self,
        plans: Sequence[ValidatedSubmission],
        gate: AdmissionGate,
        now_ms: int,
        *,
        ids: Sequence[JobId] | None = None,
        ahead: PrecheckResult | None = None,
        bulk: BulkKey | None = None,
    ) -> None:
        """`ahead`: policy decisions made before the write; requires `ids`, which the policy was queried with. `bulk`:
        one idempotency key for all; requires ids of `bulk_ids`."""
        self.plans = plans
        self._bulk = bulk
        self._now_ms = now_ms
        self.until = ahead.until if ahead is not None else None
        decided = ahead.decisions if ahead is not None else _decide(gate, plans)
        # A job that depends on others is decided when they have ended.
        self.decisions: Sequence[AdmissionDecision] = [
            WAITING_ON_JOB if plan.after else decision for plan, decision in zip(plans, decided, strict=True)
        ]
        self.ids = ids if ids is not None else new_job_ids(len(plans), now_ms)
        layers = iter(_new_ids(sum([len(each.layers) for each in plans]), now_ms))
        self._layers = [[LayerId(next(layers)) for _ in plan.layers] for plan in plans]
        self._is_single = len(plans) == 1 and fits_one_row(plans[0], self.decisions[0])

    @cached_property
    def _columns(self) -> SubmissionColumns:
        columns = SubmissionColumns()
        for plan, decision, job, layers in zip(self.plans, self.decisions, self.ids, self._layers, strict=True):
            columns.add(plan, decision, job, layers)
        return columns

    @property
    def _large(self) -> Sequence[bytes]:
        return () if self._is_single else self._columns.large

    @property
    def needs_transaction(self) -> bool:
        """Whether several statements must commit together."""
        return (
            self._bulk is not None
            or bool(self._large)
            or any(each.state is JobState.PENDING for each in self.decisions)
        )

    def deferred(self) -> SubmissionBatch:
        """The same jobs with the decision deferred: written as PENDING."""
        return SubmissionBatch(self.plans, DeferAll(), self._now_ms, ids=self.ids, bulk=self._bulk)

    def statements(self, *, together: bool = True) -> Statements:
        """`together`: the statements share a transaction, so the batch can still be deferred in it."""
        if self._bulk is not None and (known := (yield from self._known(self._bulk))) is not None:
            return known
        insert = self._insert()
        if dependencies := sorted({before for plan in self.plans for before in plan.after}):
            for row in (yield Statement(UNKNOWN_JOBS, (dependencies,))):
                raise NotFound(f"There is no job {row[0]} to wait for, or it is not kept any more.", job=str(row[0]))
        unwritten = yield insert
        if any(row[1] == "new_queue" for row in unwritten):
            yield from self._create_queues()
            unwritten = yield insert
        if any(row[1] == "new_word" for row in unwritten):
            stored = store_arguments(each.said for each in self.decisions if each.said is not None)
            yield Statement(STORE_DECISIONS, stored, ahead=True)
            unwritten = yield insert
        if any(row[1] == "unasked" for row in unwritten) and together:
            return (yield from self.deferred().statements())
        if any(row[1] in ("old_word", "unasked") for row in unwritten):
            raise StaleDecision
        for row in unwritten:
            if row[1] != "already":
                raise (yield from self._error_for(row))
        submitted = self._results(unwritten)
        yield from self._follow_up_statements(submitted)
        return submitted

    def _known(self, bulk: BulkKey) -> Generator[Statement, Rows, list[SubmitResult] | None]:
        """The jobs that exist under the key of the bulk; None: it was taken for these."""
        steps = bulk.statements(self.ids)
        rows: Rows | None = None
        while True:
            try:
                step, arguments = steps.send(rows) if rows is not None else next(steps)
            except StopIteration as end:
                known: list[SubmitResult] | None = end.value
                return known
            rows = yield Statement(step, arguments)

    def _insert(self) -> Statement:
        if self._is_single:
            [[layer]] = self._layers
            return Statement(
                INSERT_ONE, single_arguments(self.plans[0], self.decisions[0], self.ids[0], layer, self.until)
            )
        return Statement(INSERT, self._columns.arguments(self.until))

    def _create_queues(self) -> Generator[Statement, Rows, None]:
        columns = queue_columns(self._columns)
        queues = yield Statement(QUEUES, columns, ahead=True)
        if any(row[1] is None for row in queues):
            # Only the caller's transaction sees it, such as a folder that it has just created.
            queues = yield Statement(QUEUES, columns)
        keys = list(self._columns.targets)
        for row in queues:
            if row[1] is not None:
                yield Statement(ENSURE_QUEUE, (row[1], [keys[row[0] - 1][4]], None, None), ahead=True)

    def _follow_up_statements(self, submitted: Sequence[SubmitResult]) -> Generator[Statement, Rows, None]:
        """Further writes of the same transaction."""
        if self._large:
            yield Statement(PUT_BLOBS, put_arguments(self._large)[1])
        waiting = [
            (one.job, before, plan.after_failed)
            for one, plan in zip(submitted, self.plans, strict=True)
            for before in plan.after
            if not one.already
        ]
        if waiting:
            yield Statement(ADD_DEPENDENCIES, tuple(list(column) for column in zip(*waiting, strict=True)))
        undecided = [
            one.job
            for one, plan in zip(submitted, self.plans, strict=True)
            if one.state is JobState.PENDING and not one.already and not plan.after
        ]
        if undecided:
            message = admission_message(undecided)
            yield Statement(OUTBOX_ADD, ([message.subject], [message.msg_id], [None], [message.data]))

    def _results(self, known: Rows) -> list[SubmitResult]:
        submitted = [SubmitResult(job, decision.state) for job, decision in zip(self.ids, self.decisions, strict=True)]
        new = {one.job: one.state for one in submitted} if known else {}
        for at, _, job, state in known:
            # A key used twice within this batch did not exist yet when it was looked up.
            found = JobState(state) if state is not None else new.get(JobId(job))
            submitted[at - 1] = SubmitResult(JobId(job), found, already=True)
        return submitted

    def _error_for(self, row: Sequence[Any]) -> Generator[Statement, Rows, Exception]:
        at, outcome, job = row[0], row[1], row[2]
        if outcome == "conflict":
            return IdempotencyConflict(
                f"The idempotency key {self.plans[at - 1].key!r} was used for another submission, job {job}: use a new"
                " key, or repeat exactly what was submitted with it.",
                job=str(job),
            )
        if outcome in _KINDS:
            return (yield from _unknown_name_error(_KINDS[outcome], list(self._columns.places)[at - 1]))
        return Refused("The queues of this submission were removed while it was written: submit it again.")


def _unknown_name_error(kind: str, place: tuple[Any, ...]) -> Generator[Statement, Rows, InvalidInput]:
    show, folder, dept = place[:3]
    rows = yield Statement(NAMES, (show,))
    known = [row[1] for row in rows if row[0] == kind]
    name = {"show": show, "folder": folder, "dept": dept}[kind]
    return unknown_name_error(f"folder of show {show}" if kind == "folder" else kind, name, known)


def new_job_ids(count: int, now_ms: int) -> list[JobId]:
    return [JobId(each) for each in _new_ids(count, now_ms)]


def _decide(gate: AdmissionGate, plans: Sequence[ValidatedSubmission]) -> Sequence[AdmissionDecision]:
    return gate.decide(plans) if gate.at_once else [DEFERRED] * len(plans)


def _new_ids(count: int, now_ms: int) -> list[UUID]:
    """New ids in ascending order, as the driver's UUID type, which it sends without conversion."""
    entropy = secrets.token_bytes(ENTROPY_BYTES * count)
    parts = [entropy[at : at + ENTROPY_BYTES] for at in range(0, len(entropy), ENTROPY_BYTES)]
    return [DriverUUID(each) for each in sorted(uuid7_bytes(now_ms, part) for part in parts)]
