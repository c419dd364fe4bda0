"""Telling what happens while it happens: handed over by the parts of the engine, published a moment later.

The record is PostgreSQL; the stream EVENTS is for whoever wants to hear of a change without asking again and again. So:
- whoever does the work is not held up: handing over is an append to a queue in memory, after the commit. At most
  `WAITING_MAX` events wait there (NATS may be away); what is beyond that is dropped and counted;
- nothing is missing in silence, as far as anybody knows: where events were dropped the next message begins with a
  `reset`. A server that dies takes what waited with it, a few milliseconds of events; that it died is told
  (`rota.engine.events.server_presence`);
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

from rota.engine.events.show_names import ShowNameCache
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import BusMessage, PublishOutcome, PublishReceipt
from rota.infra.nats.topology import EVENTS_SUBJECT
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable
from rota.model.events import DEAD_LETTER_KIND, RESET_KIND, RETRIED_KIND, EventFact, EventGroup, EventMessage, join_ids
from rota.model.ids import JobId, ShowId
from rota.model.protocol import encode

log = structlog.get_logger(__name__)

QUEUED_EVENTS_MAX: Final = 200_000
MESSAGE_EVENTS_MAX: Final = 4_000
"""Events of one message: written out for a reader they are some hundred kilobytes."""
MESSAGE_GROUPS_MAX: Final = 500
MIN_PUBLISH_INTERVAL_S: Final = 0.05
RESEND_WINDOW_S: Final = 50.0
PUBLISH_BACKOFF: Final = Backoff(first_s=0.1, longest_s=2.0)

PUBLISHED = metrics.counter("rota_events_told", "Events that were published.")
DROPPED = metrics.counter("rota_events_dropped", "Events that were not published, by why.", labels=("reason",))


class QueuedEvent(NamedTuple):
    """A group before it is written down; a show may be known by its name alone."""

    kind: str
    at_ms: int
    show: UUID | str | None
    jobs: Sequence[UUID]
    facts: Mapping[str, EventFact]
    runs: Sequence[UUID] = ()

    @property
    def size(self) -> int:
        return len(self.jobs or self.runs) or 1


class InFlightMessage:
    """A message until it is known to be in the stream."""

    def __init__(self, message: BusMessage, events: int, dropped: int) -> None:
        self.message = message
        self.events = events
        self.dropped = dropped
        """Events that it says were dropped before it."""
        self.sent_at: float | None = None
        """Since when it may be there."""


class BatchPublisher(Protocol):
    async def publish_many(self, messages: Sequence[BusMessage], /) -> Sequence[PublishReceipt]: ...


class EventPublisher:
    """One per replica: `tell` from anywhere, at any time; `run` publishes.

    Without a database it is for events that concern no show.
    """

    def __init__(self, database: Database | None, bus: BatchPublisher, clock: Clock | None = None) -> None:
        self.bus = bus
        self._clock = clock or SystemClock()
        self._shows = ShowNameCache(database, self._clock) if database is not None else None
        self._waiting: deque[QueuedEvent] = deque()
        self._events = 0
        self._dropped = 0
        self._sending: InFlightMessage | None = None
        self._some = asyncio.Event()
        self._name = uuid4().hex
        self._numbers = count(1)

    @property
    def waiting(self) -> int:
        """Events that are not published yet."""
        return self._events

    def emit(
        self,
        kind: str,
        *,
        show: UUID | str | None = None,
        jobs: Sequence[UUID] = (),
        runs: Sequence[UUID] = (),
        **facts: EventFact,
    ) -> None:
        """Something happened, to each of the jobs or runs if there are any. Never waits, and never fails."""
        untold = QueuedEvent(kind, self._clock.now_ms(), show, jobs, facts, runs)
        if self._events + untold.size > QUEUED_EVENTS_MAX:
            self._drop(untold.size, "full")
            return
        self._events += untold.size
        self._waiting.append(untold)
        self._some.set()

    def emit_job_states(self, came: Iterable[tuple[str, ShowId | str, str, UUID]]) -> None:
        """Jobs that came into a state: the state, whose it is, its topic and its id."""
        groups: dict[tuple[str, ShowId | str, str], list[UUID]] = defaultdict(list)
        for state, show, topic, job in came:
            groups[state, show, topic].append(job)
        for (state, show, topic), jobs in groups.items():
            for at in range(0, len(jobs), MESSAGE_EVENTS_MAX):
                self.emit(f"job.{state.lower()}", show=show, jobs=jobs[at : at + MESSAGE_EVENTS_MAX], topic=topic)

    def emit_job_retried(self, job: JobId, show: ShowId | str, new: JobId) -> None:
        self.emit(RETRIED_KIND, show=show, jobs=[job], runs=(), **{"as": str(new)})

    def emit_dead_letter(
        self, what: str, reason: str, show: ShowId | str | None = None, jobs: Sequence[UUID] = ()
    ) -> None:
        self.emit(DEAD_LETTER_KIND, show=show, jobs=jobs, what=what, reason=reason)

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publish_loop())
            life.ready()
            await life.until_draining()
            publishing.cancel()
        await self._publish_remaining()

    async def publish(self) -> None:
        """All that waits now. Kept until it is in the stream."""
        while self._sending is not None or self._waiting or self._dropped:
            if self._sending is None:
                self._sending = await self._next_message()
            await self._send(self._sending)
        self._some.clear()

    async def _publish_loop(self) -> None:
        streak = 0
        while True:
            await self._some.wait()
            try:
                await self.publish()
                streak = 0
            except NatsUnavailable as away:
                streak += 1
                log.info("events_wait", reason=away.sentence, waiting=self._events)
                await self._clock.sleep(PUBLISH_BACKOFF.pause_s(streak, 0.5))
            await self._clock.sleep(MIN_PUBLISH_INTERVAL_S)

    async def _publish_remaining(self) -> None:
        try:
            await self.publish()
        except NatsUnavailable:
            DROPPED.labels("ended").inc(self._events + (self._sending.events if self._sending else 0))

    async def _next_message(self) -> InFlightMessage:
        if self._shows is not None:
            await self._shows.ensure_loaded(untold.show for untold in islice(self._waiting, MESSAGE_GROUPS_MAX))
        groups: list[EventGroup] = []
        events, dropped = 0, self._dropped
        if dropped:
            groups.append(EventGroup(RESET_KIND, self._clock.now_ms(), facts={"because": "dropped", "events": dropped}))
        while self._waiting and len(groups) < MESSAGE_GROUPS_MAX:
            if events and events + self._waiting[0].size > MESSAGE_EVENTS_MAX:
                break
            untold = self._waiting.popleft()
            groups.append(self._event_group(untold))
            events += untold.size
        self._events -= events
        self._dropped -= dropped
        message = BusMessage(
            subject=EVENTS_SUBJECT, data=encode(EventMessage(groups)), msg_id=f"{self._name}:{next(self._numbers)}"
        )
        return InFlightMessage(message, events, dropped)

    def _event_group(self, untold: QueuedEvent) -> EventGroup:
        show, name = self._shows.resolve(untold.show) if self._shows is not None else (None, None)
        return EventGroup(
            untold.kind, untold.at_ms, show, name, join_ids(untold.jobs), dict(untold.facts), join_ids(untold.runs)
        )

    async def _send(self, sending: InFlightMessage) -> None:
        now_s = self._clock.monotonic()
        if sending.sent_at is not None and now_s - sending.sent_at > RESEND_WINDOW_S:
            self._give_up(sending, "unsettled")
            return
        [receipt] = await self.bus.publish_many([sending.message])
        if receipt.settled:
            PUBLISHED.inc(sending.events)
            self._sending = None
        elif receipt.outcome is PublishOutcome.REJECTED:
            log.error("events_rejected", reason=receipt.reason, events=sending.events)
            self._give_up(sending, "rejected")
            raise NatsUnavailable(f"NATS takes no events ({receipt.reason}): the next ones are tried after a pause.")
        else:
            sending.sent_at = sending.sent_at or now_s
            raise NatsUnavailable(f"Events were not taken by NATS ({receipt.reason}): they are sent again.")

    def _give_up(self, sending: InFlightMessage, reason: str) -> None:
        self._sending = None
        self._dropped += sending.dropped
        self._drop(sending.events, reason)

    def _drop(self, events: int, reason: str) -> None:
        DROPPED.labels(reason).inc(events)
        self._dropped += events
        self._some.set()
