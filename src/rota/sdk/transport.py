"""What the SDK asks of Rota, however it is reached. `rota.sdk.direct` asks PostgreSQL itself; `rota.testing` plays it.

Every call may be repeated but `submit` of what has no key: whether that was carried out when its reply was lost nobody
can say. Jobs, moments and pieces of logs are those of `rota.engine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from rota.model.errors import InvalidInput
from rota.model.ids import JobId
from rota.model.job import Submission
from rota.model.lifecycle import FrameState

if TYPE_CHECKING:
    from rota.engine.jobs import Job, Moment
    from rota.engine.logs import Piece, Stream
    from rota.engine.submit_steps import Submitted


class Result(msgspec.Struct, frozen=True, kw_only=True):
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


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a job from running."""

    code: str
    sentence: str
    remedy: str = ""
    layer: str | None = None
    facts: Mapping[str, object] = {}


class Transport(Protocol):
    """Belongs to the loop it was first used on."""

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted]:
        """All of them or none, in their order."""
        ...

    async def get(self, job: JobId) -> Job:
        """InvalidInput when there is no such job, or it is not kept any more."""
        ...

    async def ended(self, job: JobId, within_s: float) -> Job:
        """The job once it has ended, or as it is after so long; a short while at most."""
        ...

    def results(self, job: JobId) -> AsyncIterator[Result]:
        """By layer and place."""
        ...

    async def cancel(self, job: JobId) -> bool:
        """Whether it had not ended; from here on no frame of it begins."""
        ...

    async def logs(
        self,
        job: JobId,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        stream: Stream | None = None,
        after: int = 0,
        most: int = 100,
    ) -> Sequence[Piece]:
        """As `rota.engine.logs.Logs.read`."""
        ...

    def events(self, job: JobId) -> AsyncIterator[Moment]:
        """Every state it was in, and every one that it comes into, up to its end."""
        ...

    async def explain(self, job: JobId) -> Sequence[Why]:
        """What keeps it from running, the first to be mended first; nothing when nothing does."""
        ...

    async def close(self) -> None: ...


def chosen(url: str, actor: str) -> Transport:
    """By the scheme of the URL; without one PostgreSQL is found as the `rota` command finds it."""
    scheme = url.partition("://")[0].lower() if url else ""
    if scheme not in ("", "postgres", "postgresql"):
        raise InvalidInput(f"Rota cannot be reached by {scheme[:20]!r}: give a URL that begins with postgresql://.")
    from rota.sdk.direct import Direct

    return Direct(url, actor=actor)
