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

from rota.engine.explain_told import Explained
from rota.engine.jobs import Job, Moment
from rota.model.errors import Unavailable
from rota.model.events import Event
from rota.model.ids import JobId
from rota.model.job import Submission, Submitted
from rota.model.lifecycle import FrameState, JobState
from rota.sdk.events import followed
from rota.sdk.transport import Result, Source
from rota.sdk.wire import Silent, Wire

PAGE: Final = 1000
LOGS_COME_S: Final = 0.6
"""What a frame wrote may be there so much later than its end."""
NIL: Final = msgspec.msgpack.encode(None)


class Several(msgspec.Struct):
    items: list[Submitted]


class Cancelled(msgspec.Struct):
    changed: bool


class Reopened(msgspec.Struct):
    job: JobId


class Outcome(msgspec.Struct, kw_only=True):
    """As `rota.engine.outcomes` tells it, with the value as it came."""

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


class Outcomes(msgspec.Struct):
    items: list[Outcome]
    next: str | None = None


class Http:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted]:
        keyed = [each if each.idempotency_key else _keyed(each) for each in submissions]
        if len(keyed) == 1:
            answers = [await self.wire.call("POST", "/jobs", Submitted, again=True, body=keyed[0])]
        else:
            answers = (await self.wire.call("POST", "/jobs/bulk", Several, again=True, body=keyed)).items
        # A job that was there before under a key of ours is the one of a reply that was lost.
        return [
            answer if given.idempotency_key else msgspec.structs.replace(answer, already=False)
            for given, answer in zip(submissions, answers, strict=True)
        ]

    async def get(self, job: JobId) -> Job:
        return await self.wire.call("GET", f"/jobs/{job}", Job, again=True)

    async def ended(self, job: JobId, within_s: float) -> Job:
        return await self.wire.waited(f"/jobs/{job}", Job, within_s, lambda found: found.state.terminal)

    async def results(self, job: JobId) -> AsyncIterator[Result]:
        after: str | None = None
        while True:
            query = {"after": after, "limit": PAGE}
            page = await self.wire.call("GET", f"/jobs/{job}/results", Outcomes, again=True, query=query)
            for each in page.items:
                yield _result(each)
            after = page.next
            if after is None:
                return

    async def cancel(self, job: JobId) -> bool:
        return (await self.wire.call("POST", f"/jobs/{job}/cancel", Cancelled, again=True)).changed

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        path, query = f"/jobs/{job}/retry", {"every_frame": every_frame}
        return (await self.wire.call("POST", path, Reopened, again=False, query=query)).job

    async def written(self, job: JobId, source: Source, *, follow: bool) -> AsyncIterator[bytes]:
        at = streak = 0
        while True:
            query = {**msgspec.structs.asdict(source), "stream": None, "at": at, "follow": follow}
            try:
                async with self.wire.stream(f"/jobs/{job}/logs/{source.stream}", query=query) as answer:
                    async for data in answer.aiter_bytes():
                        at += len(data)
                        streak = 0
                        yield data
            except Silent:
                continue
            except Unavailable:
                streak += 1
                await self.wire.pause(streak)
            else:
                if not follow:
                    return
                follow = False  # what was written last comes a moment after the end
                await asyncio.sleep(LOGS_COME_S)

    async def events(self, job: JobId) -> AsyncIterator[Moment]:
        async for told in followed(self.wire, f"/jobs/{job}/events"):
            event = msgspec.json.decode(told.data, type=Event)
            moment = Moment(JobState(event.kind.removeprefix("job.").upper()), event.at, _reason(event))
            yield moment
            if moment.state.terminal:
                return

    async def explain(self, job: JobId) -> Explained:
        return await self.wire.call("GET", f"/jobs/{job}/explain", Explained, again=True)

    async def close(self) -> None:
        await self.wire.close()


def _reason(event: Event) -> str | None:
    reason = event.facts.get("reason")
    return str(reason) if reason is not None else None


def _keyed(submission: Submission) -> Submission:
    return msgspec.structs.replace(submission, idempotency_key=f"sdk-{uuid4()}")


def _result(outcome: Outcome) -> Result:
    given: dict[str, Any] = {name: getattr(outcome, name) for name in ("place", "frame", "attempt", "state")}
    return Result(
        **given,
        layer=outcome.number,
        value=outcome.returned,
        code=outcome.code or "",
        error=outcome.error or "",
        problem=outcome.problem or "",
        output=outcome.output or "",
    )
