"""Dispatch loop: claim, place, book, assign. Every replica dispatches, each for the workers it owns.

A round handles a batch of one pending queue (frames with equal requirements), or of several small ones of a show: it
reserves capacity on workers, claims that many frames, books them in one call and sends each worker one message. Several
rounds run concurrently, with one claim per queue. `rounds` decides what a round takes, `ordering` in which order.

Crashes, pauses and lost replies:
- reserved, not claimed: the reservation is in memory only and dies with the process;
- claimed, not booked: the claim belongs to our lease. We return it when we know that it was not booked. If we die,
  queue maintenance returns it after lease expiry, once it has tombstoned the tokens (nothing can book them later);
- claim reply lost: we list the claims of our owner id and return those that no round knows;
- booked, reply lost: booking the same tokens again returns what is booked. Tokens that are not booked then are
  tombstoned before their frames are given back, because PostgreSQL may still be working on the first attempt;
- booked, not sent, or the message lost: the proc row exists but the worker does not list the frame; recovery finds it
  (`rota.engine.recovery.reconciler`) and requeues the frame. If the message was stored after all, it starts a stale
  attempt: its report is refused and the worker is instructed to stop it;
- dispatcher resumes after its lease expired: the queue refuses its claims, accounting refuses its tokens.

No decision relies on memory: accounting decides quota, the worker decides capacity (it refuses what does not fit), the
queue decides ownership.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from rota.accounting.changed_limits import LIMITS_CHANNEL
from rota.accounting.ledger import BookingBatch
from rota.engine.backends import Backends
from rota.engine.completion.finisher import Finisher
from rota.engine.dispatch import metrics as waiting
from rota.engine.dispatch.assigner import REFUSALS, Assigner, DispatchState
from rota.engine.dispatch.concurrency_limits import ConcurrencyLimiter
from rota.engine.dispatch.parked_jobs import ParkedJobs
from rota.engine.dispatch.pending_queues import BATCH_FRAMES_MAX, PendingQueue, PendingQueues
from rota.engine.dispatch.pending_reader import POLL_INTERVAL_S, PendingReader
from rota.engine.dispatch.rounds import QUEUES_MAX, Round, RoundPart, RoundPlanner
from rota.engine.dispatch.series import WorkDurations
from rota.engine.dispatch.series_recall import SeriesRecall
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.infra import failpoints
from rota.infra.asyncio_cancel import cancellable
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Notifications, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import (
    LeaseLost,
    NatsUnavailable,
    PostgresUnavailable,
    StaleFence,
)
from rota.model.ids import PoolId, ShowId
from rota.model.protocol import RECALL_SUBJECT, RecallFrames, encode
from rota.model.quota import Usage
from rota.model.reasons import Reason
from rota.placement import WorkerRegistry
from rota.queue import CHANNEL, CLAIMS_MAX, Claim, ClaimRequest

log = structlog.get_logger(__name__)

BOOKED_FRAMES = query("rota.engine.completion", "frames_held")

LEASE_S: Final = 4.0
"""Claims of a dead dispatcher return to the queue after this: it bounds how long their frames wait for nothing."""
ROUNDS_MAX: Final = 4
PROMPT_ROUNDS_MAX: Final = 2
"""Rounds that go as expected, at once: with more of them each finds less that is free, and costs as much."""
PROMPT_S: Final = 0.1
"""A round that takes longer is held up by something, such as a lock in its show, and does not hold up others."""
TURN_S: Final = 0.004
"""Longest time for which rounds are planned without a pause for everything else that the process does."""
LANE_CHECK_INTERVAL_S: Final = 0.1
"""Shortest time between reads of the lanes of queues that were notified."""
LOCKED_LANE_PAUSES_S: Final = (0.003, 0.009, 0.02)
"""Pauses before further claims from a locked lane, while the round keeps what it has reserved. A claim of another
server takes some milliseconds; parking or cancelling a job may lock its lanes for longer, and is not waited for."""
UNBOOKED_RETRY_INTERVAL_S: Final = 0.25
"""Pause between attempts to return unbooked claims while PostgreSQL is unavailable."""

LATENCY = metrics.histogram(
    "rota_dispatch_latency_seconds", "From the claim of a batch to its assignment.", labels=("topic",)
)


class Dispatcher:
    def __init__(
        self,
        backends: Backends,
        registry: WorkerRegistry,
        finisher: Finisher,
        state_writer: JobStateWriter,
        may_run_series: Callable[[], bool],
        *,
        clock: Clock | None = None,
    ) -> None:
        self.database = backends.database
        self.queue = backends.queue
        self.leases = backends.leases
        self.registry = registry
        self.finisher = finisher
        self.state_writer = state_writer
        self.clock = clock or SystemClock()
        self.pending_queues = PendingQueues(self.clock, registry.usable_pools, lambda: registry.shape_version)
        self.reader = PendingReader(self.pending_queues, self.database, self.queue, self.clock)
        self.planner = RoundPlanner(self.pending_queues, registry, may_run_series)
        self.parked_jobs = ParkedJobs(self.database, self.queue)
        self.concurrency_limiter = ConcurrencyLimiter(self.database)
        self.durations = WorkDurations()
        self.series_recall = SeriesRecall(registry, self.clock)
        state = DispatchState(
            self.pending_queues,
            self.parked_jobs,
            self.concurrency_limiter,
            state_writer,
            self.durations,
            self.series_recall,
        )
        self.assigner = Assigner(backends, registry, finisher, state, self.clock)
        self._accounting = backends.accounting
        self._locked_shows = backends.accounting.locked_shows
        self._wake = asyncio.Event()
        registry.capacity_listeners.append(self._capacity_grew)
        self._notified: set[str] = set()
        """Queues with known lanes that were notified since their lanes were read."""
        self._has_notified = asyncio.Event()
        self._limits_changed = asyncio.Event()
        self._unread: set[str] = set()
        """Notified queues that are not known yet."""
        self._has_unread = asyncio.Event()
        self._rounds: dict[asyncio.Task[None], float] = {}
        """Since when each has been running."""
        self._owner = 0
        self._claims_uncertain = False
        """A round failed: claims of our owner id may have no round working on them."""
        self._stale: StaleFence | None = None
        self._capacity_freed = False
        self._recall_at = 0.0
        """When series are looked at again, by the time of the event loop."""
        self._turn_cut = False
        """The last turn ended before it had looked at all queues."""

    def reset_backoffs(self) -> None:
        """Call when limits, workers or routes have changed."""
        self.pending_queues.capacity_released()
        self._wake.set()

    def _capacity_grew(self) -> None:
        self._capacity_freed = True
        self._wake.set()

    def frames_released(
        self, show: ShowId, jobs: Mapping[UUID, int], by_pool: Mapping[PoolId, Usage], bookings: BookingBatch = ()
    ) -> None:
        """These jobs released the bookings of so many frames each, and this much of each pool. `bookings`: what they
        were, if that is known here."""
        self.pending_queues.bookings_released(show, bookings)
        self.parked_jobs.frames_released(jobs)
        self.concurrency_limiter.frames_released(show)
        self.pending_queues.capacity_released(show, sum(jobs.values()), by_pool)
        self._wake.set()

    async def run(self, life: Lifecycle) -> None:
        while not life.draining:
            try:
                hold = self.leases.hold(
                    f"dispatcher:{self.leases.owner}", kind="dispatcher", ttl_s=LEASE_S, wait_s=LEASE_S
                )
                with cancellable():  # losing the lease during a cancellation must not swallow the cancellation
                    async with hold as lease:
                        previous, self._owner = self._owner, await self.queue.register_owner(lease)
                        await self._return_claims_of(previous)
                        await self._serve(life)
            except* (LeaseLost, StaleFence) as errors:
                # Errors from a round arrive wrapped in the task group's exception group.
                codes = sorted({type(error).__name__ for error in errors.exceptions})
                log.warning("dispatcher_lease_lost", errors=codes, remedy="a new lease is acquired automatically")

    async def _return_claims_of(self, previous: int) -> None:
        """Return what was claimed under our previous lease and not booked; queue maintenance would do it later."""
        with suppress(PostgresUnavailable):
            tokens = await self.queue.open_tokens(previous) if previous else []
            for part in _chunks(tokens):
                await self.queue.give_back(await self._accounting.bar_unbooked(part))

    async def _serve(self, life: Lifecycle) -> None:
        self.reader.forget()
        async with (
            self.database.listen(CHANNEL) as queued,
            self.database.listen(LIMITS_CHANNEL) as limits,
            asyncio.TaskGroup() as tasks,
        ):
            background = [
                tasks.create_task(work)
                for work in (
                    self._consume_queue_notifications(queued),
                    self._consume_limit_notifications(limits),
                    self._refresh_after_limits(),
                    self._read_new_queues(),
                    self._check_lanes(),
                    self._poll(),
                    self.state_writer.run(),
                )
            ]
            life.ready()
            try:
                while not life.draining:
                    await self._start_rounds(tasks)
                    await self._wait_for_work(life)
            finally:
                for task in background:
                    task.cancel()

    async def _start_rounds(self, tasks: asyncio.TaskGroup) -> None:
        """Start rounds while there are schedulable queues and free capacity."""
        self._wake.clear()
        if not self.assigner.bus.connected:
            return  # assignments could not be sent
        if self._capacity_freed and not self._turn_cut:  # or the last queues in order would never be looked at
            self._capacity_freed = False
            self.pending_queues.workers_changed()
        if self._claims_uncertain and not await self._return_unbooked_claims():
            return
        if self.concurrency_limiter.take_slot_freed():
            with suppress(PostgresUnavailable):
                await self.parked_jobs.refresh()
        await self.parked_jobs.unpark()
        await self._refresh_shares()
        if self._stale is not None:
            stale, self._stale = self._stale, None
            raise stale
        self._turn_cut = False
        if self._may_start():
            self._take_turn(tasks)
        await self._recall_series()

    async def _recall_series(self) -> None:
        """Ask workers for frames in series that could run elsewhere."""
        due, next_s = self.series_recall.take_due(self.planner.room)
        loop = asyncio.get_running_loop()
        if next_s is not None and self._recall_at <= loop.time():
            self._recall_at = loop.time() + next_s
            loop.call_at(self._recall_at, self._wake.set)
        with suppress(NatsUnavailable):  # the workers hand them back themselves a little later
            for worker, tokens in due.items():
                await self.assigner.bus.publish_core(RECALL_SUBJECT.format(worker), encode(RecallFrames(tokens)))

    def _may_start(self) -> bool:
        late_s = self.clock.monotonic() - PROMPT_S
        prompt = sum(since_s > late_s for since_s in self._rounds.values())
        return len(self._rounds) < ROUNDS_MAX and prompt < PROMPT_ROUNDS_MAX

    def _take_turn(self, tasks: asyncio.TaskGroup) -> None:
        order, until = self.pending_queues.order(), time.perf_counter() + TURN_S
        for pending in order:
            group = order.group
            if self._locked_shows.blocks(pending.key.show):
                order.skip_group()
            elif len(group.queues) > QUEUES_MAX and self.registry.is_full(group.pools):
                order.skip_group()  # a plan for each would say why, and take too long
            elif pending.reason is Reason.POOL_OVERLOADED and self.registry.refuses_all(group.pools):
                self.pending_queues.no_capacity(pending, pending.reason, {})  # a plan would say the same
                self.series_recall.mark_refused(pending)
            elif (planned := self.planner.plan_round(pending, order)) is not None:
                self._start(tasks, self._run_round(planned)).add_done_callback(partial(self._release_unbegun, planned))
            elif pending.reason is Reason.NO_POOL_MAPPING:
                pending.busy = True
                self._start(tasks, self._fail_unplaceable(pending)).add_done_callback(partial(_end_claim, pending))
            else:
                self.series_recall.mark_refused(pending)
            if not self._may_start():
                return
            if time.perf_counter() >= until:
                self._turn_cut = True
                self._wake.set()
                return

    async def _refresh_shares(self) -> None:
        with suppress(PostgresUnavailable):
            await self.reader.refresh_shares()

    async def _wait_for_work(self, life: Lifecycle) -> None:
        drained = asyncio.create_task(life.until_draining())
        woken = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({drained, woken}, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            woken.cancel()

    def _start(self, tasks: asyncio.TaskGroup, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = tasks.create_task(work)
        self._rounds[task] = self.clock.monotonic()
        late = asyncio.get_running_loop().call_later(PROMPT_S, self._wake.set)
        task.add_done_callback(partial(self._round_done, late))
        return task

    def _release_unbegun(self, planned: Round, _task: asyncio.Task[None]) -> None:
        if not planned.begun:
            for part in planned.parts:
                part.pending.busy = False
            self._release(planned)

    def _release(self, planned: Round) -> None:
        for part in planned.parts:
            self.registry.unreserve(part.reservation)
            self._shrink_share(part, 0)

    def _round_done(self, late: asyncio.TimerHandle, task: asyncio.Task[None]) -> None:
        late.cancel()
        del self._rounds[task]
        self._wake.set()

    async def _run_round(self, planned: Round) -> None:
        planned.begun = True
        started = self.clock.monotonic()
        try:
            try:
                claims = await self._claim(planned)
            finally:
                # Let the next round claim while this one books.
                for part in planned.parts:
                    part.pending.busy = part.pending.claimed = False
            if self.pending_queues.shows_waiting() > 1 or any(part.pending.claimable > 0 for part in planned.parts):
                self._wake.set()
            for part in planned.parts:
                slots = min(part.plan.planned, sum(claim.frames for claim in claims[part]))
                part.plan = self.registry.spread_again(part.pending.key.cls, part.plan, part.reservation, slots)
                self._shrink_share(part, slots)
            if any(claims.values()):
                await self.assigner.assign(planned, claims)
                for part in planned.parts:
                    part.pending.alone = False
                for topic in {part.pending.key.cls.topic for part in planned.parts}:
                    LATENCY.labels(topic).observe(self.clock.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - a round that fails must not end the others
            self._round_failed([part.pending for part in planned.parts], error)
        finally:
            self._release(planned)

    def _shrink_share(self, part: RoundPart, frames: int) -> None:
        if self.pending_queues.shrink_share(part.pending, part.share, frames):
            self._wake.set()

    async def _fail_unplaceable(self, pending: PendingQueue) -> None:
        """No pool is mapped to the topic, so waiting would not help: fail the frames."""
        try:
            arrivals = pending.arrivals
            [result] = await self.queue.claim_each([ClaimRequest(pending.lanes, BATCH_FRAMES_MAX)], self._owner)
            ended = len(result.claims) <= CLAIMS_MAX
            self.pending_queues.frames_claimed(pending, BATCH_FRAMES_MAX, result.frames, arrivals, ended=ended)
            if result.claims:
                await self.finisher.fail_unplaceable(result.claims, Reason.NO_POOL_MAPPING)
                REFUSALS.labels(Reason.NO_POOL_MAPPING.value).inc(result.frames)
        except Exception as error:  # noqa: BLE001 - as above
            self._round_failed([pending], error)

    def _round_failed(self, queues: Sequence[PendingQueue], error: Exception) -> None:
        """Frames that the round claimed but did not book are returned once no round is running."""
        self._claims_uncertain = True
        for pending in queues:
            pending.alone = True
            self.pending_queues.back_off(pending, Reason.BOOKS_UNAVAILABLE)
        names = [pending.key.queue for pending in queues]
        if isinstance(error, PostgresUnavailable):
            log.warning("round_failed", queues=names, reason=error.sentence)
        elif isinstance(error, StaleFence):
            self._stale = error
        else:
            log.error("round_failed", queues=names, exc_info=error)

    async def _claim(self, planned: Round) -> dict[RoundPart, list[Claim]]:
        failpoints.hit("dispatch.before_claim")
        requests = {part: ClaimRequest(part.pending.lanes, part.frames) for part in planned.parts}
        found, ended = await self._claim_parts(requests)
        for part, claims in found.items():
            frames = sum(claim.frames for claim in claims)
            self.pending_queues.frames_claimed(
                part.pending, part.frames, frames, part.arrivals, ended=ended, slots=part.plan.planned
            )
        if unseen := [part.pending for part, claims in found.items() if not claims]:
            # Notified, but nothing to claim: the entry may be in a newly created lane, so rescan.
            rescan = {pending.key.queue for pending in unseen if pending.notified}
            for pending in unseen:
                pending.notified = False
            if rescan:
                await self._refresh(rescan)
        if len(planned.parts) > 1:
            await self._recount(planned)
        return found

    async def _recount(self, planned: Round) -> None:
        """Queues that were counted during the claim may seem to have frames that it got: read those together, or each
        of them would need a round of its own to find that it is empty."""
        uncertain = [
            part.pending
            for part in planned.parts
            if not part.pending.counted and part.pending.claimable > 0 and part.pending.arrivals == part.arrivals
        ]
        for pending in uncertain:
            pending.claimed = True
        if uncertain:
            await self._refresh({pending.key.queue for pending in uncertain})

    async def _claim_parts(
        self, requests: Mapping[RoundPart, ClaimRequest]
    ) -> tuple[dict[RoundPart, list[Claim]], bool]:
        """The claims by part, and whether the lanes of a part that got less than it wanted have no more.

        Parts that got nothing because of a lock try again: if another server claims from the lane of a higher priority
        at this moment, its room must not go to a lower one."""
        found: dict[RoundPart, list[Claim]] = {part: [] for part in requests}
        tried, ended = list(requests), True
        for pause_s in (*LOCKED_LANE_PAUSES_S, None):
            results = await self.queue.claim_each([requests[part] for part in tried], self._owner)
            for part, result in zip(tried, results, strict=True):
                found[part] = result.claims
            ended &= sum(len(result.claims) for result in results) < CLAIMS_MAX + len(tried)
            tried = [part for part, result in zip(tried, results, strict=True) if result.locked and not result.claims]
            if not tried or pause_s is None:
                break
            await self.clock.sleep(pause_s)
        return found, ended

    async def _return_unbooked_claims(self) -> bool:
        """After a failed round, return claims that are not booked. False: try again later.

        Requires that no round is running: its claim would look orphaned.
        """
        if self._rounds:
            return False
        try:
            tokens = await self.queue.open_tokens(self._owner)
            booked = await self._booked_tokens(tokens)
            for part in _chunks([token for token in tokens if token not in booked]):
                await self.queue.give_back(part)
        except PostgresUnavailable:
            await self.clock.sleep(UNBOOKED_RETRY_INTERVAL_S)
            return False
        self._claims_uncertain = False
        return True

    async def _booked_tokens(self, tokens: Sequence[int]) -> set[int]:
        rows = await self.database.rows(BOOKED_FRAMES, list(tokens)) if tokens else []
        return {row["token"] for row in rows}

    async def _consume_queue_notifications(self, queued: Notifications) -> None:
        async for name in queued:
            if name is None:
                self.reader.forget()
                await self._refresh_all(always=True)
            elif self.pending_queues.mark_notified(name):
                self._notified.add(name)
                self._has_notified.set()
            else:
                self._unread.add(name)
                self._has_unread.set()
            self._wake.set()

    async def _read_new_queues(self) -> None:
        """Read queues that are not known yet; those that come meanwhile are read together."""
        while True:
            await self._has_unread.wait()
            names, self._unread = self._unread, set()
            self._has_unread.clear()
            await self._refresh(names)
            self._wake.set()

    async def _check_lanes(self) -> None:
        """Read the lanes of notified queues: a notification names no priority, and its lane may be unknown here.

        At once, because a queue that is not counted may have any number of frames, so that a round serves no other.
        """
        while True:
            await self._has_notified.wait()
            names, self._notified = self._notified, set()
            self._has_notified.clear()
            await self._refresh(names)
            self._wake.set()
            await self.clock.sleep(LANE_CHECK_INTERVAL_S)

    async def _consume_limit_notifications(self, limits: Notifications) -> None:
        async for _ in limits:
            self._limits_changed.set()

    async def _refresh_after_limits(self) -> None:
        """Once for all changes that come meanwhile: many limits may change at once."""
        while True:
            await self._limits_changed.wait()
            self._limits_changed.clear()
            await self._refresh_all(always=True)
            self.reset_backoffs()

    async def _poll(self) -> None:
        while True:
            if await self._refresh_all(always=False):
                self._wake.set()
            await self.clock.sleep(POLL_INTERVAL_S)

    async def _refresh(self, queues: Collection[str]) -> None:
        try:
            await self.reader.refresh(queues)
        except PostgresUnavailable as error:
            self.reader.forget()
            log.warning("pending_queues_refresh_failed", reason=error.sentence)

    async def _refresh_all(self, *, always: bool) -> bool:
        """Read what waits, `always` or if it has changed, and what limits it. Returns whether it was read."""
        try:
            read = await self.reader.refresh_all(always=always)
            limits = await self.reader.read_limits()
            if not limits.minimums:
                self.pending_queues.set_minimums({}, {})
            elif self.pending_queues.entries:
                await self.reader.refresh_minimums()
            waiting.set_waiting_frames(self.pending_queues.frames_by_reason())
            await self.concurrency_limiter.refresh(limits.limited)
            if limits.parked:  # whatever waits: the pending queues do not include lanes in which all frames are parked
                await self.parked_jobs.refresh()
        except PostgresUnavailable as error:
            log.warning("pending_queues_refresh_failed", reason=error.sentence)
            return False
        return read


def _end_claim(pending: PendingQueue, _task: asyncio.Task[None]) -> None:
    pending.busy = False


def _chunks(tokens: Sequence[int], most: int = 4096) -> Iterable[Sequence[int]]:
    for at in range(0, len(tokens), most):
        yield tokens[at : at + most]
