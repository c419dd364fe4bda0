"""Telling what happens while it happens: handed over by the parts of the engine, published a moment later.

The record is PostgreSQL; the stream EVENTS is for whoever wants to hear of a change without asking again and again. So:
- whoever does the work is not held up: handing over is an append to a queue in memory, after the commit. At most
  `WAITING_MAX` events wait there (NATS may be away); what is beyond that is dropped and counted;
- nothing is missing in silence, as far as anybody knows: where events were dropped the next message begins with a
  `reset`. A server that dies takes what waited with it, a few milliseconds of events; that it died is told
  (`rota.engine.events_servers`);
- nothing is told twice: a message whose outcome is unknown is sent again under its id for `AGAIN_S`, for which NATS
  remembers ids, and is dropped, with a `reset`, after that;
- what is told is committed, but for a commit whose reply was lost: that is not told at all.

Messages are at least `PACE_S` apart, so a busy server sends few large ones. Names and ids of shows are looked up here,
by the way, not by those who hand over.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Final, NamedTuple, Protocol
from uuid import UUID, uuid4

import structlog

from rota.engine.events_shows import Shows
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Message, Outcome, Receipt
from rota.infra.nats.declared import EVENTS_TOLD
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable
from rota.model.events import LETTER, RESET, RETRIED, Batch, Fact, Group, joined
from rota.model.ids import JobId, ShowId
from rota.model.messages import encode

log = structlog.get_logger(__name__)

WAITING_MAX: Final = 200_000
MESSAGE_MAX: Final = 4_000
"""Events of one message: written out for a reader they are some hundred kilobytes."""
GROUPS_MAX: Final = 500
PACE_S: Final = 0.05
AGAIN_S: Final = 50.0
PAUSES: Final = Backoff(first_s=0.1, longest_s=2.0)

TOLD = metrics.counter("rota_events_told", "Events that were published.")
DROPPED = metrics.counter("rota_events_dropped", "Events that were not published, by why.", labels=("reason",))


class Untold(NamedTuple):
    """A group before it is written down; a show may be known by its name alone."""

    kind: str
    at_ms: int
    show: UUID | str | None
    jobs: Sequence[UUID]
    facts: Mapping[str, Fact]
    runs: Sequence[UUID] = ()

    @property
    def size(self) -> int:
        return len(self.jobs or self.runs) or 1


class Sending:
    """A message until it is known to be in the stream."""

    def __init__(self, message: Message, events: int, dropped: int) -> None:
        self.message = message
        self.events = events
        self.dropped = dropped
        """Events that it says were dropped before it."""
        self.sent_at: float | None = None
        """Since when it may be there."""


class Publishes(Protocol):
    async def publish_many(self, messages: Sequence[Message], /) -> Sequence[Receipt]: ...


class Teller:
    """One per replica: `tell` from anywhere, at any time; `run` publishes.

    Without a database it is for events that concern no show.
    """

    def __init__(self, database: Database | None, bus: Publishes, clock: Clock | None = None) -> None:
        self.bus = bus
        self._clock = clock or SystemClock()
        self._shows = Shows(database, self._clock) if database is not None else None
        self._waiting: deque[Untold] = deque()
        self._events = 0
        self._dropped = 0
        self._sending: Sending | None = None
        self._some = asyncio.Event()
        self._name = uuid4().hex
        self._numbers = count(1)

    @property
    def waiting(self) -> int:
        """Events that are not published yet."""
        return self._events

    def tell(
        self,
        kind: str,
        *,
        show: UUID | str | None = None,
        jobs: Sequence[UUID] = (),
        runs: Sequence[UUID] = (),
        **facts: Fact,
    ) -> None:
        """Something happened, to each of the jobs or runs if there are any. Never waits, and never fails."""
        untold = Untold(kind, self._clock.now_ms(), show, jobs, facts, runs)
        if self._events + untold.size > WAITING_MAX:
            self._drop(untold.size, "full")
            return
        self._events += untold.size
        self._waiting.append(untold)
        self._some.set()

    def jobs(self, came: Iterable[tuple[str, ShowId | str, str, UUID]]) -> None:
        """Jobs that came into a state: the state, whose it is, its topic and its id."""
        groups: dict[tuple[str, ShowId | str, str], list[UUID]] = defaultdict(list)
        for state, show, topic, job in came:
            groups[state, show, topic].append(job)
        for (state, show, topic), jobs in groups.items():
            for at in range(0, len(jobs), MESSAGE_MAX):
                self.tell(f"job.{state.lower()}", show=show, jobs=jobs[at : at + MESSAGE_MAX], topic=topic)

    def retried(self, job: JobId, show: ShowId | str, new: JobId) -> None:
        self.tell(RETRIED, show=show, jobs=[job], runs=(), **{"as": str(new)})

    def letter(self, what: str, reason: str, show: ShowId | str | None = None, jobs: Sequence[UUID] = ()) -> None:
        self.tell(LETTER, show=show, jobs=jobs, what=what, reason=reason)

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publish_on())
            life.ready()
            await life.until_draining()
            publishing.cancel()
        await self._publish_rest()

    async def publish(self) -> None:
        """All that waits now. Kept until it is in the stream."""
        while self._sending is not None or self._waiting or self._dropped:
            if self._sending is None:
                self._sending = await self._next()
            await self._send(self._sending)
        self._some.clear()

    async def _publish_on(self) -> None:
        streak = 0
        while True:
            await self._some.wait()
            try:
                await self.publish()
                streak = 0
            except NatsUnavailable as away:
                streak += 1
                log.info("events_wait", reason=away.sentence, waiting=self._events)
                await self._clock.sleep(PAUSES.pause_s(streak, 0.5))
            await self._clock.sleep(PACE_S)

    async def _publish_rest(self) -> None:
        try:
            await self.publish()
        except NatsUnavailable:
            DROPPED.labels("ended").inc(self._events + (self._sending.events if self._sending else 0))

    async def _next(self) -> Sending:
        if self._shows is not None:
            await self._shows.learn(untold.show for untold in islice(self._waiting, GROUPS_MAX))
        groups: list[Group] = []
        events, dropped = 0, self._dropped
        if dropped:
            groups.append(Group(RESET, self._clock.now_ms(), facts={"because": "dropped", "events": dropped}))
        while self._waiting and len(groups) < GROUPS_MAX:
            if events and events + self._waiting[0].size > MESSAGE_MAX:
                break
            untold = self._waiting.popleft()
            groups.append(self._group(untold))
            events += untold.size
        self._events -= events
        self._dropped -= dropped
        message = Message(subject=EVENTS_TOLD, data=encode(Batch(groups)), msg_id=f"{self._name}:{next(self._numbers)}")
        return Sending(message, events, dropped)

    def _group(self, untold: Untold) -> Group:
        show, name = self._shows.known(untold.show) if self._shows is not None else (None, None)
        return Group(
            untold.kind, untold.at_ms, show, name, joined(untold.jobs), dict(untold.facts), joined(untold.runs)
        )

    async def _send(self, sending: Sending) -> None:
        now_s = self._clock.monotonic()
        if sending.sent_at is not None and now_s - sending.sent_at > AGAIN_S:
            self._give_up(sending, "unsettled")
            return
        [receipt] = await self.bus.publish_many([sending.message])
        if receipt.settled:
            TOLD.inc(sending.events)
            self._sending = None
        elif receipt.outcome is Outcome.REJECTED:
            log.error("events_rejected", reason=receipt.reason, events=sending.events)
            self._give_up(sending, "rejected")
            raise NatsUnavailable(f"NATS takes no events ({receipt.reason}): the next ones are tried after a pause.")
        else:
            sending.sent_at = sending.sent_at or now_s
            raise NatsUnavailable(f"Events were not taken by NATS ({receipt.reason}): they are sent again.")

    def _give_up(self, sending: Sending, reason: str) -> None:
        self._sending = None
        self._dropped += sending.dropped
        self._drop(sending.events, reason)

    def _drop(self, events: int, reason: str) -> None:
        DROPPED.labels(reason).inc(events)
        self._dropped += events
        self._some.set()
