"""Retries ended work as a new job linked to the old one; an ended job is never reopened.

A recorded end is final (ADR 15), so failed frames cannot return to their job: it may have ended, and counts them as
failed in any case. They are submitted as a new job with `parent_job_id` and the label `retry_of`, everything else
unchanged: priority, budget, workflow, compensation, environment, caps. It passes admission like any other. Deadline and
max_wait start anew.

The removed rows are exactly the frames that are submitted, in one transaction: of two concurrent retries of a frame one
wins, and a crash in between leaves nothing done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

import msgspec

from rota.api.admin import DeadLetter
from rota.engine.resubmission.plan import FramesByLayer, ItemsByLayer, resubmission_plan
from rota.engine.resubmission.remediation import apply_remediation, select_remediation
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.errors import BlobMissing, InvalidInput, NotFound
from rota.model.ids import JobId
from rota.model.jobs.frame_ranges import FRAMES_MAX
from rota.model.jobs.submission import ResubmitResult, decode_details, encode_details
from rota.model.policy.decision import Remediation
from rota.policy.decision_store import DecisionStore
from rota.queue import DeadLetterFilter, FailedFilter, Queue
from rota.queue.dead_letters import FIND, REMOVE_MAX

JOBS = query(__package__, "reopen_jobs")
ENGINE_QUEUES = query(__package__, "reopen_known")
DEAD_LETTERS = query(__package__, "reopen_letters")
DENIED_JOB = query(__package__, "reopen_denied")

BATCHES_MAX: Final = FRAMES_MAX // REMOVE_MAX


class RetryResult(msgspec.Struct, frozen=True):
    """`gone`: the removed dead letters (ids) or failed frames (tokens)."""

    gone: list[int]
    jobs: list[ResubmitResult]


class Resubmitter:
    def __init__(self, database: Database, queue: Queue, submitter: Submitter, store: BlobStore) -> None:
        self.database = database
        self.queue = queue
        self.submitter = submitter
        self.store = store
        self.decision_store = DecisionStore(database)

    async def retry_job(
        self, job: JobId, *, every_frame: bool = False, by: str = "", on: Transaction | None = None
    ) -> ResubmitResult:
        """Retry the failed frames of a job, or all of them; removes its failed frames and dead letters.

        `by` submits the new job and so may not approve it.
        """
        async with self._transaction(on) as tx:
            rows = await tx.rows(JOBS, [job])
            if not rows:
                raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
            if every_frame and rows[0]["live"]:
                raise InvalidInput(f"Job {job} has not ended: to run all of it again, cancel it or wait for its end.")
            dead_letters = await self._dead_letters_of(tx, job)
            await self._purge(tx, dead_letters)
            frames_by_layer = _frames_by_layer(
                [dead_letter for dead_letter in dead_letters if dead_letter.kind == "frame"]
            )
            if not every_frame and not frames_by_layer:
                raise InvalidInput(f"Job {job} has no failed frame to retry: retry all of it, or submit it again.")
            return await self._submit(tx, rows, None if every_frame else frames_by_layer, by)

    async def remediate(
        self, job: JobId, remediation: str = "", *, by: str = "", on: Transaction | None = None
    ) -> ResubmitResult:
        """Resubmit a denied job with a remediation of its policy; removes its dead letter."""
        async with self._transaction(on) as tx:
            rows = await tx.rows(JOBS, [job])
            if not rows:
                raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
            denied = await tx.row(DENIED_JOB, job)
            if denied is None:
                raise InvalidInput(f"Job {job} was not denied: only jobs denied by a policy can be remediated.")
            decisions = await self.decision_store.read([denied["word"]], on=tx)
            remedy = select_remediation(decisions.get(denied["word"]), remediation)
            await self._purge(tx, await self._dead_letters_of(tx, job))
            return await self._submit(tx, rows, None, by, remedy)

    async def retry_dead_letters(
        self, which: DeadLetterFilter, *, most: int = REMOVE_MAX, by: str = "", on: Transaction | None = None
    ) -> RetryResult:
        """Retry frames and jobs among the dead letters, submitted by `by`. Letters that cannot be retried stay; if they
        were selected by id, that is an error.

        Frames of queues that are not the engine's return to their queue.
        """
        async with self._transaction(on) as tx:
            dead_letters = [one for one in await _find_dead_letters(tx, which, most) if one.kind in ("frame", "job")]
            foreign = await _foreign_dead_letters(tx, dead_letters)
            removed = await self._requeue(tx, foreign)
            jobs, taken = await self._resubmit(
                tx, [one for one in dead_letters if one.id not in foreign], by, strict=bool(which.ids)
            )
        return RetryResult(sorted([*removed, *taken]), jobs)

    async def retry_failed(
        self, which: FailedFilter, *, most: int = REMOVE_MAX, by: str = "", on: Transaction | None = None
    ) -> RetryResult:
        """Retry failed frames that are not dead letters; all tokens given must exist."""
        async with self._transaction(on) as tx:
            tokens = await self.queue.failed.move_to_dead_letters(which, most=most, on=tx)
            if missing := sorted(set(which.tokens or ()).difference(tokens)):
                raise InvalidInput(
                    f"The frame with token {missing[0]} is not a failed frame, and nothing was retried: list the failed"
                    " frames, and pass only their tokens.",
                    tokens=missing[:100],
                )
            rows = await tx.rows(DEAD_LETTERS, [f"token:{token}" for token in tokens])
            ids = [row["id"] for row in rows]
            retried = (
                await self.retry_dead_letters(DeadLetterFilter(ids=ids), by=by, on=tx) if ids else RetryResult([], [])
            )
        return RetryResult(tokens, retried.jobs)

    async def _dead_letters_of(self, tx: Transaction, job: JobId) -> list[DeadLetter]:
        """All dead letters of a job, after its failed frames were moved there."""
        for _ in range(BATCHES_MAX):
            if len(await self.queue.failed.move_to_dead_letters(FailedFilter(job=job), on=tx)) < REMOVE_MAX:
                break
        found: list[DeadLetter] = []
        for kind in ("frame", "job"):
            found += await _find_dead_letters(tx, DeadLetterFilter(kind=kind, job=job), FRAMES_MAX)
        return found

    async def _requeue(self, tx: Transaction, foreign: Collection[int]) -> list[int]:
        if not foreign:
            return []
        return await self.queue.dead_letters.retry(DeadLetterFilter(ids=sorted(foreign)), on=tx)

    async def _resubmit(
        self, tx: Transaction, dead_letters: Sequence[DeadLetter], by: str, *, strict: bool
    ) -> tuple[list[ResubmitResult], list[int]]:
        by_job: dict[UUID, list[DeadLetter]] = defaultdict(list)
        for dead_letter in dead_letters:
            if dead_letter.job is not None:
                by_job[dead_letter.job].append(dead_letter)
        layers: dict[UUID, list[Record]] = defaultdict(list)
        for row in await tx.rows(JOBS, list(by_job)) if by_job else ():
            layers[row["pk_job"]].append(row)
        resubmitted: list[ResubmitResult] = []
        removed: list[int] = []
        refused: InvalidInput | None = None
        for job, job_letters in by_job.items():
            try:
                async with tx.savepoint():
                    one, taken = await self._resubmit_job(tx, job, layers.get(job, []), job_letters, by)
            except InvalidInput as error:
                refused = error
                if strict:
                    raise
                continue
            resubmitted += one
            removed += taken
        if refused is not None and not resubmitted:
            raise refused
        return resubmitted, removed

    async def _resubmit_job(
        self, tx: Transaction, job: UUID, layers: Sequence[Record], dead_letters: Sequence[DeadLetter], by: str
    ) -> tuple[list[ResubmitResult], list[int]]:
        if not layers:
            raise InvalidInput(
                f"Job {job} of dead letter {dead_letters[0].id} is no longer retained: submit it again, and purge the"
                " dead letter."
            )
        taken = await self._purge(tx, dead_letters)
        purged = [dead_letter for dead_letter in dead_letters if dead_letter.id in taken]
        if not purged:
            return [], []
        whole = any(dead_letter.kind == "job" for dead_letter in purged)
        return [await self._submit(tx, layers, None if whole else _frames_by_layer(purged), by)], sorted(taken)

    async def _purge(self, tx: Transaction, dead_letters: Sequence[DeadLetter]) -> set[int]:
        removed: set[int] = set()
        ids = [dead_letter.id for dead_letter in dead_letters]
        for at in range(0, len(ids), REMOVE_MAX):
            removed |= set(await self.queue.dead_letters.purge(DeadLetterFilter(ids=ids[at : at + REMOVE_MAX]), on=tx))
        failpoints.hit("reopen.after_purge")
        return removed

    async def _submit(
        self,
        tx: Transaction,
        layers: Sequence[Record],
        frames_by_layer: FramesByLayer | None,
        by: str = "",
        remedy: Remediation | None = None,
    ) -> ResubmitResult:
        inputs = {row["pk_layer"]: await self.store.get(row["input_at"], on=tx) for row in layers if row["input_at"]}
        plan = resubmission_plan(
            layers, frames_by_layer, inputs, await self._items(tx, layers[0]) if frames_by_layer is None else None
        )
        if by:
            details = msgspec.structs.replace(decode_details(plan.details), principal=by)
            plan = msgspec.structs.replace(plan, details=encode_details(details))
        if remedy is not None:
            plan = apply_remediation(plan, remedy, layers[0]["pk_job"])
        [submitted] = await self.submitter.write([plan], on=tx)
        return ResubmitResult(layers[0]["pk_job"], submitted.job, sum(layer.frames.count for layer in plan.layers))

    async def _items(self, tx: Transaction, job: Record) -> ItemsByLayer:
        """Items of mapped layers; retained as long as the job."""
        details = decode_details(job["request"])
        if not details.items_at:
            return {}
        try:
            data = await self.store.get(details.items_at, on=tx)
        except BlobMissing:
            return {}
        return dict(zip(details.maps, msgspec.msgpack.decode(data, type=list[list[bytes]]), strict=True))

    @asynccontextmanager
    async def _transaction(self, on: Transaction | None) -> AsyncIterator[Transaction]:
        if on is not None:
            yield on
            return
        async with self.database.transaction() as tx:
            yield tx


def _frames_by_layer(dead_letters: Sequence[DeadLetter]) -> FramesByLayer:
    frames_by_layer: FramesByLayer = defaultdict(dict)
    for dead_letter in dead_letters:
        if dead_letter.layer is not None and dead_letter.frame is not None:
            frames_by_layer[dead_letter.layer][dead_letter.frame] = dead_letter.payload
    return frames_by_layer


async def _find_dead_letters(tx: Transaction, which: DeadLetterFilter, most: int) -> list[DeadLetter]:
    return [DeadLetter(**dict(row.items())) for row in await tx.rows(FIND, *which.arguments(), 0, most)]


async def _foreign_dead_letters(tx: Transaction, dead_letters: Sequence[DeadLetter]) -> set[int]:
    """Ids of frames that were not queued by the engine."""
    queues = {dead_letter.queue for dead_letter in dead_letters if dead_letter.kind == "frame"}
    known = {row["queue"] for row in await tx.rows(ENGINE_QUEUES, list(queues))} if queues else set()
    return {
        dead_letter.id for dead_letter in dead_letters if dead_letter.kind == "frame" and dead_letter.queue not in known
    }
