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
  (`rota.engine.recovery`) and returns the frame. A message that was stored after all is a late attempt: its report is
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

from rota.accounting.books import Books
from rota.engine import waiting
from rota.engine.board import LOOK_S, Board, Spot
from rota.engine.finish import Finisher
from rota.engine.handing import REFUSALS, Handing
from rota.engine.marks import Marks
from rota.engine.parking import Parking
from rota.engine.tenant import Tenants
from rota.infra import faults
from rota.infra.cancelling import cancellable
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease import Leases
from rota.infra.nats import Bus
from rota.infra.postgres import Database, Notifications, query
from rota.infra.service import Lifecycle
from rota.infra.store import Store
from rota.infra.telemetry import metrics
from rota.model.errors import (
    LeaseLost,
    PostgresUnavailable,
    StaleFence,
)
from rota.model.ids import ShowId
from rota.model.reasons import Reason
from rota.placement import Plan, Registry, Reservation
from rota.queue import CHANNEL, Claim, Queue

log = structlog.get_logger(__name__)

HELD = query(__package__, "frames_held")

LIMITS_CHANNEL: Final = "rota_limits"
LEASE_S: Final = 10.0
ROUNDS: Final = 4
UNSETTLED_S: Final = 0.25
"""How long a show is passed over whose books cannot be asked now."""

LATENCY = metrics.histogram(
    "rota_dispatch_latency_seconds", "From the claim to the hand-over of a batch.", labels=("topic",)
)


class Dispatcher:
    def __init__(
        self,
        database: Database,
        queue: Queue,
        books: Books,
        bus: Bus,
        registry: Registry,
        finisher: Finisher,
        leases: Leases,
        store: Store,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.queue = queue
        self.registry = registry
        self.finisher = finisher
        self.leases = leases
        self.clock = clock or SystemClock()
        self.board = Board(database, queue, self.clock)
        self.marks = Marks(database, self.clock)
        self.parking = Parking(database, queue)
        self.tenants = Tenants(database)
        self.handing = Handing(
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
        registry.on_room = self._on_room
        self._rounds: set[asyncio.Task[None]] = set()
        self._owner = 0
        self._doubt = False
        """A round went wrong: something may be claimed in our name that nobody works on."""
        self._stale: StaleFence | None = None
        self._room_came = False

    def look_again(self) -> None:
        """Limits, workers or routes have changed."""
        self.board.release()
        self._wake.set()

    def _on_room(self) -> None:
        self._room_came = True
        self._wake.set()

    def released(self, show: ShowId, jobs: Mapping[UUID, int]) -> None:
        """So many frames of these jobs have given back what they held."""
        self.parking.released(jobs)
        self.tenants.released(show)
        self.board.release(show, sum(jobs.values()))
        self._wake.set()

    async def run(self, life: Lifecycle) -> None:
        while not life.draining:
            try:
                hold = self.leases.hold(
                    f"dispatcher:{self.leases.owner}", kind="dispatcher", ttl_s=LEASE_S, wait_s=LEASE_S
                )
                with cancellable():  # a lease that is lost in the moment of a cancellation does not undo it
                    async with hold as lease:
                        self._owner = await self.queue.enlist(lease)
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
                for work in (self._hear(queued), self._hear_limits(limits), self._look_again(), self.marks.run())
            ]
            life.ready()
            try:
                while not life.draining:
                    await self._turn(tasks)
                    await self._rest(life)
            finally:
                for task in helping:
                    task.cancel()

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        """Begin as many rounds as there is work and room for."""
        self._wake.clear()
        if not self.handing.bus.connected:
            return  # what is booked now could not be handed over
        if self._room_came:
            self._room_came = False
            self.board.workers_changed()
        if self._doubt and not await self._settle_doubt():
            return
        if self.tenants.take_left():
            with suppress(PostgresUnavailable):
                await self.parking.look()
        await self.parking.unpark()
        await self._look_at_shares()
        if self._stale is not None:
            stale, self._stale = self._stale, None
            raise stale
        begun = True
        while begun and len(self._rounds) < ROUNDS:
            begun = False
            for spot in self.board.in_order():
                if self._begin(tasks, spot):
                    begun = True
                    break

    async def _look_at_shares(self) -> None:
        with suppress(PostgresUnavailable):
            await self.board.look_at_shares()

    async def _rest(self, life: Lifecycle) -> None:
        drained = asyncio.create_task(life.until_draining())
        woken = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({drained, woken}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            woken.cancel()

    def _begin(self, tasks: asyncio.TaskGroup, spot: Spot) -> bool:
        most = self.board.most(spot)
        plan = self.registry.plan(spot.key.cls, most, without=self.board.passed_over(spot))
        if plan.portions:
            work = self._round(spot, plan, self.registry.reserve(plan))
        elif plan.refusal is Reason.NO_POOL_MAPPING:
            work = self._give_up(spot, most)
        else:
            self.board.nowhere(spot, plan.refusal or Reason.NO_WORKERS)
            return False
        spot.busy = True
        task = tasks.create_task(work)
        self._rounds.add(task)
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._rounds.discard(task)
        self._wake.set()

    async def _round(self, spot: Spot, plan: Plan, held: Reservation) -> None:
        started = self.clock.monotonic()
        try:
            claims = await self._claim(spot, plan.planned)
            if claims:
                await self.handing.hand_out(spot, plan, claims)
                LATENCY.labels(spot.key.cls.topic).observe(self.clock.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - a round that fails must not end the others
            self._in_doubt(spot, error)
        finally:
            spot.busy = False
            self.registry.unreserve(held)

    async def _give_up(self, spot: Spot, most: int) -> None:
        """No pool may run these, so waiting would not help them."""
        try:
            claims = await self._claim(spot, most)
            if claims:
                told = await self.finisher.unplaceable(claims, Reason.NO_POOL_MAPPING)
                REFUSALS.labels(Reason.NO_POOL_MAPPING.value).inc(sum(claim.frames for claim in claims))
                self.marks.ended(job.job for job in told.finished)
        except Exception as error:  # noqa: BLE001 - as above
            self._in_doubt(spot, error)
        finally:
            spot.busy = False

    def _in_doubt(self, spot: Spot, error: Exception) -> None:
        """What the round claimed and did not book is given back once no round is under way."""
        self._doubt = True
        self.board.hold(spot, Reason.BOOKS_UNAVAILABLE)
        if isinstance(error, PostgresUnavailable):
            log.warning("round_failed", queue=spot.key.queue, reason=error.sentence)
        elif isinstance(error, StaleFence):
            self._stale = error
        else:
            log.error("round_failed", queue=spot.key.queue, exc_info=error)

    async def _claim(self, spot: Spot, most: int) -> list[Claim]:
        faults.at("dispatch.before_claim")
        claims = await self.queue.claim(spot.lanes, most, self._owner)
        got = sum(claim.frames for claim in claims)
        spot.waiting = max(spot.waiting - got, 1) if got == most else 0
        spot.reason = None
        if not got and spot.told:
            # Told of, and not there: it may be in a lane that is new.
            spot.told = False
            await self._look([spot.key.queue])
        # The next round may claim while this one books.
        spot.busy = False
        self.board.booked(spot, got)
        if got == most:
            self._wake.set()
        return claims

    async def _settle_doubt(self) -> bool:
        """After a round went wrong: what is claimed in our name and not booked goes back. False: not yet.

        No round may be under way, since its claim would look like one that nobody knows.
        """
        if self._rounds:
            return False
        try:
            tokens = await self.queue.open_tokens(self._owner)
            held = await self._booked(tokens)
            for part in _chunks([token for token in tokens if token not in held]):
                await self.queue.give_back(part)
        except PostgresUnavailable:
            await self.clock.sleep(UNSETTLED_S)
            return False
        self._doubt = False
        return True

    async def _booked(self, tokens: Sequence[int]) -> set[int]:
        rows = await self.database.rows(HELD, None, list(tokens)) if tokens else []
        return {row["token"] for row in rows}

    async def _hear(self, queued: Notifications) -> None:
        async for name in queued:
            if name is None or not self.board.heard(name):
                await self._look(None if name is None else [name])
            self._wake.set()

    async def _hear_limits(self, limits: Notifications) -> None:
        async for _ in limits:
            await self._look(None)
            self.look_again()

    async def _look_again(self) -> None:
        while True:
            await self._look(None)
            self._wake.set()
            await self.clock.sleep(LOOK_S)

    async def _look(self, queues: Sequence[str] | None) -> None:
        try:
            await self.board.look(queues)
            if queues is None:
                waiting.tell_frames(self.board.by_reason())
                await self.tenants.look()
                # In any case: of lanes in which all is parked the board knows nothing.
                await self.parking.look()
        except PostgresUnavailable as away:
            log.warning("look_failed", reason=away.sentence)


def _chunks(tokens: Sequence[int], most: int = 4096) -> Iterable[Sequence[int]]:
    for at in range(0, len(tokens), most):
        yield tokens[at : at + most]
