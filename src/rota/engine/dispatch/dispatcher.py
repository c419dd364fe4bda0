"""From the queue to a worker: claim, place, book, hand over. Every replica dispatches, each for the workers it feeds.

A round works on a batch of one spot (frames that are alike): reserve room on workers, claim as many frames, book them
in one call, and hand each worker its part in one message. Several rounds are under way at a time, one claim per spot.

What happens when we die, are paused or lose a reply between two steps:
- reserved, not claimed: the reservation is ours alone and dies with us;
- claimed, not booked: the claim belongs to our lease. We give it back when we know that it was not booked; if we are
  gone, the queue's upkeep does when the lease has ended, after it has buried the tokens (nobody can book them later);
- a claim whose reply is lost: we look at what is claimed in our name and give back what we do not know;
- booked, reply lost: booking again with the same tokens tells what is booked;
- booked, not handed over, or the message lost: the proc row is there and the worker does not list it; recovery finds it
  (`rota.engine.recovery.reconciler`) and returns the frame. A message that was stored after all is a late attempt: its report is
  refused, and its worker is told to stop it;
- a paused dispatcher that wakes after its lease went: its claims are refused by the queue, its tokens by the books.

Nothing here decides on what it remembers: quota is decided by the books, capacity by the worker itself (which refuses
what does not fit), who has a frame by the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

import structlog

from rota.accounting.service import AccountingService
from rota.engine.completion.finisher import Finisher
from rota.engine.dispatch import metrics as waiting
from rota.engine.dispatch.assigner import REFUSALS, Assigner
from rota.engine.dispatch.concurrency_limits import ConcurrencyLimiter
from rota.engine.dispatch.parked_jobs import ParkedJobs
from rota.engine.dispatch.pending_queues import POLL_INTERVAL_S, PendingQueue, PendingQueues
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.infra import failpoints
from rota.infra.asyncio_cancel import cancellable
from rota.infra.blob_store import BlobStore
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease import Leases
from rota.infra.nats import Bus
from rota.infra.postgres import Database, Notifications, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import (
    LeaseLost,
    PostgresUnavailable,
    StaleFence,
)
from rota.model.ids import ShowId
from rota.model.reasons import Reason
from rota.placement import CapacityReservation, PlacementPlan, WorkerRegistry
from rota.queue import CHANNEL, Claim, Queue

log = structlog.get_logger(__name__)

BOOKED_FRAMES = query("rota.engine.completion", "frames_held")

LIMITS_CHANNEL: Final = "rota_limits"
LEASE_S: Final = 10.0
MAX_CONCURRENT_ROUNDS: Final = 4
UNBOOKED_RETRY_INTERVAL_S: Final = 0.25
"""How long a show is passed over whose books cannot be asked now."""

LATENCY = metrics.histogram(
    "rota_dispatch_latency_seconds", "From the claim to the hand-over of a batch.", labels=("topic",)
)


class Dispatcher:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        books: AccountingService,
        bus: Bus,
        registry: WorkerRegistry,
        finisher: Finisher,
        leases: Leases,
        store: BlobStore,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.queue = queue
        self.registry = registry
        self.finisher = finisher
        self.leases = leases
        self.clock = clock or SystemClock()
        self.board = PendingQueues(database, queue, self.clock)
        self.marks = JobStateWriter(database, self.clock)
        self.parking = ParkedJobs(database, queue)
        self.tenants = ConcurrencyLimiter(database)
        self.handing = Assigner(
            database,
            queue,
            books,
            bus,
            registry,
            finisher,
            store,
            self.board,
            self.marks,
            self.parking,
            self.tenants,
            self.clock,
        )
        self._wake = asyncio.Event()
        registry.on_capacity = self._on_capacity
        self._rounds: set[asyncio.Task[None]] = set()
        self._owner = 0
        self._doubt = False
        """A round went wrong: something may be claimed in our name that nobody works on."""
        self._stale: StaleFence | None = None
        self._room_came = False

    def reset_backoffs(self) -> None:
        """Limits, workers or routes have changed."""
        self.board.capacity_released()
        self._wake.set()

    def _on_capacity(self) -> None:
        self._room_came = True
        self._wake.set()

    def frames_released(self, show: ShowId, jobs: Mapping[UUID, int]) -> None:
        """So many frames of these jobs have given back what they held."""
        self.parking.frames_released(jobs)
        self.tenants.frames_released(show)
        self.board.capacity_released(show, sum(jobs.values()))
        self._wake.set()

    async def run(self, life: Lifecycle) -> None:
        while not life.draining:
            try:
                hold = self.leases.hold(
                    f"dispatcher:{self.leases.owner}", kind="dispatcher", ttl_s=LEASE_S, wait_s=LEASE_S
                )
                with cancellable():  # a lease that is lost in the moment of a cancellation does not undo it
                    async with hold as lease:
                        self._owner = await self.queue.register_owner(lease)
                        await self._serve(life)
            except* (LeaseLost, StaleFence) as errors:
                # From a round it comes wrapped by the group of all rounds.
                codes = sorted({type(error).__name__ for error in errors.exceptions})
                log.warning("dispatcher_lost_its_lease", errors=codes, remedy="it goes on under a new one")

    async def _serve(self, life: Lifecycle) -> None:
        async with (
            self.database.listen(CHANNEL) as queued,
            self.database.listen(LIMITS_CHANNEL) as limits,
            asyncio.TaskGroup() as tasks,
        ):
            helping = [
                tasks.create_task(work)
                for work in (
                    self._consume_queue_notifications(queued),
                    self._consume_limit_notifications(limits),
                    self._poll(),
                    self.marks.run(),
                )
            ]
            life.ready()
            try:
                while not life.draining:
                    await self._start_rounds(tasks)
                    await self._wait_for_work(life)
            finally:
                for task in helping:
                    task.cancel()

    async def _start_rounds(self, tasks: asyncio.TaskGroup) -> None:
        """Begin as many rounds as there is work and room for."""
        self._wake.clear()
        if not self.handing.bus.connected:
            return  # what is booked now could not be handed over
        if self._room_came:
            self._room_came = False
            self.board.workers_changed()
        if self._doubt and not await self._return_unbooked_claims():
            return
        if self.tenants.take_slot_freed():
            with suppress(PostgresUnavailable):
                await self.parking.refresh()
        await self.parking.unpark()
        await self._refresh_shares()
        if self._stale is not None:
            stale, self._stale = self._stale, None
            raise stale
        begun = True
        while begun and len(self._rounds) < MAX_CONCURRENT_ROUNDS:
            begun = False
            for spot in self.board.schedulable():
                if self._start_round(tasks, spot):
                    begun = True
                    break

    async def _refresh_shares(self) -> None:
        with suppress(PostgresUnavailable):
            await self.board.refresh_shares()

    async def _wait_for_work(self, life: Lifecycle) -> None:
        drained = asyncio.create_task(life.until_draining())
        woken = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({drained, woken}, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            woken.cancel()

    def _start_round(self, tasks: asyncio.TaskGroup, spot: PendingQueue) -> bool:
        most = self.board.frames_max(spot)
        plan = self.registry.plan(spot.key.cls, most, without=self.board.excluded_pools(spot))
        if plan.portions:
            work = self._run_round(spot, plan, self.registry.reserve(plan))
        elif plan.refusal is Reason.NO_POOL_MAPPING:
            work = self._fail_unplaceable(spot, most)
        else:
            self.board.no_capacity(spot, plan.refusal or Reason.NO_WORKERS)
            return False
        spot.busy = True
        task = tasks.create_task(work)
        self._rounds.add(task)
        task.add_done_callback(self._round_done)
        return True

    def _round_done(self, task: asyncio.Task[None]) -> None:
        self._rounds.discard(task)
        self._wake.set()

    async def _run_round(self, spot: PendingQueue, plan: PlacementPlan, held: CapacityReservation) -> None:
        started = self.clock.monotonic()
        try:
            claims = await self._claim(spot, plan.planned)
            if claims:
                await self.handing.assign(spot, plan, claims)
                LATENCY.labels(spot.key.cls.topic).observe(self.clock.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - a round that fails must not end the others
            self._round_failed(spot, error)
        finally:
            spot.busy = False
            self.registry.unreserve(held)

    async def _fail_unplaceable(self, spot: PendingQueue, most: int) -> None:
        """No pool may run these, so waiting would not help them."""
        try:
            claims = await self._claim(spot, most)
            if claims:
                told = await self.finisher.fail_unplaceable(claims, Reason.NO_POOL_MAPPING)
                REFUSALS.labels(Reason.NO_POOL_MAPPING.value).inc(sum(claim.frames for claim in claims))
                self.marks.forget(job.job for job in told.finished)
        except Exception as error:  # noqa: BLE001 - as above
            self._round_failed(spot, error)
        finally:
            spot.busy = False

    def _round_failed(self, spot: PendingQueue, error: Exception) -> None:
        """What the round claimed and did not book is given back once no round is under way."""
        self._doubt = True
        self.board.back_off(spot, Reason.BOOKS_UNAVAILABLE)
        if isinstance(error, PostgresUnavailable):
            log.warning("round_failed", queue=spot.key.queue, reason=error.sentence)
        elif isinstance(error, StaleFence):
            self._stale = error
        else:
            log.error("round_failed", queue=spot.key.queue, exc_info=error)

    async def _claim(self, spot: PendingQueue, most: int) -> list[Claim]:
        failpoints.hit("dispatch.before_claim")
        claims = await self.queue.claim(spot.lanes, most, self._owner)
        got = sum(claim.frames for claim in claims)
        spot.waiting = max(spot.waiting - got, 1) if got == most else 0
        spot.reason = None
        if not got and spot.told:
            # Told of, and not there: it may be in a lane that is new.
            spot.told = False
            await self._refresh([spot.key.queue])
        # The next round may claim while this one books.
        spot.busy = False
        self.board.consume_budget(spot, got)
        if got == most:
            self._wake.set()
        return claims

    async def _return_unbooked_claims(self) -> bool:
        """After a round went wrong: what is claimed in our name and not booked goes back. False: not yet.

        No round may be under way, since its claim would look like one that nobody knows.
        """
        if self._rounds:
            return False
        try:
            tokens = await self.queue.open_tokens(self._owner)
            held = await self._booked_tokens(tokens)
            for part in _chunks([token for token in tokens if token not in held]):
                await self.queue.give_back(part)
        except PostgresUnavailable:
            await self.clock.sleep(UNBOOKED_RETRY_INTERVAL_S)
            return False
        self._doubt = False
        return True

    async def _booked_tokens(self, tokens: Sequence[int]) -> set[int]:
        rows = await self.database.rows(BOOKED_FRAMES, None, list(tokens)) if tokens else []
        return {row["token"] for row in rows}

    async def _consume_queue_notifications(self, queued: Notifications) -> None:
        async for name in queued:
            if name is None or not self.board.mark_notified(name):
                await self._refresh(None if name is None else [name])
            self._wake.set()

    async def _consume_limit_notifications(self, limits: Notifications) -> None:
        async for _ in limits:
            await self._refresh(None)
            self.reset_backoffs()

    async def _poll(self) -> None:
        while True:
            await self._refresh(None)
            self._wake.set()
            await self.clock.sleep(POLL_INTERVAL_S)

    async def _refresh(self, queues: Sequence[str] | None) -> None:
        try:
            await self.board.refresh(queues)
            if queues is None:
                waiting.set_waiting_frames(self.board.frames_by_reason())
                await self.tenants.refresh()
                # In any case: of lanes in which all is parked the board knows nothing.
                await self.parking.refresh()
        except PostgresUnavailable as away:
            log.warning("look_failed", reason=away.sentence)


def _chunks(tokens: Sequence[int], most: int = 4096) -> Iterable[Sequence[int]]:
    for at in range(0, len(tokens), most):
        yield tokens[at : at + most]
