"""Group commit: concurrent single submissions share one transaction.

Each submission is validated before it joins a batch. If the batch fails, each submission is written alone, so that one
does not fail the others. An idempotency key that another transaction holds makes its batch wait for a lock; after that,
submissions of this key are written apart from the batches. A caller that is cancelled while waiting may find its job
submitted, as with any lost reply. If the process dies, waiting callers get no reply, and committed jobs remain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from rota.engine.submission.submitter import Submitter, validate_decoded
from rota.infra.service import Lifecycle
from rota.infra.telemetry import tracing
from rota.model.errors import PostgresBusy, Unavailable
from rota.model.jobs.submission import Submission, SubmitResult
from rota.model.jobs.validation import ValidatedSubmission

if TYPE_CHECKING:
    from opentelemetry.context import Context

MAX_BATCH: Final = 500
MAX_CONCURRENT: Final = 2
"""While one batch waits for its commit, the next is written."""
APART_MAX: Final = 2
"""Submissions with held keys that are written at a time: each keeps a connection while it waits for the lock."""
HELD_KEY_S: Final = 60.0
"""So long after a submission could not get its key, others with that key are written apart."""
HELD_KEYS_MAX: Final = 10_000


_Key = tuple[str, str | None]
"""A show and an idempotency key of it."""


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
        self._held_keys: dict[_Key, float] = {}
        """Until when submissions with these keys are written apart, by the clock of the event loop."""
        self._apart = asyncio.Semaphore(APART_MAX)

    async def submit(self, submission: Submission) -> SubmitResult:
        """Submit one decoded submission. CRITICAL is accepted: the caller must have checked permissions."""
        [plan] = validate_decoded([submission])
        answer: asyncio.Future[SubmitResult] = asyncio.get_running_loop().create_future()
        one = _QueuedSubmission(plan, tracing.extract(tracing.inject()) if tracing.is_enabled() else None, answer)
        if self._held_keys and self._has_held_key(one):
            self._start(self._write_apart(one))
            return await answer
        self._waiting.append(one)
        if self._writers < MAX_CONCURRENT:
            self._writers += 1
            self._start(self._drain())
        return await answer

    def _start(self, writer: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(writer, name="submit.together")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

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
                _reject(one, error)
            if not isinstance(error, Exception):
                raise

    async def _write_batch(self, batch: Sequence[_QueuedSubmission]) -> None:
        try:
            written = await self._submitter.write([one.plan for one in batch], parents=[one.parent for one in batch])
        except PostgresBusy:
            keyed = [one for one in batch if one.plan.key is not None]
            if not keyed:
                raise
            for one in keyed:
                self._start(self._write_apart(one))
            await self._write_keyless([one for one in batch if one.plan.key is None])
        except Unavailable:
            raise
        except Exception:
            if len(batch) == 1:
                raise
            for one in batch:
                await self._write_single(one)
        else:
            for one, submitted in zip(batch, written, strict=True):
                _resolve(one, submitted)

    async def _write_keyless(self, batch: Sequence[_QueuedSubmission]) -> None:
        if not batch:
            return
        try:
            await self._write_batch(batch)
        except Exception as error:  # noqa: BLE001 - it belongs to these callers
            for one in batch:
                _reject(one, error)

    async def _write_apart(self, one: _QueuedSubmission) -> None:
        """Write a submission whose key may be held, beside the batches."""
        try:
            async with self._apart:
                await self._write_single(one)
        finally:
            _reject(one, asyncio.CancelledError())

    async def _write_single(self, one: _QueuedSubmission) -> None:
        try:
            [submitted] = await self._submitter.write([one.plan], parents=[one.parent])
        except PostgresBusy as error:
            self._record_held_key(one)
            _reject(one, error)
        except Exception as error:  # noqa: BLE001 - it belongs to this caller alone
            _reject(one, error)
        else:
            _resolve(one, submitted)

    def _has_held_key(self, one: _QueuedSubmission) -> bool:
        return self._held_keys.get(_key_of(one), 0.0) > asyncio.get_running_loop().time()

    def _record_held_key(self, one: _QueuedSubmission) -> None:
        if one.plan.key is None:
            return
        now = asyncio.get_running_loop().time()
        if len(self._held_keys) >= HELD_KEYS_MAX:
            self._held_keys = {key: until for key, until in self._held_keys.items() if until > now}
        if len(self._held_keys) < HELD_KEYS_MAX:
            self._held_keys[_key_of(one)] = now + HELD_KEY_S


def _key_of(one: _QueuedSubmission) -> _Key:
    return one.plan.show, one.plan.key


def _resolve(one: _QueuedSubmission, submitted: SubmitResult) -> None:
    if not one.answer.done():  # the caller may have been cancelled
        one.answer.set_result(submitted)


def _reject(one: _QueuedSubmission, error: BaseException) -> None:
    if not one.answer.done():
        one.answer.set_exception(_caller_error(error))


def _caller_error(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("This server is shutting down: submit again, to another server or later.")
    return error
