"""The operations of the queue; docs/adr/0013-the-queue.md describes the storage.

Every method is one statement that takes effect or does not. After a lost reply (`PostgresUnavailable` with the outcome
unknown):
- ending frames again refuses those that the first call ended, so a retry is safe and the counts stay right;
- enqueueing again would queue twice: enqueue inside the transaction that records the cause, and check there;
- a claim whose reply was lost belongs to its owner until its lease ends: read `open_tokens` and give back the unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final, get_args
from uuid import UUID

import asyncpg
import msgspec

from rota.infra import failpoints
from rota.infra.lease import Lease
from rota.infra.postgres import Database, Query, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NotFound, StaleFence
from rota.queue import entries as queue_entries
from rota.queue import tokens as token_masks
from rota.queue.claims import Claim, ClaimRequest, ClaimResult
from rota.queue.counts import ClaimableLane, CounterMode, QueueCounts
from rota.queue.dead_letters import DeadLetterQueue
from rota.queue.entries import LaneBatches, LanePosition, QueueEntry
from rota.queue.failed import FailedFrames
from rota.queue.tokens import EndResult

CHANNEL: Final = "rota_queue"
"""Notified with the name of a queue when entries can be claimed from it."""

ENQUEUE = query(__package__, "enqueue")
ENQUEUE_DEFERRED = query(__package__, "enqueue_later")
CLAIM = query(__package__, "claim")
COMPLETE = query(__package__, "complete")
GIVE_BACK = query(__package__, "give_back")
PARK_REST = query(__package__, "park_rest")
UNPARK = query(__package__, "unpark")
CANCEL_RUNNING = query(__package__, "cancel_running")
CANCEL_WAITING = query(__package__, "cancel_waiting")
RETRY = query(__package__, "retry")
FAIL = query(__package__, "fail")
COUNTS_EXACT = query(__package__, "counts_exact")
COUNTS_FAST = query(__package__, "counts_fast")
CANDIDATES = query(__package__, "candidates")
COUNTS_VERSION = query(__package__, "counts_version")
HEAD_AGES = query(__package__, "heads")
LIST = query(__package__, "queue_list")
ENSURE_QUEUE = query(__package__, "queue_make")
PAUSE = query(__package__, "queue_pause")
WAKE = query(__package__, "wake")
OWNER_ADD = query(__package__, "owner_add")
OPEN_CLAIMS = query(__package__, "owner_claims")
LOOKUP_TOKENS = query(__package__, "look")
LOCK_CLAIMS = query(__package__, "claims_lock")
REBUILD = query(__package__, "rebuild")

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ENDED = metrics.counter("rota_queue_ended", "Claimed frames by how their attempt ended.", labels=("outcome",))
REFUSED = metrics.counter(
    "rota_queue_fence_rejected", "Ends that were refused because the attempt had ended before.", labels=("outcome",)
)
CLAIMED = metrics.histogram("rota_queue_claim_frames", "Frames per call that claimed any.", buckets=BATCH_SIZES)
CLOSED = metrics.histogram("rota_queue_completion_frames", "Frames per call that completes.", buckets=BATCH_SIZES)

STALE_OWNER = "RT022"
LANES_MAX: Final = 1000
CLAIMS_MAX: Final = 64
"""Claims in one call, besides one for each request."""
DELAY_MAX_S: Final = 10 * 366 * 86_400.0
FRAME_NUMBER_MAX: Final = 2**31 - 2
ERROR_TEXT_MAX: Final = 10_000


class FrameFailure(msgspec.Struct, frozen=True):
    """One attempt that failed for good; `reason` is a code, `error` is its text."""

    token: int
    reason: str
    error: str | None = None


class QueueInfo(msgspec.Struct, frozen=True):
    queue: str
    shards: int
    paused: bool
    dlq_on_fail: bool


class Queue:
    """All queues of one database. `on` runs a call inside a transaction of the caller."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.failed = FailedFrames(database)
        self.dead_letters = DeadLetterQueue(database)
        self._ensured_lanes: set[tuple[str, int]] = set()
        """Lanes known to be committed, so that no producer creates one inside a transaction that may last."""

    async def enqueue(
        self, entries: Sequence[QueueEntry], *, on: Transaction | None = None, notify: bool = True
    ) -> list[LanePosition]:
        """Queue these if and only if the transaction commits; until then its lanes are closed to other producers."""
        queue_entries.check_entries(entries)
        deferred = [entry for entry in entries if entry.run_at is not None]
        groups = LaneBatches.of(entry for entry in entries if entry.run_at is None)
        if deferred and groups.entries and on is None:
            async with self.database.transaction() as tx:
                return await self.enqueue(entries, on=tx, notify=notify)
        await self._ensure_lanes({(entry.queue, entry.priority) for entry in entries})
        target = on or self.database
        if deferred:
            await target.rows(ENQUEUE_DEFERRED, *deferred_arguments(deferred))
        if not groups.entries:
            return []
        failpoints.hit("queue.before_enqueue")
        rows = await target.rows(ENQUEUE, *groups.arguments(notify=notify))
        failpoints.after_send("queue.enqueue")
        return groups.positions((row["lane_id"], row["first_seq"]) for row in rows)

    async def register_owner(self, lease: Lease) -> int:
        """Allow the holder of this lease to claim; returns its owner id. Its claims are returned when the lease
        ends."""
        await self.database.run(OWNER_ADD, lease.fence, lease.name)
        return lease.fence

    async def claim(self, lanes: Sequence[int], want: int, owner: int) -> list[Claim]:
        """Claim up to `want` frames from these lanes, in order. Returns nothing if others hold all of them."""
        [result] = await self.claim_each([ClaimRequest(lanes, want)], owner)
        return result.claims

    async def claim_each(self, requests: Sequence[ClaimRequest], owner: int) -> list[ClaimResult]:
        """The claims of each request, made together. Lanes that others have locked are skipped.

        With `CLAIMS_MAX` claims and one for each request, there may be more for a request that got less than it wanted.
        """
        lanes = [lane for request in requests for lane in request.lanes]
        numbers = [number for number, request in enumerate(requests, start=1) for _ in request.lanes]
        for request in requests:
            queue_entries.check_count("frames to claim", request.want, token_masks.BATCH_MAX)
        queue_entries.check_count("lanes", len(lanes), LANES_MAX)
        failpoints.hit("queue.before_claim")
        try:
            rows = await self.database.rows(CLAIM, lanes, numbers, [request.want for request in requests], owner)
        except asyncpg.PostgresError as error:
            if error.sqlstate != STALE_OWNER:
                raise
            raise StaleFence(
                f"The dispatcher {owner} may not claim, because its lease has ended: register under a new lease.",
                fences=[owner],
            ) from error
        failpoints.after_send("queue.claim")
        results = [ClaimResult([]) for _ in requests]
        for row in rows:
            result = results[row["request"] - 1]
            if row["claim_id"] is None:
                result.locked = True
            else:
                result.claims.append(Claim.of(row))
        if frames := sum(result.frames for result in results):
            CLAIMED.observe(frames)
        return results

    async def open_tokens(self, owner: int) -> list[int]:
        """Open tokens of this owner. Reads all claims: use it only for dead owners or after a lost reply."""
        rows = await self.database.rows(OPEN_CLAIMS, owner)
        return sorted(token for row in rows for token in token_masks.tokens_in(row["claim_id"], row["open"]))

    async def lookup_tokens(
        self, tokens: Iterable[int], *, on: Transaction | None = None
    ) -> dict[int, tuple[int, int]]:
        """Frame and attempt of claimed tokens; pruned tokens are missing."""
        checked = token_masks.check_tokens(tokens)
        rows = await (on or self.database).rows(LOOKUP_TOKENS, *token_masks.masks_of(checked)) if checked else []
        return {row["token"]: (row["frame"], row["attempt"]) for row in rows}

    async def lock_claims(self, tokens: Iterable[int], *, on: Transaction) -> None:
        """Call it before several of the following methods in one transaction: each locks the claims of its tokens, and
        two transactions must not do so in different orders."""
        ids, _ = token_masks.masks_of(token_masks.check_tokens(tokens))
        await on.run(LOCK_CLAIMS, ids)

    async def complete(self, tokens: Iterable[int], *, on: Transaction | None = None) -> EndResult:
        failpoints.hit("queue.before_complete")
        ended = await self._end("completed", COMPLETE, tokens, on)
        failpoints.after_send("queue.complete")
        if ended.accepted:
            CLOSED.observe(ended.accepted)
        return ended

    async def give_back(self, tokens: Iterable[int], *, on: Transaction | None = None) -> EndResult:
        """Return frames to their positions, ahead of the lane. No attempt is used."""
        failpoints.hit("queue.before_give_back")
        ended = await self._end("given_back", GIVE_BACK, tokens, on, None)
        failpoints.after_send("queue.give_back")
        return ended

    async def park(
        self, tokens: Iterable[int], job: UUID, *, rest_of: Sequence[int] = (), on: Transaction | None = None
    ) -> EndResult:
        """Give back frames of a job that is at its cap; they wait for `unpark`.

        With `rest_of` the job's next entries in these lanes are parked too, so the lanes move on to other jobs.
        """
        if on is None:
            async with self.database.transaction() as tx:
                return await self.park(tokens, job, rest_of=rest_of, on=tx)
        if rest_of:
            # Lanes before claims: cancelling a job locks in this order too.
            await on.value(PARK_REST, rest_of, job)
        failpoints.hit("queue.after_rest_before_park")
        return await self._end("parked", GIVE_BACK, tokens, on, job)

    async def unpark(self, job: UUID, most: int, *, on: Transaction | None = None) -> int:
        """Unpark up to `most` frames of this job; returns how many can be claimed now."""
        queue_entries.check_count("frames", most, FRAME_NUMBER_MAX)
        return int(await (on or self.database).value(UNPARK, job, most))

    async def retry(self, tokens: Iterable[int], delay_s: float, *, on: Transaction | None = None) -> EndResult:
        """End the attempt; the next one waits for `delay_s`. Also for frames of a silent worker."""
        return await self._requeue_after("retried", tokens, delay_s, on, used=True)

    async def defer(self, tokens: Iterable[int], delay_s: float, *, on: Transaction | None = None) -> EndResult:
        """Queue the same attempt again, `delay_s` from now."""
        return await self._requeue_after("deferred", tokens, delay_s, on, used=False)

    async def fail(self, failures: Sequence[FrameFailure], *, on: Transaction | None = None) -> EndResult:
        """Fail for good: kept for the retention, or moved to the dead letters if the queue is set so."""
        by_token = {failure.token: failure for failure in failures}
        if any(not 0 < len(failure.reason) <= 100 for failure in failures):
            raise InvalidInput("The reason code of a failure is empty or too long: give 1 to 100 characters.")
        failpoints.hit("queue.before_fail")
        ended = await self._end(
            "failed",
            FAIL,
            by_token,
            on,
            list(by_token),
            [failure.reason for failure in by_token.values()],
            [failure.error and failure.error[:ERROR_TEXT_MAX].replace("\0", "") for failure in by_token.values()],
        )
        failpoints.after_send("queue.fail")
        return ended

    async def cancel_running(self, tokens: Iterable[int], *, on: Transaction | None = None) -> EndResult:
        """Refuse later reports about these tokens; the caller tells the worker to stop."""
        failpoints.hit("queue.before_cancel_running")
        return await self._end("cancelled", CANCEL_RUNNING, tokens, on)

    async def cancel_waiting(
        self,
        job: UUID,
        layer: UUID | None = None,
        frames: range = range(FRAME_NUMBER_MAX + 1),
        *,
        on: Transaction | None = None,
    ) -> int:
        """Cancel waiting, parked and deferred frames, optionally only some; returns how many.

        Frames claimed now are not among them and may be given back right after: repeat until nothing is left.
        """
        if not frames or frames.step != 1 or not 0 <= frames.start < frames.stop <= FRAME_NUMBER_MAX + 1:
            raise InvalidInput("The frames to cancel are not a valid range: give one such as range(100, 200).")
        failpoints.hit("queue.before_cancel_waiting")
        number = await (on or self.database).value(CANCEL_WAITING, job, layer, frames.start, frames.stop - 1)
        failpoints.after_send("queue.cancel_waiting")
        return int(number)

    async def counts_exact(self, queues: Sequence[str] | None = None) -> dict[str, QueueCounts]:
        """Exact in one snapshot, under any load."""
        return await self._counts(COUNTS_EXACT, queues)

    async def counts_fast(self, queues: Sequence[str] | None = None) -> dict[str, QueueCounts]:
        """As of the last fold, about a second ago."""
        return await self._counts(COUNTS_FAST, queues)

    async def candidates(self, queues: Sequence[str] | None = None) -> list[ClaimableLane]:
        """Lanes with claimable entries, highest priority first. Counted exactly; paused queues are omitted.

        Lanes of one priority are ordered by number, and priorities do not age: rotate, or order by `head_ages_s`.
        """
        rows = await self.database.rows(CANDIDATES, queues)
        return [ClaimableLane(*row.values()) for row in rows]

    async def counts_version(self) -> int | None:
        """A number that changes with the counts, and with what is parked or paused; None: unknown."""
        version: Decimal | None = await self.database.value(COUNTS_VERSION)
        return None if version is None else int(version)

    async def head_ages_s(self, lanes: Sequence[int]) -> dict[int, float]:
        """Waiting time of the next frame of each lane."""
        return {row["lane_id"]: row["age_s"] for row in await self.database.rows(HEAD_AGES, lanes)}

    async def queues(self, queues: Sequence[str] | None = None) -> list[QueueInfo]:
        return [QueueInfo(*row.values()) for row in await self.database.rows(LIST, queues)]

    async def ensure_queue(
        self,
        queue: str,
        *,
        shards: int | None = None,
        dlq_on_fail: bool | None = None,
        priorities: Sequence[int] = (queue_entries.BATCH, queue_entries.INTERACTIVE, queue_entries.CRITICAL),
    ) -> None:
        """Create a queue before its first use, or change it. Enqueueing creates a missing queue."""
        queue_entries.check_queue_name(queue)
        if shards is not None:
            queue_entries.check_count("shards", shards, 64)
        await self.database.run(ENSURE_QUEUE, queue, list(priorities), shards, dlq_on_fail)

    async def pause(self, queue: str, *, on: Transaction | None = None) -> None:
        """Stop claims from the queue; running frames continue."""
        await self._pause(queue, on, paused=True)

    async def resume(self, queue: str, *, on: Transaction | None = None) -> None:
        await self._pause(queue, on, paused=False)
        await (on or self.database).value(WAKE, queue)

    async def rebuild_counts(self, mode: CounterMode | None = None, *, on: Transaction | None = None) -> None:
        """Rebuild all counts from the rows and trust them; also changes the counter mode. Waits for writers."""
        if mode is not None and mode not in get_args(CounterMode):
            raise InvalidInput(f"{mode!r} is not a valid counter mode: use ledger or scan.")
        await (on or self.database).value(REBUILD, mode)

    async def _ensure_lanes(self, lanes: set[tuple[str, int]]) -> None:
        for queue, priority in sorted(lanes - self._ensured_lanes):
            # Not from the pool: the caller may hold its last connection.
            await self.database.rows(ENSURE_QUEUE, queue, [priority], None, None, urgent=True)
            self._ensured_lanes.add((queue, priority))

    async def _requeue_after(
        self, outcome: str, tokens: Iterable[int], delay_s: float, on: Transaction | None, *, used: bool
    ) -> EndResult:
        if not 0 <= delay_s <= DELAY_MAX_S:
            raise InvalidInput(f"{delay_s} is not a valid delay in seconds: give 0 to {DELAY_MAX_S:.0f}.")
        failpoints.hit("queue.before_retry")
        ended = await self._end(outcome, RETRY, tokens, on, delay_s, used)
        failpoints.after_send("queue.retry")
        return ended

    async def _end(
        self, outcome: str, how: Query, tokens: Iterable[int], on: Transaction | None, *more: object
    ) -> EndResult:
        checked = token_masks.check_tokens(tokens)
        if not checked:
            return EndResult(0)
        rows = await (on or self.database).rows(how, *token_masks.masks_of(checked), *more)
        refused = frozenset(token for row in rows for token in token_masks.tokens_in(row["claim_id"], row["refused"]))
        ENDED.labels(outcome).inc(len(checked) - len(refused))
        REFUSED.labels(outcome).inc(len(refused))
        return EndResult(len(checked), refused)

    async def _counts(self, how: Query, queues: Sequence[str] | None) -> dict[str, QueueCounts]:
        counted = {row["queue"]: QueueCounts.of(row) for row in await self.database.rows(how, queues)}
        if unknown := sorted(set(queues or ()).difference(counted)):
            raise unknown_queue_error(unknown[0])
        return counted

    async def _pause(self, queue: str, on: Transaction | None, *, paused: bool) -> None:
        if not await (on or self.database).run(PAUSE, queue, paused):
            raise unknown_queue_error(queue)


def deferred_arguments(entries: Sequence[QueueEntry]) -> tuple[object, ...]:
    return (
        [entry.queue for entry in entries],
        [entry.priority for entry in entries],
        [entry.run_at for entry in entries],
        *queue_entries.entry_columns(entries),
    )


def unknown_queue_error(queue: str) -> InvalidInput:
    return NotFound(f"There is no queue {queue[:64]!r}: `rota queue list` lists the existing ones.", queue=queue[:64])
