"""Submissions that come one by one at the same time, written together: one commit for all that came meanwhile.

Each is checked alone before it joins others. When those that were written together are refused, each is written alone,
so nobody is refused for what somebody else has sent. Whoever is cancelled while it waits may find its job submitted, as
with any reply that is lost. If we die, those who wait have no answer, and what was committed is there.
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
"""While one batch waits for its commit the next is written."""


class _QueuedSubmission(msgspec.Struct, frozen=True):
    plan: ValidatedSubmission
    parent: Context | None
    answer: asyncio.Future[SubmitResult]


class SubmissionBatcher:
    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        self._waiting: deque[_QueuedSubmission] = deque()
        self._writing: set[asyncio.Task[None]] = set()

    async def submit(self, submission: Submission) -> SubmitResult:
        """One that was read just now. It may be CRITICAL: whoever calls has looked at who asks."""
        [plan] = validate_decoded([submission])
        answer: asyncio.Future[SubmitResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(
            _QueuedSubmission(plan, tracing.extract(tracing.inject()) if tracing.is_enabled() else None, answer)
        )
        if len(self._writing) < MAX_CONCURRENT:
            task = asyncio.create_task(self._drain(), name="submit.together")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return await answer

    async def run(self, life: Lifecycle) -> None:
        """As a service: when it ends, nobody is left without an answer."""
        life.ready()
        await life.until_draining()
        while self._writing:
            await asyncio.wait(self._writing)

    async def _drain(self) -> None:
        """Until nobody waits. What fails is told to those who wait for it."""
        while self._waiting:
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
    if not one.answer.done():  # who asked may have gone
        one.answer.set_result(submitted)


def _caller_error(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("This server is ending: submit again, to another or in a moment.")
    return error
