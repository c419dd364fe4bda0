"""One interface for the entries of `rota dlq`: dead letters and failed frames, and the actions that each supports."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rota.api.admin import DeadLetter
from rota.cli.local.up import with_local_store
from rota.cli.quota.actions import current_actor
from rota.infra.postgres import Transaction
from rota.model.errors import InvalidInput, NotFound
from rota.model.jobs.submission import ResubmitResult
from rota.model.settings import Settings
from rota.queue import DeadLetterFilter, FailedFilter, FailedFrame, Queue
from rota.runtime import build_resubmitter


class DlqActionResult(msgspec.Struct, frozen=True):
    """Ids of the removed entries, and the jobs that run them again."""

    gone: Sequence[int] = ()
    jobs: Sequence[ResubmitResult] = ()


class DeadLetterGroup:
    """Dead letters that match `which`."""

    noun = "dead letter"

    def __init__(self, settings: Settings, queue: Queue, which: DeadLetterFilter) -> None:
        self._dead_letters = queue.dead_letters
        self._resubmitter = build_resubmitter(with_local_store(settings), queue)
        self._which = which
        self.named = which.ids or ()

    async def count(self) -> int:
        return await self._dead_letters.count(self._which)

    async def find(self, after: int, most: int) -> Sequence[DeadLetter]:
        return await self._dead_letters.find(self._which, after=after, most=most)

    async def remove(self, act: str, most: int, tx: Transaction) -> DlqActionResult:
        match act:
            case "retry":
                retried = await self._resubmitter.retry_dead_letters(self._which, most=most, by=current_actor(), on=tx)
                return DlqActionResult(retried.gone, retried.jobs)
            case "purge":
                return DlqActionResult(await self._dead_letters.purge(self._which, most=most, on=tx))
        raise AssertionError(act)

    async def missing_error(self) -> InvalidInput:
        """Why the first of the named ids cannot be used: it does not exist or does not match."""
        matching = {entry.id for entry in await self.find(0, len(self.named))}
        one = next((each for each in self.named if each not in matching), self.named[0])
        for entry in await self._dead_letters.find(DeadLetterFilter(ids=[one]), most=1):
            if entry.kind != self._which.kind == "frame":
                why = f"is of kind {entry.kind}, and only frames can be retried here"
            else:
                why = "does not match the other filters"
            return InvalidInput(f"Dead letter {one} {why}: nothing was changed.", id=one)
        return NotFound(f"There is no dead letter {one}: see `rota dlq list`.", id=one)


class FailedFrameGroup:
    """Failed frames within their retention that match `which`."""

    noun = "failed frame"

    def __init__(self, settings: Settings, queue: Queue, which: FailedFilter) -> None:
        self._failed = queue.failed
        self._resubmitter = build_resubmitter(with_local_store(settings), queue)
        self._which = which
        self.named = which.tokens or ()

    async def count(self) -> int:
        return await self._failed.count(self._which)

    async def find(self, after: int, most: int) -> Sequence[FailedFrame]:
        return await self._failed.find(self._which, after=after, most=most)

    async def remove(self, act: str, most: int, tx: Transaction) -> DlqActionResult:
        match act:
            case "retry":
                retried = await self._resubmitter.retry_failed(self._which, most=most, by=current_actor(), on=tx)
                return DlqActionResult(retried.gone, retried.jobs)
            case "move":
                return DlqActionResult(await self._failed.move_to_dead_letters(self._which, most=most, on=tx))
            case "discard":
                return DlqActionResult(await self._failed.discard(self._which, most=most, on=tx))
        raise AssertionError(act)

    async def missing_error(self) -> InvalidInput:
        matching = {frame.token for frame in await self.find(-1, len(self.named))}
        one = next((each for each in self.named if each not in matching), self.named[0])
        if await self._failed.count(FailedFilter(tokens=[one])):
            why = f"Failed frame {one} does not match the other filters: nothing was changed."
        else:
            why = f"{one} is not a failed frame: see `rota dlq list --failed`."
        return InvalidInput(why, id=one)


EntryGroup = DeadLetterGroup | FailedFrameGroup


def group_for(settings: Settings, queue: Queue, which: DeadLetterFilter | FailedFilter) -> EntryGroup:
    if isinstance(which, FailedFilter):
        return FailedFrameGroup(settings, queue, which)
    return DeadLetterGroup(settings, queue, which)
