"""Trying again what has ended: as a new job that is linked to the old one, never by reopening that.

An end that was recorded stays (ADR 15), so frames that failed cannot go back to their job: it may have ended, and it
counts them as failed in any case. They are submitted again as a job of their own, with `parent_job_id` and the label
`retry_of`, everything else as it was: priority, budget, workflow, compensation, environment, caps. It comes to the gate
like any other. Deadline and max_wait begin anew.

The rows that are removed are the frames that are submitted, in one transaction: of two who retry the same frame one
does, and whoever dies in between has done nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

import msgspec

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
from rota.queue import DeadLetter, DeadLetterFilter, FailedFilter, Queue
from rota.queue.dead_letters import FIND, REMOVE_MAX

JOBS = query(__package__, "reopen_jobs")
ENGINE_QUEUES = query(__package__, "reopen_known")
DEAD_LETTERS = query(__package__, "reopen_letters")
DENIED_JOB = query(__package__, "reopen_denied")

BATCHES_MAX: Final = FRAMES_MAX // REMOVE_MAX


class RetryResult(msgspec.Struct, frozen=True):
    """`gone` are the ids of the letters, or the tokens of the failed frames, that were removed."""

    gone: list[int]
    jobs: list[ResubmitResult]


class Resubmitter:
    def __init__(self, database: Database, queue: Queue, submitter: Submitter, store: BlobStore) -> None:
        self.database = database
        self.queue = queue
        self.submitter = submitter
        self.store = store
        self.words = DecisionStore(database)

    async def retry_job(
        self, job: JobId, *, every_frame: bool = False, by: str = "", on: Transaction | None = None
    ) -> ResubmitResult:
        """Failed frames of a job, or all of them; its failed frames and dead letters are settled with that.

        Whoever asks for it, `by`, submits the new job, and so may not approve it.
        """
        async with self._transaction(on) as tx:
            rows = await tx.rows(JOBS, [job])
            if not rows:
                raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
            if every_frame and rows[0]["live"]:
                raise InvalidInput(f"Job {job} has not ended: cancel it, or wait for it, to run all of it again.")
            letters = await self._dead_letters_of(tx, job)
            await self._purge(tx, letters)
            wanted = _frames_by_layer([letter for letter in letters if letter.kind == "frame"])
            if not every_frame and not wanted:
                raise InvalidInput(f"Job {job} has no failed frame that is kept: retry all of it, or submit it again.")
            return await self._submit(tx, rows, None if every_frame else wanted, by)

    async def remediate(
        self, job: JobId, remediation: str = "", *, by: str = "", on: Transaction | None = None
    ) -> ResubmitResult:
        """A denied job as a new one, changed in the way that its policy suggests; its dead letter is settled."""
        async with self._transaction(on) as tx:
            rows = await tx.rows(JOBS, [job])
            if not rows:
                raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
            denied = await tx.row(DENIED_JOB, job)
            if denied is None:
                raise InvalidInput(f"Job {job} was not denied: only what a policy denied has a remedy of it.")
            words = await self.words.read([denied["word"]], on=tx)
            remedy = select_remediation(words.get(denied["word"]), remediation)
            await self._purge(tx, await self._dead_letters_of(tx, job))
            return await self._submit(tx, rows, None, by, remedy)

    async def retry_dead_letters(
        self, which: DeadLetterFilter, *, most: int = REMOVE_MAX, by: str = "", on: Transaction | None = None
    ) -> RetryResult:
        """Frames and jobs among the dead letters, submitted by `by`; those that cannot be run again stay, unless they
        are named.

        Frames of queues that are not the engine's go back to them as they are.
        """
        async with self._transaction(on) as tx:
            letters = [one for one in await _find_dead_letters(tx, which, most) if one.kind in ("frame", "job")]
            strangers = await _foreign_dead_letters(tx, letters)
            gone = await self._requeue(tx, strangers)
            jobs, taken = await self._resubmit(
                tx, [one for one in letters if one.id not in strangers], by, strict=bool(which.ids)
            )
        return RetryResult(sorted([*gone, *taken]), jobs)

    async def retry_failed(
        self, which: FailedFilter, *, most: int = REMOVE_MAX, by: str = "", on: Transaction | None = None
    ) -> RetryResult:
        """The same for failed frames that are not among the dead letters; those that are named must all be there."""
        async with self._transaction(on) as tx:
            tokens = await self.queue.failed.move_to_dead_letters(which, most=most, on=tx)
            if missing := sorted(set(which.tokens or ()).difference(tokens)):
                raise InvalidInput(
                    f"The frame with token {missing[0]} is not a failed one, so nothing was retried: look at what has"
                    " failed, and name only that.",
                    tokens=missing[:100],
                )
            rows = await tx.rows(DEAD_LETTERS, [f"token:{token}" for token in tokens])
            ids = [row["id"] for row in rows]
            retried = (
                await self.retry_dead_letters(DeadLetterFilter(ids=ids), by=by, on=tx) if ids else RetryResult([], [])
            )
        return RetryResult(tokens, retried.jobs)

    async def _dead_letters_of(self, tx: Transaction, job: JobId) -> list[DeadLetter]:
        """Everything that was given up of a job, failed frames among it."""
        for _ in range(BATCHES_MAX):
            if len(await self.queue.failed.move_to_dead_letters(FailedFilter(job=job), on=tx)) < REMOVE_MAX:
                break
        found: list[DeadLetter] = []
        for kind in ("frame", "job"):
            found += await _find_dead_letters(tx, DeadLetterFilter(kind=kind, job=job), FRAMES_MAX)
        return found

    async def _requeue(self, tx: Transaction, strangers: Collection[int]) -> list[int]:
        if not strangers:
            return []
        return await self.queue.dead_letters.retry(DeadLetterFilter(ids=sorted(strangers)), on=tx)

    async def _resubmit(
        self, tx: Transaction, letters: Sequence[DeadLetter], by: str, *, strict: bool
    ) -> tuple[list[ResubmitResult], list[int]]:
        by_job: dict[UUID, list[DeadLetter]] = defaultdict(list)
        for letter in letters:
            if letter.job is not None:
                by_job[letter.job].append(letter)
        layers: dict[UUID, list[Record]] = defaultdict(list)
        for row in await tx.rows(JOBS, list(by_job)) if by_job else ():
            layers[row["pk_job"]].append(row)
        reopened: list[ResubmitResult] = []
        gone: list[int] = []
        refused: InvalidInput | None = None
        for job, given in by_job.items():
            try:
                async with tx.savepoint():
                    one, taken = await self._resubmit_job(tx, job, layers.get(job, []), given, by)
            except InvalidInput as error:
                refused = error
                if strict:
                    raise
                continue
            reopened += one
            gone += taken
        if refused is not None and not reopened:
            raise refused
        return reopened, gone

    async def _resubmit_job(
        self, tx: Transaction, job: UUID, layers: Sequence[Record], letters: Sequence[DeadLetter], by: str
    ) -> tuple[list[ResubmitResult], list[int]]:
        if not layers:
            raise InvalidInput(
                f"Job {job} of dead letter {letters[0].id} is not kept any more: submit it again, and purge the letter."
            )
        taken = await self._purge(tx, letters)
        left = [letter for letter in letters if letter.id in taken]
        if not left:
            return [], []
        whole = any(letter.kind == "job" for letter in left)
        return [await self._submit(tx, layers, None if whole else _frames_by_layer(left), by)], sorted(taken)

    async def _purge(self, tx: Transaction, letters: Sequence[DeadLetter]) -> set[int]:
        gone: set[int] = set()
        ids = [letter.id for letter in letters]
        for at in range(0, len(ids), REMOVE_MAX):
            gone |= set(await self.queue.dead_letters.purge(DeadLetterFilter(ids=ids[at : at + REMOVE_MAX]), on=tx))
        failpoints.hit("reopen.after_purge")
        return gone

    async def _submit(
        self,
        tx: Transaction,
        layers: Sequence[Record],
        wanted: FramesByLayer | None,
        by: str = "",
        remedy: Remediation | None = None,
    ) -> ResubmitResult:
        inputs = {row["pk_layer"]: await self.store.get(row["input_at"], on=tx) for row in layers if row["input_at"]}
        plan = resubmission_plan(layers, wanted, inputs, await self._items(tx, layers[0]) if wanted is None else None)
        if by:
            details = msgspec.structs.replace(decode_details(plan.details), principal=by)
            plan = msgspec.structs.replace(plan, details=encode_details(details))
        if remedy is not None:
            plan = apply_remediation(plan, remedy, layers[0]["pk_job"])
        [submitted] = await self.submitter.write([plan], on=tx)
        return ResubmitResult(layers[0]["pk_job"], submitted.job, sum(layer.frames.count for layer in plan.layers))

    async def _items(self, tx: Transaction, job: Record) -> ItemsByLayer:
        """Of layers that are maps. They are kept from their submission on, so those of a long job may go before it."""
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


def _frames_by_layer(letters: Sequence[DeadLetter]) -> FramesByLayer:
    wanted: FramesByLayer = defaultdict(dict)
    for letter in letters:
        if letter.layer is not None and letter.frame is not None:
            wanted[letter.layer][letter.frame] = letter.payload
    return wanted


async def _find_dead_letters(tx: Transaction, which: DeadLetterFilter, most: int) -> list[DeadLetter]:
    return [DeadLetter(**dict(row.items())) for row in await tx.rows(FIND, *which.arguments(), 0, most)]


async def _foreign_dead_letters(tx: Transaction, letters: Sequence[DeadLetter]) -> set[int]:
    """Frames that somebody else than the engine has queued."""
    queues = {letter.queue for letter in letters if letter.kind == "frame"}
    known = {row["queue"] for row in await tx.rows(ENGINE_QUEUES, list(queues))} if queues else set()
    return {letter.id for letter in letters if letter.kind == "frame" and letter.queue not in known}
