"""A handle of a submitted job: wait for it, read its result, logs and history.

It holds only the id, so another process can recreate it (`task.job(id)`, `app.job(id)`). Waiting has no effect on the
job, nor has a wait that is interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from rota.client.transport import FrameResult, JobOutcome, LogSource
from rota.model.errors import (
    BlobMissing,
    FrameFailure,
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
    from rota.api.jobs import JobHistoryEntry, JobView
    from rota.api.logs import Stream
    from rota.sdk.app import Rota
    from rota.sdk.sync import SyncJob

R = TypeVar("R")
ResultReader = Callable[["JobView", Sequence[FrameResult]], R]
"""Builds the result of a job from the results of its frames."""

LONG_POLL_S: Final = 30.0
"""Duration of one long poll."""
PROGRESS_POLL_S: Final = 1.0
"""The same while a progress bar is shown."""
LOG_STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr", "log")
TRACEBACK_STREAMS: Final[tuple[Stream, ...]] = ("stderr", "log")
LOG_GRACE_S: Final = 0.6
"""A traceback may arrive this much later than its frame's end."""
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
    """`await job.result()` returns the task's result; for `map`, a list in the order of the items."""

    def __init__(self, app: Rota, job: JobId, read: ResultReader[R], *, already: bool = False) -> None:
        self.id = job
        self.already = already
        """Whether the job existed before, under the same idempotency key."""
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
        """The blocking facade, for code without an event loop."""
        from rota.sdk.sync import SyncJob

        return SyncJob(self)

    async def get(self) -> JobView:
        """The full record of the job."""
        return await self._app.transport.get(self.id)

    async def state(self) -> JobState:
        return (await self.get()).state

    async def wait(self, timeout: float | None = None) -> JobState:
        """Waits for the end and returns the final state; raises `NotEnded` after `timeout` seconds.

        On a terminal, a progress bar is shown on standard error.
        """
        return (await self._wait(timeout, self._ended)).view.state

    async def result(self, timeout: float | None = None) -> R:
        """Waits for the result. Raises a subclass of `JobNotSucceeded` if the job did not succeed.

        Also waits for output held for scanning; raises `OutputHeld` after `timeout`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        view, found = await self._wait(timeout, partial(self._app.transport.wait_for_outcome, self.id))
        results = found if found is not None else await self._results()
        while held := next((result for result in results if result.output == HELD_OUTPUT), None):
            if until is not None and time.monotonic() >= until:
                raise OutputHeld(held.problem, job=str(self.id), frame=held.frame)
            await asyncio.sleep(HELD_OUTPUT_POLL_INTERVAL_S)
            view, results = await self.get(), await self._results()
        if view.state is not JobState.SUCCEEDED:
            raise await self._failure(view, results)
        for unreadable in results:
            if unreadable.problem:
                raise BlobMissing(
                    f"The result of frame {unreadable.frame} of job {self.id} cannot be read: {unreadable.problem}"
                )
        try:
            return self._read(view, results)
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"The result of job {self.id} does not match the return type of its task: {error}."
            ) from error

    async def cancel(self) -> bool:
        """Stops running frames and starts no further ones. Returns False if the job had already ended."""
        return await self._app.transport.cancel(self.id)

    async def retry(self, *, every_frame: bool = False) -> Job[R]:
        """Submits a new job for the failed frames, or for all; this job does not change."""
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
        """The log of a frame (default: the first); with `follow`, as it arrives until the job ends."""
        from rota.client.log_stream import merge_streams, read_in_order

        sources = [LogSource(stream=stream, frame=frame, layer=layer, attempt=attempt) for stream in LOG_STREAMS]
        written = [self._app.transport.read_log(self.id, source, follow=follow) for source in sources]
        async for text in merge_streams(written) if follow else read_in_order(written):
            yield text

    async def events(self) -> AsyncIterator[JobHistoryEntry]:
        """Past and future states, with time and reason, until the job ends."""
        async for entry in self._app.transport.events(self.id):
            yield entry

    async def explain(self) -> JobExplanation:
        """Why the job is not running, most important cause first; or how it ended."""
        return await self._app.transport.explain(self.id)

    async def _results(self) -> list[FrameResult]:
        return [result async for result in self._app.transport.results(self.id)]

    async def _ended(self, within_s: float) -> JobOutcome:
        return JobOutcome(await self._app.transport.wait_until_ended(self.id, within_s))

    async def _wait(self, timeout: float | None, poll: Callable[[float], Awaitable[JobOutcome]]) -> JobOutcome:
        """Polls until the job has ended; each poll waits for so many seconds at most."""
        until = None if timeout is None else time.monotonic() + timeout
        with ProgressBar() as bar:
            while True:
                poll_s = PROGRESS_POLL_S if bar.is_visible else LONG_POLL_S
                wait_s = poll_s if until is None else min(poll_s, max(0.0, until - time.monotonic()))
                outcome = await poll(wait_s)
                view = outcome.view
                bar.show(view)
                if view.state.terminal:
                    return outcome
                if until is not None and time.monotonic() >= until:
                    raise NotEnded(
                        f"Job {self.id} has not ended within {timeout:g} s, it is {view.state}: wait longer, or call"
                        " explain() to see why.",
                        job=str(self.id),
                    )

    async def _failure(self, view: JobView, results: Sequence[FrameResult]) -> JobNotSucceeded:
        kind = _ERRORS_BY_STATE[view.state]
        failed = next((result for result in results if result.state.value == view.state.value), None)
        if failed is None:
            failed = next((result for result in results if result.state is not FrameState.SUCCEEDED), None)
        reason = view.reason or ""
        if failed is None:
            return kind(
                f"Job {self.id} ended as {view.state}{f' ({reason})' if reason else ''}.", job=self.id, reason=reason
            )
        layer = view.layers[failed.layer].name
        error = failed.error or "it gave no reason"
        return kind(
            f"Job {self.id} ended as {view.state}: frame {failed.frame} of {layer}, {failed.code or reason}: {error}",
            job=self.id,
            reason=failed.code or reason,
            failed=FrameFailure(
                layer=layer,
                frame=failed.frame,
                attempt=failed.attempt,
                error=failed.error,
                traceback=await self._traceback(layer, failed) if failed.code == "exception" else "",
            ),
        )

    async def _traceback(self, layer: str, failed: FrameResult) -> str:
        """From the frame's log, which may arrive shortly after its end; empty if there is none."""
        from rota.client.log_stream import read_in_order

        for poll in range(round(LOG_GRACE_S / LOG_POLL_INTERVAL_S)):
            if poll:
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
    """Reads the result of a job with one frame."""

    def read(_view: JobView, results: Sequence[FrameResult]) -> Any:
        values = [result.value for result in results if result.value is not None]
        return decode(values[0]) if values else None

    return read


def list_result_reader(decode: Callable[[bytes], R]) -> ResultReader[list[R]]:
    """Reads the results of the first layer's frames, in order."""

    def read(view: JobView, results: Sequence[FrameResult]) -> list[Any]:
        values: list[Any] = [None] * view.layers[0].frames.count
        for result in results:
            if result.layer == 0 and result.value is not None:
                values[result.place] = decode(result.value)
        return values

    return read


def read_untyped_result(view: JobView, results: Sequence[FrameResult]) -> Any:
    """Reads a job without type information: one value or a list; a list of these for several layers."""
    decode = msgspec.msgpack.Decoder().decode
    values: list[list[Any]] = [[None] * layer.frames.count for layer in view.layers]
    for result in results:
        if result.value is not None:
            values[result.layer][result.place] = decode(result.value)
    maps = view.details.maps
    layers = [each[0] if len(each) == 1 and number not in maps else each for number, each in enumerate(values)]
    return layers[0] if len(layers) == 1 else layers
