"""A job that was submitted: waiting for it, what it returned, and what became of it.

Nothing is kept here but its id, so a `Job` may be made again from that in another process (`task.job(id)`,
`app.job(id)`). Waiting changes nothing; whoever stops waiting leaves the job as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from rota.model.errors import (
    InvalidInput,
    JobCancelled,
    JobDenied,
    JobFailed,
    JobNotSucceeded,
    JobQuarantined,
    JobTimedOut,
    NotEnded,
)
from rota.model.ids import JobId
from rota.model.lifecycle import FrameState, JobState
from rota.sdk.bar import Bar
from rota.sdk.transport import Result, Why

if TYPE_CHECKING:
    from rota.engine.jobs import Job as Told
    from rota.engine.jobs import Moment
    from rota.engine.logs import Piece, Stream
    from rota.sdk.app import Rota
    from rota.sdk.sync import SyncJob

R = TypeVar("R")
Read = Callable[["Told", Sequence[Result]], R]
"""Makes what a job returned out of what its frames did."""

LOOK_S: Final = 2.0
"""How long one question for the end of a job may take."""
LOGS_COME_S: Final = 0.6
"""What a frame wrote may be there so much later than its end."""
LOGS_LOOK_S: Final = 0.1
PIECES: Final = 1000
TRACEBACK: Final = "Traceback (most recent call last):"

_ENDS: Final[dict[JobState, type[JobNotSucceeded]]] = {
    JobState.FAILED: JobFailed,
    JobState.TIMEOUT: JobTimedOut,
    JobState.CANCELLED: JobCancelled,
    JobState.DENIED: JobDenied,
    JobState.OUTPUT_QUARANTINED: JobQuarantined,
}


class Job(Generic[R]):
    """`await job.result()` is what its task returned; of a `map`, a list with one for each item, in their order."""

    def __init__(self, app: Rota, job: JobId, read: Read[R], *, already: bool = False) -> None:
        self.id = job
        self.already = already
        """Whether it was there before, under the same key."""
        self._app = app
        self._read = read

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def sync(self) -> SyncJob[R]:
        """The same, for code without an event loop."""
        from rota.sdk.sync import SyncJob

        return SyncJob(self)

    async def get(self) -> Told:
        """All that is known of it."""
        return await self._app.transport.get(self.id)

    async def state(self) -> JobState:
        return (await self.get()).state

    async def wait(self, timeout: float | None = None) -> JobState:
        """The state in which it ended; `NotEnded` when that takes longer than so many seconds.

        Where a person looks, a bar on standard error shows how far it is.
        """
        return (await self._ended(timeout)).state

    async def result(self, timeout: float | None = None) -> R:
        """What it returned. A job that did not succeed raises `JobNotSucceeded`, by how it ended."""
        told = await self._ended(timeout)
        results = [result async for result in self._app.transport.results(self.id)]
        if told.state is not JobState.SUCCEEDED:
            raise await self._failure(told, results)
        try:
            return self._read(told, results)
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"What job {self.id} returned is not what its task is said to return: {error}."
            ) from error

    async def cancel(self) -> bool:
        """Whether it had not ended; from here on no frame of it begins, and those that run are stopped."""
        return await self._app.transport.cancel(self.id)

    async def logs(
        self,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """What a frame wrote, the first one unless it is named; as it comes in up to the end of the job (`follow`)."""
        from rota.engine.logs import STREAMS

        places = dict.fromkeys(STREAMS, 0)
        ended_at: float | None = None
        while True:
            ended = not follow or (await self.state()).terminal
            fresh = False
            for stream in STREAMS:
                for piece in await self._pieces(frame, layer, attempt, stream, places[stream]):
                    fresh = True
                    places[stream] = piece.at + len(piece.data)
                    yield piece.data.decode(errors="replace")
            ended_at = ended_at or (time.monotonic() if ended else None)
            if not fresh:
                if ended_at is not None and (not follow or time.monotonic() - ended_at > LOGS_COME_S):
                    return
                await asyncio.sleep(LOGS_LOOK_S)

    def events(self) -> AsyncIterator[Moment]:
        """Every state that it was in or comes into, with when and why, up to its end."""
        return self._app.transport.events(self.id)

    async def explain(self) -> Sequence[Why]:
        """What keeps it from running, the first to be mended first."""
        return await self._app.transport.explain(self.id)

    async def _ended(self, timeout: float | None) -> Told:
        until = None if timeout is None else time.monotonic() + timeout
        with Bar() as bar:
            while True:
                left_s = LOOK_S if until is None else min(LOOK_S, max(0.0, until - time.monotonic()))
                told = await self._app.transport.ended(self.id, left_s)
                bar.show(told)
                if told.state.terminal:
                    return told
                if until is not None and time.monotonic() >= until:
                    raise NotEnded(
                        f"Job {self.id} has not ended within {timeout:g} s, it is {told.state}: wait for longer, or ask"
                        " what it waits for with explain().",
                        job=str(self.id),
                    )

    async def _failure(self, told: Told, results: Sequence[Result]) -> JobNotSucceeded:
        kind = _ENDS[told.state]
        failed = next((one for one in results if one.state.value == told.state.value), None)
        if failed is None:
            failed = next((one for one in results if one.state is not FrameState.SUCCEEDED), None)
        reason = told.reason or ""
        if failed is None:
            return kind(
                f"Job {self.id} ended as {told.state}{f' ({reason})' if reason else ''}.", job=self.id, reason=reason
            )
        layer = told.layers[failed.layer].name
        error = failed.error or "it gave no reason"
        return kind(
            f"Job {self.id} ended as {told.state}: frame {failed.frame} of {layer}, {failed.code or reason}: {error}",
            job=self.id,
            reason=failed.code or reason,
            layer=layer,
            frame=failed.frame,
            attempt=failed.attempt,
            error=failed.error,
            traceback=await self._traceback(layer, failed) if failed.code == "exception" else "",
        )

    async def _traceback(self, layer: str, failed: Result) -> str:
        """As its log has it; that comes a moment after its end, if it comes at all."""
        streams: tuple[Stream, ...] = ("stderr", "log")
        for look in range(round(LOGS_COME_S / LOGS_LOOK_S)):
            if look:
                await asyncio.sleep(LOGS_LOOK_S)
            for stream in streams:
                pieces = await self._pieces(failed.frame, layer, failed.attempt, stream, 0)
                text = b"".join(piece.data for piece in pieces).decode(errors="replace")
                if TRACEBACK in text:
                    return text[text.index(TRACEBACK) :]
        return ""

    async def _pieces(
        self, frame: int | None, layer: str | None, attempt: int | None, stream: Stream, after: int
    ) -> list[Piece]:
        told = await self._app.transport.logs(
            self.id, frame, layer=layer, attempt=attempt, stream=stream, after=after, most=PIECES
        )
        return [piece for piece in told if piece.data]


def single(decode: Callable[[bytes], R]) -> Read[R]:
    """What the one frame of a job returned."""

    def read(_told: Told, results: Sequence[Result]) -> Any:
        values = [result.value for result in results if result.value is not None]
        return decode(values[0]) if values else None

    return read


def listed(decode: Callable[[bytes], R]) -> Read[list[R]]:
    """What each frame of the first layer returned, in their order."""

    def read(told: Told, results: Sequence[Result]) -> list[Any]:
        values: list[Any] = [None] * told.layers[0].frames.count
        for result in results:
            if result.layer == 0 and result.value is not None:
                values[result.place] = decode(result.value)
        return values

    return read


def untyped(told: Told, results: Sequence[Result]) -> Any:
    """Of a job nothing is known about: one value, or a list; of several layers a list of these."""
    decode = msgspec.msgpack.Decoder().decode
    values: list[list[Any]] = [[None] * layer.frames.count for layer in told.layers]
    for result in results:
        if result.value is not None:
            values[result.layer][result.place] = decode(result.value)
    maps = told.details.maps
    layers = [each[0] if len(each) == 1 and number not in maps else each for number, each in enumerate(values)]
    return layers[0] if len(layers) == 1 else layers
