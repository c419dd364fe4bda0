"""Coalesces single submissions: those that are made while another is under way travel in one request.

| a submission is made | it is sent |
|---|---|
| while none is under way | at once, with all that are made in the same iteration of the event loop |
| while a request is under way | with the next one: when that has returned, after `HOLD_S`, or when a batch is full |
| larger than `ITEM_BYTES_MAX` | in a request of its own |

Each submission has its own answer, error, retries and trace, as if it was sent alone:
- One that fails does not affect the others. If the batch is refused as a whole, or its reply cannot be read, each is
  sent alone. This covers servers without the route for batches, which are not asked again for `BATCH_REFUSED_S`.
- A lost reply, a server that does not answer, and transient errors of one item fail this attempt only: the caller
  (`HttpClient.retry`) submits it again. Every submission has an idempotency key, so no attempt makes a second job.
- A caller that is cancelled before its submission is sent leaves the batch. Later its job may exist, as after any lost
  reply. A request without a waiting caller is cancelled.
- Closing the client does not end waiting submissions: as all idempotent calls they are repeated on a new connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from copy import copy
from typing import Final

import msgspec

from rota.api.submission import SubmitBatchAnswer, SubmitBatchReply
from rota.client.errors import error_from_problem
from rota.client.http import FailedAttempt, HttpClient, decode_response, encode_body, is_transient
from rota.infra.telemetry import tracing
from rota.model.errors import RotaError, Unavailable
from rota.model.jobs.submission import Submission, SubmitResult

HOLD_S: Final = 0.025
"""A submission waits at most this long for a request that is under way."""
ITEMS_MAX: Final = 500
ITEM_BYTES_MAX: Final = 64 * 1024
BATCH_BYTES_MAX: Final = 1024 * 1024
REQUESTS_MAX: Final = 32
"""Requests under way. More submissions wait until one of them has returned."""
BATCH_REFUSED_S: Final = 60.0
_BATCH_UNKNOWN: Final = frozenset({404, 405})
"""Statuses of a server without the route."""


class _BatchItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """`rota.api.submission.SubmitBatchItem`, encoded."""

    submission: msgspec.Raw
    trace: str = ""


class _Batch(msgspec.Struct, frozen=True):
    items: list[_BatchItem]


class _Entry:
    """One attempt of one submission."""

    __slots__ = ("answer", "body", "request", "trace")

    def __init__(self, body: bytes, trace: dict[str, str], answer: asyncio.Future[_Answer]) -> None:
        self.body = body
        self.trace = trace
        self.answer = answer
        self.request: _Request | None = None


class _Request:
    """A request that is under way, or about to be sent."""

    __slots__ = ("entries", "task", "waiting")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.task: asyncio.Task[None] | None = None
        self.waiting = 0
        """Callers that wait for it."""


_Answer = SubmitResult | Exception | FailedAttempt


class SubmissionCoalescer:
    """Belongs to the event loop it was first used on."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._waiting: deque[_Entry] = deque()
        self._requests: set[_Request] = set()
        self._starting: _Request | None = None
        """It is about to take what waits."""
        self._hold: asyncio.TimerHandle | None = None
        self._single_until_s = 0.0
        """By the clock of the loop: the server has no route for batches."""

    async def submit(self, submission: Submission) -> SubmitResult:
        """Submits one job that has an idempotency key."""
        body = encode_body(submission)
        trace = tracing.inject()

        async def attempt() -> SubmitResult | FailedAttempt:
            if len(body) > ITEM_BYTES_MAX:
                return _result_or_raise(await self._send_single(body, trace))
            return await self._join(body, trace)

        return await self._http.retry(attempt, idempotent=True)

    async def _join(self, body: bytes, trace: dict[str, str]) -> SubmitResult | FailedAttempt:
        """Waits for the answer of the request that takes this submission."""
        loop = asyncio.get_running_loop()
        entry = _Entry(body, trace, loop.create_future())
        self._waiting.append(entry)
        if not self._requests or len(self._waiting) >= ITEMS_MAX:
            self._start_request()
        elif self._hold is None and self._starting is None:
            self._hold = loop.call_later(HOLD_S, self._start_request, context=Context())
        try:
            return _result_or_raise(await entry.answer)
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def _abandon(self, entry: _Entry) -> None:
        """Cancels the request if no caller waits for it. An entry that is not sent yet is left out by `_take`."""
        if (request := entry.request) is not None:
            request.waiting -= 1
            if not request.waiting and request.task is not None:
                request.task.cancel()

    def _start_request(self) -> None:
        """The task begins in the next iteration of the loop, so it finds all submissions of this one.

        It runs in a context of its own: it serves several callers, each with its own trace.
        """
        self._clear_hold()
        if self._starting is not None or len(self._requests) >= REQUESTS_MAX:
            return
        request = _Request()
        self._requests.add(request)
        self._starting = request
        request.task = asyncio.get_running_loop().create_task(self._run(request), name="submit", context=Context())
        request.task.add_done_callback(lambda _task: self._finish(request), context=Context())

    def _clear_hold(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    async def _run(self, request: _Request) -> None:
        self._take(request)
        if request.entries:
            await self._send(request.entries)

    def _take(self, request: _Request) -> None:
        self._clear_hold()
        self._starting = None
        size = 0
        while self._waiting and len(request.entries) < ITEMS_MAX:
            entry = self._waiting[0]
            if not entry.answer.done():
                size += len(entry.body)
                if size > BATCH_BYTES_MAX:
                    break
                entry.request = request
                request.entries.append(entry)
            self._waiting.popleft()
        request.waiting = len(request.entries)
        if self._waiting:  # more than fits
            self._start_request()

    def _finish(self, request: _Request) -> None:
        """Called when the task has ended, even if it was cancelled before it began."""
        self._requests.discard(request)
        if self._starting is request:
            self._starting = None
        for entry in request.entries:  # all are answered, unless the task was cancelled
            error = Unavailable("The request was interrupted and its outcome is unknown: submit it again.")
            _resolve(entry, FailedAttempt(error, undone=False))
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()
        if self._waiting:
            self._start_request()

    async def _send(self, entries: list[_Entry]) -> None:
        if len(entries) > 1 and asyncio.get_running_loop().time() >= self._single_until_s:
            answers = await self._send_batch(entries)
            if answers is not None:
                for entry, answer in zip(entries, answers, strict=True):
                    _resolve(entry, answer)
                return
        if len(entries) == 1:
            await self._answer_single(entries[0])
            return
        async with asyncio.TaskGroup() as tasks:
            for entry in entries:
                tasks.create_task(self._answer_single(entry))

    async def _send_batch(self, entries: list[_Entry]) -> list[_Answer] | None:
        """The answer of each; None: the batch was refused as a whole, so each must be sent alone."""
        batch = _Batch([_BatchItem(msgspec.Raw(each.body), each.trace.get("traceparent", "")) for each in entries])
        try:
            answer = await self._http.attempt("POST", "/jobs/batch", content=encode_body(batch), trace={})
            if isinstance(answer, FailedAttempt):
                return [msgspec.structs.replace(answer, error=_copied(answer.error)) for _ in entries]
            items = decode_response(SubmitBatchReply, answer, "POST", "/jobs/batch").items
        except Exception as error:  # noqa: BLE001 - each is sent alone and gets an error of its own
            if isinstance(error, RotaError) and error.facts.get("status") in _BATCH_UNKNOWN:
                self._single_until_s = asyncio.get_running_loop().time() + BATCH_REFUSED_S
            return None
        return [_answer_of_item(item) for item in items] if len(items) == len(entries) else None

    async def _answer_single(self, entry: _Entry) -> None:
        _resolve(entry, await self._send_single(entry.body, entry.trace))

    async def _send_single(self, body: bytes, trace: dict[str, str]) -> _Answer:
        try:
            answer = await self._http.attempt("POST", "/jobs", content=body, trace=trace)
            return (
                answer if isinstance(answer, FailedAttempt) else decode_response(SubmitResult, answer, "POST", "/jobs")
            )
        except Exception as error:  # noqa: BLE001 - raised in the caller's task
            return error


def _answer_of_item(item: SubmitBatchAnswer) -> _Answer:
    if item.result is not None:
        return item.result
    if item.problem is None:
        return RotaError("The server returned neither a job nor an error: use the SDK version of the server.")
    error = error_from_problem(item.problem.status, item.problem)
    if not is_transient(item.problem.status):
        return error
    return FailedAttempt(error, undone=False, pause_s=item.problem.retry_after_s)


def _result_or_raise(answer: _Answer) -> SubmitResult | FailedAttempt:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _resolve(entry: _Entry, answer: _Answer) -> None:
    if not entry.answer.done():  # the caller may have been cancelled
        entry.answer.set_result(answer)


def _copied(error: RotaError) -> RotaError:
    """Each caller raises an exception of its own, because raising adds to its traceback."""
    another = copy(error)
    another.__cause__ = error.__cause__
    return another
