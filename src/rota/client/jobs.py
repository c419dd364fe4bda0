"""Rota by its HTTP API.

A submission whose reply is lost is sent again under the same key, so it never becomes two jobs. Waiting is a question
that the server keeps open until the job has ended, or for a while. What is followed goes on where it was after the
connection was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec

from rota.api.explanation import JobExplanation
from rota.client.events import follow_events
from rota.client.http import HttpClient, StreamIdle
from rota.client.transport import FrameResult, LogSource
from rota.engine.queries.jobs import JobHistoryEntry, JobView
from rota.model.errors import Unavailable
from rota.model.events import Event
from rota.model.ids import JobId
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.submission import Submission, SubmitResult

RESULTS_PAGE_SIZE: Final = 1000
LOG_GRACE_S: Final = 0.6
"""What a frame wrote may be there so much later than its end."""
NIL: Final = msgspec.msgpack.encode(None)


class BulkSubmitReply(msgspec.Struct):
    items: list[SubmitResult]


class CancelReply(msgspec.Struct):
    changed: bool


class RetryReply(msgspec.Struct):
    job: JobId


class FrameResultItem(msgspec.Struct, kw_only=True):
    """As `rota.engine.queries.results` tells it, with the value as it came."""

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


class HttpTransport:
    def __init__(self, wire: HttpClient) -> None:
        self.wire = wire

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        keyed = [each if each.idempotency_key else _with_idempotency_key(each) for each in submissions]
        if len(keyed) == 1:
            answers = [await self.wire.call("POST", "/jobs", SubmitResult, again=True, body=keyed[0])]
        else:
            answers = (await self.wire.call("POST", "/jobs/bulk", BulkSubmitReply, again=True, body=keyed)).items
        # A job that was there before under a key of ours is the one of a reply that was lost.
        return [
            answer if given.idempotency_key else msgspec.structs.replace(answer, already=False)
            for given, answer in zip(submissions, answers, strict=True)
        ]

    async def get(self, job: JobId) -> JobView:
        return await self.wire.call("GET", f"/jobs/{job}", JobView, again=True)

    async def wait_until_ended(self, job: JobId, within_s: float) -> JobView:
        return await self.wire.long_poll(f"/jobs/{job}", JobView, within_s, lambda found: found.state.terminal)

    async def results(self, job: JobId) -> AsyncIterator[FrameResult]:
        after: str | None = None
        while True:
            query = {"after": after, "limit": RESULTS_PAGE_SIZE}
            page = await self.wire.call("GET", f"/jobs/{job}/results", FrameResultPage, again=True, query=query)
            for each in page.items:
                yield _to_frame_result(each)
            after = page.next
            if after is None:
                return

    async def cancel(self, job: JobId) -> bool:
        return (await self.wire.call("POST", f"/jobs/{job}/cancel", CancelReply, again=True)).changed

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        path, query = f"/jobs/{job}/retry", {"every_frame": every_frame}
        return (await self.wire.call("POST", path, RetryReply, again=False, query=query)).job

    async def read_log(self, job: JobId, source: LogSource, *, follow: bool) -> AsyncIterator[bytes]:
        at = streak = 0
        while True:
            query = {**msgspec.structs.asdict(source), "stream": None, "at": at, "follow": follow}
            try:
                async with self.wire.stream(f"/jobs/{job}/logs/{source.stream}", query=query) as answer:
                    async for data in answer.aiter_bytes():
                        at += len(data)
                        streak = 0
                        yield data
            except StreamIdle:
                continue
            except Unavailable:
                streak += 1
                await self.wire.pause(streak)
            else:
                if not follow:
                    return
                follow = False  # what was written last comes a moment after the end
                await asyncio.sleep(LOG_GRACE_S)

    async def events(self, job: JobId) -> AsyncIterator[JobHistoryEntry]:
        async for told in follow_events(self.wire, f"/jobs/{job}/events"):
            event = msgspec.json.decode(told.data, type=Event)
            moment = JobHistoryEntry(JobState(event.kind.removeprefix("job.").upper()), event.at, _reason(event))
            yield moment
            if moment.state.terminal:
                return

    async def explain(self, job: JobId) -> JobExplanation:
        return await self.wire.call("GET", f"/jobs/{job}/explain", JobExplanation, again=True)

    async def close(self) -> None:
        await self.wire.close()


def _reason(event: Event) -> str | None:
    reason = event.facts.get("reason")
    return str(reason) if reason is not None else None


def _with_idempotency_key(submission: Submission) -> Submission:
    return msgspec.structs.replace(submission, idempotency_key=f"sdk-{uuid4()}")


def _to_frame_result(outcome: FrameResultItem) -> FrameResult:
    given: dict[str, Any] = {name: getattr(outcome, name) for name in ("place", "frame", "attempt", "state")}
    return FrameResult(
        **given,
        layer=outcome.number,
        value=outcome.returned,
        code=outcome.code or "",
        error=outcome.error or "",
        problem=outcome.problem or "",
        output=outcome.output or "",
    )
