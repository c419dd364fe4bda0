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

from rota.client.transport import FrameResult, LogSource
from rota.model.errors import (
    BlobMissing,
    InvalidInput,
    JobCancelled,
    JobDenied,
    JobFailed,
    JobNotSucceeded,
    JobQuarantined,
    JobTimedOut,
    NotEnded,
    OutputHeld,
)
from rota.model.ids import JobId
from rota.model.job_states import FrameState, JobState
from rota.sdk.progress_bar import ProgressBar

if TYPE_CHECKING:
    from rota.api.explanation import JobExplanation
    from rota.engine.queries.jobs import JobHistoryEntry
    from rota.engine.queries.jobs import JobView as Told
    from rota.engine.queries.logs import Stream
    from rota.sdk.app import Rota
    from rota.sdk.sync import SyncJob

R = TypeVar("R")
ResultReader = Callable[["Told", Sequence[FrameResult]], R]
"""Makes what a job returned out of what its frames did."""

LONG_POLL_S: Final = 30.0
"""How long one question for the end of a job may take."""
PROGRESS_POLL_S: Final = 1.0
"""The same where a bar is to move."""
LOG_STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr", "log")
TRACEBACK_STREAMS: Final[tuple[Stream, ...]] = ("stderr", "log")
LOG_GRACE_S: Final = 0.6
"""A traceback may be there so much later than the end of its frame."""
LOG_POLL_INTERVAL_S: Final = 0.1
HELD_OUTPUT: Final = "held"
HELD_OUTPUT_POLL_INTERVAL_S: Final = 0.25
TRACEBACK_HEADER: Final = "Traceback (most recent call last):"

_ERRORS_BY_STATE: Final[dict[JobState, type[JobNotSucceeded]]] = {
    JobState.FAILED: JobFailed,
    JobState.TIMEOUT: JobTimedOut,
    JobState.CANCELLED: JobCancelled,
    JobState.DENIED: JobDenied,
    JobState.OUTPUT_QUARANTINED: JobQuarantined,
}


class Job(Generic[R]):
    """`await job.result()` is what its task returned; of a `map`, a list with one for each item, in their order."""

    def __init__(self, app: Rota, job: JobId, read: ResultReader[R], *, already: bool = False) -> None:
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
        return (await self._wait_until_ended(timeout)).state

    async def result(self, timeout: float | None = None) -> R:
        """What it returned. A job that did not succeed raises `JobNotSucceeded`, by how it ended.

        What is held until it was scanned is waited for as well: `OutputHeld` when that takes too long.
        """
        until = None if timeout is None else time.monotonic() + timeout
        told = await self._wait_until_ended(timeout)
        results = [result async for result in self._app.transport.results(self.id)]
        while held := next((one for one in results if one.output == HELD_OUTPUT), None):
            if until is not None and time.monotonic() >= until:
                raise OutputHeld(held.problem, job=str(self.id), frame=held.frame)
            await asyncio.sleep(HELD_OUTPUT_POLL_INTERVAL_S)
            told = await self.get()
            results = [result async for result in self._app.transport.results(self.id)]
        if told.state is not JobState.SUCCEEDED:
            raise await self._failure(told, results)
        for untold in results:
            if untold.problem:
                raise BlobMissing(
                    f"What frame {untold.frame} of job {self.id} returned cannot be told: {untold.problem}"
                )
        try:
            return self._read(told, results)
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"What job {self.id} returned is not what its task is said to return: {error}."
            ) from error

    async def cancel(self) -> bool:
        """Whether it had not ended; from here on no frame of it begins, and those that run are stopped."""
        return await self._app.transport.cancel(self.id)

    async def retry(self, *, every_frame: bool = False) -> Job[R]:
        """Another job for those of its frames that failed, or for all of them; this one stays as it ended."""
        job = await self._app.transport.retry(self.id, every_frame=every_frame)
        return Job(self._app, job, self._read)

    async def logs(
        self,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """What a frame wrote, the first one unless it is named; as it comes in up to the end of the job (`follow`)."""
        from rota.client.log_stream import merge_streams, read_in_order

        sources = [LogSource(stream=stream, frame=frame, layer=layer, attempt=attempt) for stream in LOG_STREAMS]
        written = [self._app.transport.read_log(self.id, source, follow=follow) for source in sources]
        async for text in merge_streams(written) if follow else read_in_order(written):
            yield text

    async def events(self) -> AsyncIterator[JobHistoryEntry]:
        """Every state that it was in or comes into, with when and why, up to its end."""
        async for moment in self._app.transport.events(self.id):
            yield moment

    async def explain(self) -> JobExplanation:
        """Why it is not running, with what is to be mended first at first; or what became of it."""
        return await self._app.transport.explain(self.id)

    async def _wait_until_ended(self, timeout: float | None) -> Told:
        until = None if timeout is None else time.monotonic() + timeout
        with ProgressBar() as bar:
            while True:
                look_s = PROGRESS_POLL_S if bar.is_visible else LONG_POLL_S
                left_s = look_s if until is None else min(look_s, max(0.0, until - time.monotonic()))
                told = await self._app.transport.wait_until_ended(self.id, left_s)
                bar.show(told)
                if told.state.terminal:
                    return told
                if until is not None and time.monotonic() >= until:
                    raise NotEnded(
                        f"Job {self.id} has not ended within {timeout:g} s, it is {told.state}: wait for longer, or ask"
                        " what it waits for with explain().",
                        job=str(self.id),
                    )

    async def _failure(self, told: Told, results: Sequence[FrameResult]) -> JobNotSucceeded:
        kind = _ERRORS_BY_STATE[told.state]
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

    async def _traceback(self, layer: str, failed: FrameResult) -> str:
        """As its log has it; that comes a moment after its end, if it comes at all."""
        from rota.client.log_stream import read_in_order

        for look in range(round(LOG_GRACE_S / LOG_POLL_INTERVAL_S)):
            if look:
                await asyncio.sleep(LOG_POLL_INTERVAL_S)
            for stream in TRACEBACK_STREAMS:
                source = LogSource(stream=stream, frame=failed.frame, layer=layer, attempt=failed.attempt)
                text = "".join(
                    [
                        text
                        async for text in read_in_order([self._app.transport.read_log(self.id, source, follow=False)])
                    ]
                )
                if TRACEBACK_HEADER in text:
                    return text[text.index(TRACEBACK_HEADER) :]
        return ""


def single_result_reader(decode: Callable[[bytes], R]) -> ResultReader[R]:
    """What the one frame of a job returned."""

    def read(_told: Told, results: Sequence[FrameResult]) -> Any:
        values = [result.value for result in results if result.value is not None]
        return decode(values[0]) if values else None

    return read


def list_result_reader(decode: Callable[[bytes], R]) -> ResultReader[list[R]]:
    """What each frame of the first layer returned, in their order."""

    def read(told: Told, results: Sequence[FrameResult]) -> list[Any]:
        values: list[Any] = [None] * told.layers[0].frames.count
        for result in results:
            if result.layer == 0 and result.value is not None:
                values[result.place] = decode(result.value)
        return values

    return read


def read_untyped_result(told: Told, results: Sequence[FrameResult]) -> Any:
    """Of a job nothing is known about: one value, or a list; of several layers a list of these."""
    decode = msgspec.msgpack.Decoder().decode
    values: list[list[Any]] = [[None] * layer.frames.count for layer in told.layers]
    for result in results:
        if result.value is not None:
            values[result.layer][result.place] = decode(result.value)
    maps = told.details.maps
    layers = [each[0] if len(each) == 1 and number not in maps else each for number, each in enumerate(values)]
    return layers[0] if len(layers) == 1 else layers
