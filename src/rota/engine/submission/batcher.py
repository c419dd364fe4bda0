"""Group commit: concurrent single submissions share one transaction.

Each submission is validated before it joins a batch. If the batch is refused, each submission is written alone, so
that an invalid one does not fail the others. A caller that is cancelled while waiting may find its job submitted, as
with any lost reply. If the process dies, waiting callers get no reply, and committed jobs remain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from rota.engine.submission.submitter import Submitter, validate_decoded
from rota.infra.service import Lifecycle
from rota.infra.telemetry import tracing
from rota.model.errors import RotaError, Unavailable
from rota.model.jobs.submission import Submission, SubmitResult
from rota.model.jobs.validation import ValidatedSubmission

if TYPE_CHECKING:
    from opentelemetry.context import Context

MAX_BATCH: Final = 500
MAX_CONCURRENT: Final = 2
"""While one batch waits for its commit, the next is written."""


class _QueuedSubmission(msgspec.Struct, frozen=True):
    plan: ValidatedSubmission
    parent: Context | None
    answer: asyncio.Future[SubmitResult]


class SubmissionBatcher:
    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        self._waiting: deque[_QueuedSubmission] = deque()
        self._writing: set[asyncio.Task[None]] = set()
        self._writers = 0
        """Tasks that will look at `_waiting` again; a task that has returned may still be in `_writing`."""

    async def submit(self, submission: Submission) -> SubmitResult:
        """Submit one decoded submission. CRITICAL is accepted: the caller must have checked permissions."""
        [plan] = validate_decoded([submission])
        answer: asyncio.Future[SubmitResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(
            _QueuedSubmission(plan, tracing.extract(tracing.inject()) if tracing.is_enabled() else None, answer)
        )
        if self._writers < MAX_CONCURRENT:
            self._writers += 1
            task = asyncio.create_task(self._drain(), name="submit.together")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return await answer

    async def run(self, life: Lifecycle) -> None:
        """Service: on drain, waits until every caller has its reply."""
        life.ready()
        await life.until_draining()
        while self._writing:
            await asyncio.wait(self._writing)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._write_next()
        finally:
            self._writers -= 1

    async def _write_next(self) -> None:
        """Write one batch; a failure goes to its callers."""
        batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
        try:
            await self._write_batch(batch)
        except BaseException as error:
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(_caller_error(error))
            if not isinstance(error, Exception):
                raise

    async def _write_batch(self, batch: Sequence[_QueuedSubmission]) -> None:
        try:
            written = await self._submitter.write([one.plan for one in batch], parents=[one.parent for one in batch])
        except Unavailable:
            raise
        except RotaError:
            if len(batch) == 1:
                raise
            for one in batch:
                await self._write_single(one)
            return
        for one, submitted in zip(batch, written, strict=True):
            _resolve(one, submitted)

    async def _write_single(self, one: _QueuedSubmission) -> None:
        try:
            [submitted] = await self._submitter.write([one.plan], parents=[one.parent])
        except RotaError as error:
            if not one.answer.done():
                one.answer.set_exception(error)
        else:
            _resolve(one, submitted)


def _resolve(one: _QueuedSubmission, submitted: SubmitResult) -> None:
    if not one.answer.done():  # the caller may have been cancelled
        one.answer.set_result(submitted)


def _caller_error(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("This server is shutting down: submit again, to another server or later.")
    return error
