"""Interface between the SDK and Rota for jobs. `rota.client.jobs` uses the API; `rota.testing` works in memory.

Every call is idempotent except `retry`; a submission without an idempotency key gets a generated one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.job_states import FrameState
from rota.model.jobs.submission import Submission

if TYPE_CHECKING:
    from rota.api.explanation import JobExplanation
    from rota.api.jobs import JobHistoryEntry, JobView
    from rota.api.logs import Stream
    from rota.model.jobs.submission import SubmitResult


class FrameResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a frame ended. A frame that succeeded without a result has none."""

    layer: int
    """Index of the layer in the job."""
    place: int
    """Index of the frame in its layer, from 0."""
    frame: int
    """Frame number."""
    attempt: int
    state: FrameState
    value: bytes | None = None
    code: str = ""
    error: str = ""
    problem: str = ""
    """Why the result cannot be read."""
    output: str = ""
    """`held`, `quarantined`: withheld by the policy; `redacted`: changed by the policy."""


class JobOutcome(NamedTuple):
    """A job, and its results if all of them are known already."""

    view: JobView
    results: Sequence[FrameResult] | None = None


class LogSource(msgspec.Struct, frozen=True, kw_only=True):
    """A stream of one attempt of one frame. Defaults: first layer and frame, last attempt."""

    stream: Stream
    frame: int | None = None
    layer: str | None = None
    attempt: int | None = None


class Transport(Protocol):
    """Belongs to the loop it was first used on."""

    http: Any
    """HTTP client for everything but jobs; the in-memory backend supports workflows only."""

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        """All or nothing; results in the order of `submissions`."""
        ...

    async def get(self, job: JobId) -> JobView:
        """Raises NotFound for an unknown or expired job."""
        ...

    async def wait_until_ended(self, job: JobId, within_s: float) -> JobView:
        """Waits for the end of the job for at most `within_s`; returns its current state."""
        ...

    async def wait_for_outcome(self, job: JobId, within_s: float) -> JobOutcome:
        """The same, with the results of a job that has ended, if they come with it."""
        ...

    def results(self, job: JobId) -> AsyncIterator[FrameResult]:
        """Ordered by layer and place."""
        ...

    async def cancel(self, job: JobId) -> bool:
        """Starts no further frames. Returns False if the job had already ended."""
        ...

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        """Submits a new job for the failed frames, or for all."""
        ...

    def read_log(self, job: JobId, source: LogSource, *, follow: bool) -> AsyncIterator[bytes]:
        """Reads the log so far; with `follow` until the frame ends."""
        ...

    def events(self, job: JobId) -> AsyncIterator[JobHistoryEntry]:
        """Past and future states, until the end of the job."""
        ...

    async def explain(self, job: JobId) -> JobExplanation: ...

    async def close(self) -> None: ...


def make_transport(url: str, key: str) -> Transport:
    """Connects to the API at `url`; if empty, discovers it as the `rota` command does."""
    scheme = url.partition("://")[0].lower() if url else "http"
    if scheme not in ("http", "https"):
        raise InvalidInput(
            f"{scheme[:20]!r} is not a supported URL scheme: pass the URL of the API, with http:// or https://."
        )
    if "@" in url:
        raise InvalidInput("The URL of the API must not contain a password: pass the key as Rota(url, key=...).")
    from rota.client.discovery import endpoint_resolver
    from rota.client.http import HttpClient
    from rota.client.jobs import HttpTransport

    return HttpTransport(HttpClient(endpoint_resolver(url, key)))
