"""`Transport` over the HTTP API.

A submission whose reply is lost is retried under the same idempotency key, so it never creates two jobs. Single
submissions that are made at the same time share a request (`rota.client.coalescer`). Waiting uses long polls. Log and
event streams resume where they were after a disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec

from rota.api.explanation import JobExplanation
from rota.api.jobs import CancelJobReply, JobHistoryEntry, JobView
from rota.api.logs import LogBytes
from rota.api.submission import BulkSubmitReply
from rota.client.coalescer import SubmissionCoalescer
from rota.client.events import follow_events
from rota.client.http import HttpClient, StreamIdle
from rota.client.transport import FrameResult, JobOutcome, LogSource
from rota.model.errors import RotaError, Unavailable
from rota.model.events import Event
from rota.model.ids import JobId
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.submission import ResubmitResult, Submission, SubmitResult

RESULTS_PAGE_SIZE: Final = 1000
LOG_GRACE_S: Final = 0.6
"""The last log output may arrive this much later than the frame's end."""
ROUTE_UNKNOWN: Final = frozenset({404, 405})
"""Statuses of a server without the route."""
ROUTE_UNKNOWN_S: Final = 60.0
"""So long it is not asked again."""
NIL: Final = msgspec.msgpack.encode(None)
_LOG_LINE: Final = msgspec.json.Decoder(LogBytes)


class FrameResultItem(msgspec.Struct, kw_only=True):
    """As returned by `rota.engine.queries.results`, with an undecoded value."""

    number: int
    place: int
    frame: int
    attempt: int
    state: FrameState
    value: msgspec.Raw = msgspec.Raw(NIL)
    raw: bytes | None = None
    code: str | None = None
    error: str | None = None
    problem: str | None = None
    output: str | None = None

    @property
    def returned(self) -> bytes | None:
        value = bytes(self.value)
        return self.raw if self.raw is not None else None if value == NIL else value


class FrameResultPage(msgspec.Struct):
    items: list[FrameResultItem]
    next: str | None = None


class OutcomeReply(msgspec.Struct):
    job: JobView
    results: FrameResultPage | None = None


class HttpTransport:
    def __init__(self, http: HttpClient) -> None:
        self.http = http
        self._coalescer = SubmissionCoalescer(http)
        self._keyed_until_s = 0.0
        """By the clock of the loop: the server has no route for a key of a bulk."""
        self._no_outcomes_until_s = 0.0
        """The same: it has no route for outcomes."""

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        if len(submissions) > 1 and not any(each.idempotency_key for each in submissions):
            answers = await self._submit_bulk(submissions)
        elif len(submissions) > 1:
            answers = await self._submit_keyed(submissions)
        else:
            answers = [await self._coalescer.submit(_keyed(each)) for each in submissions]
        # An existing job under a generated key is the result of an attempt whose reply was lost.
        return [
            answer if submission.idempotency_key else msgspec.structs.replace(answer, already=False)
            for submission, answer in zip(submissions, answers, strict=True)
        ]

    async def _submit_bulk(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        """Under one key for all: a key for each would cost the servers a row and an index entry for each."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._keyed_until_s:
            try:
                path = f"/jobs/bulk/{uuid4().hex}"
                return (await self.http.call("PUT", path, BulkSubmitReply, idempotent=True, body=submissions)).items
            except RotaError as error:
                if error.facts.get("status") not in ROUTE_UNKNOWN:
                    raise
            # Nothing was written. If the other route accepts them, it is the route that this server does not have.
            answers = await self._submit_keyed(submissions)
            self._keyed_until_s = loop.time() + ROUTE_UNKNOWN_S
            return answers
        return await self._submit_keyed(submissions)

    async def _submit_keyed(self, submissions: Sequence[Submission]) -> list[SubmitResult]:
        keyed = [_keyed(each) for each in submissions]
        return (await self.http.call("POST", "/jobs/bulk", BulkSubmitReply, idempotent=True, body=keyed)).items

    async def get(self, job: JobId) -> JobView:
        return await self.http.call("GET", f"/jobs/{job}", JobView, idempotent=True)

    async def wait_until_ended(self, job: JobId, within_s: float) -> JobView:
        return await self.http.long_poll(f"/jobs/{job}", JobView, within_s, lambda found: found.state.terminal)

    async def wait_for_outcome(self, job: JobId, within_s: float) -> JobOutcome:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._no_outcomes_until_s:
            try:
                return await self._outcome(job, within_s)
            except RotaError as error:
                if error.facts.get("status") not in ROUTE_UNKNOWN:
                    raise
            # If the job exists, it is the route that this server does not have.
            view = await self.wait_until_ended(job, within_s)
            self._no_outcomes_until_s = loop.time() + ROUTE_UNKNOWN_S
            return JobOutcome(view)
        return JobOutcome(await self.wait_until_ended(job, within_s))

    async def _outcome(self, job: JobId, within_s: float) -> JobOutcome:
        reply = await self.http.long_poll(
            f"/jobs/{job}/outcome", OutcomeReply, within_s, lambda found: found.job.state.terminal
        )
        if reply.results is None or reply.results.next is not None:
            return JobOutcome(reply.job)
        return JobOutcome(reply.job, [_to_frame_result(each) for each in reply.results.items])

    async def results(self, job: JobId) -> AsyncIterator[FrameResult]:
        after: str | None = None
        while True:
            query = {"after": after, "limit": RESULTS_PAGE_SIZE}
            page = await self.http.call("GET", f"/jobs/{job}/results", FrameResultPage, idempotent=True, query=query)
            for each in page.items:
                yield _to_frame_result(each)
            after = page.next
            if after is None:
                return

    async def cancel(self, job: JobId) -> bool:
        return (await self.http.call("POST", f"/jobs/{job}/cancel", CancelJobReply, idempotent=True)).changed

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        path, query = f"/jobs/{job}/retry", {"every_frame": every_frame}
        return (await self.http.call("POST", path, ResubmitResult, idempotent=False, query=query)).job

    async def read_log(self, job: JobId, source: LogSource, *, follow: bool) -> AsyncIterator[bytes]:
        at, streak = 0, 0
        attempt: int | None = None
        while True:
            query = {
                **msgspec.structs.asdict(source),
                "stream": None,
                "at": at,
                "at_attempt": attempt,
                "follow": follow,
            }
            try:
                async with self.http.stream(f"/jobs/{job}/logs/{source.stream}/chunks", query=query) as answer:
                    async for line in answer.lines():
                        chunk = _LOG_LINE.decode(line)
                        # Offsets count bytes that are missing, too: resuming at the number of bytes read repeats some.
                        at, attempt = chunk.at + len(chunk.data), chunk.attempt
                        streak = 0
                        if chunk.data:
                            yield chunk.data
            except StreamIdle:
                continue
            except Unavailable:
                streak += 1
                await self.http.pause(streak)
            else:
                if not follow:
                    return
                follow = False  # the last output arrives shortly after the end
                await asyncio.sleep(LOG_GRACE_S)

    async def events(self, job: JobId) -> AsyncIterator[JobHistoryEntry]:
        async for message in follow_events(self.http, f"/jobs/{job}/events"):
            event = msgspec.json.decode(message.data, type=Event)
            entry = JobHistoryEntry(JobState(event.kind.removeprefix("job.").upper()), event.at, _reason(event))
            yield entry
            if entry.state.terminal:
                return

    async def explain(self, job: JobId) -> JobExplanation:
        return await self.http.call("GET", f"/jobs/{job}/explain", JobExplanation, idempotent=True)

    async def close(self) -> None:
        await self.http.close()


def _reason(event: Event) -> str | None:
    reason = event.facts.get("reason")
    return str(reason) if reason is not None else None


def _keyed(submission: Submission) -> Submission:
    """With its own idempotency key, or a new one."""
    if submission.idempotency_key:
        return submission
    return msgspec.structs.replace(submission, idempotency_key=f"sdk-{uuid4()}")


def _to_frame_result(outcome: FrameResultItem) -> FrameResult:
    fields: dict[str, Any] = {name: getattr(outcome, name) for name in ("place", "frame", "attempt", "state")}
    return FrameResult(
        **fields,
        layer=outcome.number,
        value=outcome.returned,
        code=outcome.code or "",
        error=outcome.error or "",
        problem=outcome.problem or "",
        output=outcome.output or "",
    )
