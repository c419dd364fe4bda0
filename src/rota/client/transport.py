"""What the SDK asks of Rota. `rota.client.jobs` asks the API; `rota.testing` plays it.

Every call may be repeated, also `submit`: what has no key of the caller's is given one of its own. Jobs, moments and
explanations are those of `rota.engine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.job_states import FrameState
from rota.model.jobs.submission import Submission

if TYPE_CHECKING:
    from rota.api.explanation import JobExplanation
    from rota.engine.queries.jobs import JobHistoryEntry, JobView
    from rota.engine.queries.logs import Stream
    from rota.model.jobs.submission import SubmitResult


class FrameResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a frame ended. One that succeeded and returned nothing has none."""

    layer: int
    """Its number in the job."""
    place: int
    """Of the frame in its layer, from 0 on."""
    frame: int
    """Its number."""
    attempt: int
    state: FrameState
    value: bytes | None = None
    code: str = ""
    error: str = ""
    problem: str = ""
    """Why what it returned cannot be told."""
    output: str = ""
    """held, quarantined: the policy keeps it back; redacted: it is not as the frame left it."""


class LogSource(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a job's logs: a stream of an attempt of a frame; those left out are the first, or the last."""

    stream: Stream
    frame: int | None = None
    layer: str | None = None
    attempt: int | None = None


class Transport(Protocol):
    """Belongs to the loop it was first used on."""

    wire: Any
    """By which all is asked that is not about jobs; a rehearsal answers for workflows alone."""

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        """All of them or none, in their order."""
        ...

    async def get(self, job: JobId) -> JobView:
        """NotFound when there is no such job, or it is not kept any more."""
        ...

    async def wait_until_ended(self, job: JobId, within_s: float) -> JobView:
        """The job once it has ended, or as it is after so long at most."""
        ...

    def results(self, job: JobId) -> AsyncIterator[FrameResult]:
        """By layer and place."""
        ...

    async def cancel(self, job: JobId) -> bool:
        """Whether it had not ended; from here on no frame of it begins."""
        ...

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        """A new job for what failed of it, or for all of it."""
        ...

    def read_log(self, job: JobId, source: LogSource, *, follow: bool) -> AsyncIterator[bytes]:
        """What there is, or with `follow` whatever comes up to the end."""
        ...

    def events(self, job: JobId) -> AsyncIterator[JobHistoryEntry]:
        """Every state it was in, and every one that it comes into, up to its end."""
        ...

    async def explain(self, job: JobId) -> JobExplanation: ...

    async def close(self) -> None: ...


def make_transport(url: str, key: str) -> Transport:
    """The API at this URL; without one it is found as the `rota` command finds it."""
    scheme = url.partition("://")[0].lower() if url else "http"
    if scheme not in ("http", "https"):
        raise InvalidInput(
            f"Rota cannot be reached by {scheme[:20]!r}: give the URL of its API, which begins with http:// or https://."
        )
    if "@" in url:
        raise InvalidInput("The URL of an API holds no password: give the key as Rota(url, key=...).")
    from rota.client.discovery import endpoint_resolver
    from rota.client.http import HttpClient
    from rota.client.jobs import HttpTransport

    return HttpTransport(HttpClient(endpoint_resolver(url, key)))
