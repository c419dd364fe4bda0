"""The event publisher: parts of the engine emit events into a queue, which is published moments later.

PostgreSQL is the record; the stream EVENTS saves clients from polling for changes. So:
- emitting never blocks: it appends to a queue in memory, after the commit. At most `QUEUED_EVENTS_MAX` events wait
  there while NATS is unavailable; further ones are dropped and counted;
- known gaps are visible: after dropped events the next message begins with a `reset`. A server that dies loses its
  queue, a few milliseconds of events; its death is published (`rota.engine.events.server_presence`);
- no event is published twice: a message with an unknown outcome is resent under the same id for `RESEND_WINDOW_S`,
  within NATS's deduplication window, and dropped after that, with a `reset`;
- every published event is committed. A commit whose outcome is unknown (its reply was lost) is not published: it may
  not have happened. This server publishes a `reset` in its place, as soon as NATS accepts it.

Messages are at least `MIN_PUBLISH_INTERVAL_S` apart, so a busy server sends few large ones. Names and ids of shows are
looked up here, in the background, not by the emitters.
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
"""Per message: some hundred kilobytes when written out for a client."""
MESSAGE_GROUPS_MAX: Final = 500
MIN_PUBLISH_INTERVAL_S: Final = 0.05
RESEND_WINDOW_S: Final = 50.0
PUBLISH_BACKOFF: Final = Backoff(first_s=0.1, longest_s=2.0)

PUBLISHED = metrics.counter("rota_events_told", "Events published.")
DROPPED = metrics.counter("rota_events_dropped", "Events that were not published, by reason.", labels=("reason",))


class QueuedEvent(NamedTuple):
    """A group before it is encoded; its show may be known by name only."""

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
    """A message until its publication is confirmed."""

    def __init__(self, message: BusMessage, events: int, dropped: int, *, unconfirmed: bool) -> None:
        self.message = message
        self.events = events
        self.dropped = dropped
        """Number of events dropped before it, as its `reset` says."""
        self.unconfirmed = unconfirmed
        """Whether it has a `reset` for unconfirmed commits."""
        self.sent_at: float | None = None
        """Time of the first attempt with an unknown outcome."""


class BatchPublisher(Protocol):
    async def publish_many(self, messages: Sequence[BusMessage], /) -> Sequence[PublishReceipt]: ...


class EventPublisher:
    """One per replica: `emit` from anywhere, at any time; `run` publishes.

    Without a database it serves events that concern no show.
    """

    def __init__(self, database: Database | None, bus: BatchPublisher, clock: Clock | None = None) -> None:
        self.bus = bus
        self._clock = clock or SystemClock()
        self._shows = ShowNameCache(database, self._clock) if database is not None else None
        self._queue: deque[QueuedEvent] = deque()
        self._queued_events = 0
        self._dropped = 0
        self._unconfirmed = False
        self._in_flight: InFlightMessage | None = None
        self._pending = asyncio.Event()
        self._name = uuid4().hex
        self._numbers = count(1)

    @property
    def waiting(self) -> int:
        """Number of events not published yet."""
        return self._queued_events

    def emit(
        self,
        kind: str,
        *,
        show: UUID | str | None = None,
        jobs: Sequence[UUID] = (),
        runs: Sequence[UUID] = (),
        **facts: EventFact,
    ) -> None:
        """Queue an event for each of the jobs or runs, or a single one without them. Never blocks, never fails."""
        event = QueuedEvent(kind, self._clock.now_ms(), show, jobs, facts, runs)
        if self._queued_events + event.size > QUEUED_EVENTS_MAX:
            self._drop(event.size, "full")
            return
        self._queued_events += event.size
        self._queue.append(event)
        self._pending.set()

    def emit_job_states(self, transitions: Iterable[tuple[str, ShowId | str, str, UUID]]) -> None:
        """Jobs that entered a state: (state, show, topic, job id) each."""
        groups: dict[tuple[str, ShowId | str, str], list[UUID]] = defaultdict(list)
        for state, show, topic, job in transitions:
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

    def report_unconfirmed(self) -> None:
        """A commit may have happened without its events: publish a `reset`. Never blocks, never fails."""
        self._unconfirmed = True
        self._pending.set()

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publish_loop())
            life.ready()
            await life.until_draining()
            publishing.cancel()
        await self._publish_remaining()

    async def publish(self) -> None:
        """Publish everything queued now; a message is kept until the stream has it."""
        while self._in_flight is not None or self._queue or self._dropped or self._unconfirmed:
            if self._in_flight is None:
                self._in_flight = await self._next_message()
            await self._send(self._in_flight)
        self._pending.clear()

    async def _publish_loop(self) -> None:
        streak = 0
        while True:
            await self._pending.wait()
            try:
                await self.publish()
                streak = 0
            except NatsUnavailable as error:
                streak += 1
                log.info("event_publishing_deferred", reason=error.sentence, waiting=self._queued_events)
                await self._clock.sleep(PUBLISH_BACKOFF.pause_s(streak, 0.5))
            await self._clock.sleep(MIN_PUBLISH_INTERVAL_S)

    async def _publish_remaining(self) -> None:
        try:
            await self.publish()
        except NatsUnavailable:
            DROPPED.labels("ended").inc(self._queued_events + (self._in_flight.events if self._in_flight else 0))

    async def _next_message(self) -> InFlightMessage:
        if self._shows is not None:
            await self._shows.ensure_loaded(event.show for event in islice(self._queue, MESSAGE_GROUPS_MAX))
        groups: list[EventGroup] = []
        events, dropped, unconfirmed = 0, self._dropped, self._unconfirmed
        if dropped:
            groups.append(EventGroup(RESET_KIND, self._clock.now_ms(), facts={"because": "dropped", "events": dropped}))
        if unconfirmed:
            groups.append(EventGroup(RESET_KIND, self._clock.now_ms(), facts={"because": "unconfirmed"}))
        while self._queue and len(groups) < MESSAGE_GROUPS_MAX:
            if events and events + self._queue[0].size > MESSAGE_EVENTS_MAX:
                break
            event = self._queue.popleft()
            groups.append(self._event_group(event))
            events += event.size
        self._queued_events -= events
        self._dropped -= dropped
        self._unconfirmed = False
        message = BusMessage(
            subject=EVENTS_SUBJECT, data=encode(EventMessage(groups)), msg_id=f"{self._name}:{next(self._numbers)}"
        )
        return InFlightMessage(message, events, dropped, unconfirmed=unconfirmed)

    def _event_group(self, event: QueuedEvent) -> EventGroup:
        show, name = self._shows.resolve(event.show) if self._shows is not None else (None, None)
        return EventGroup(
            event.kind, event.at_ms, show, name, join_ids(event.jobs), dict(event.facts), join_ids(event.runs)
        )

    async def _send(self, sending: InFlightMessage) -> None:
        now_s = self._clock.monotonic()
        if sending.sent_at is not None and now_s - sending.sent_at > RESEND_WINDOW_S:
            self._give_up(sending, "unsettled")
            return
        [receipt] = await self.bus.publish_many([sending.message])
        if receipt.settled:
            PUBLISHED.inc(sending.events)
            self._in_flight = None
        elif receipt.outcome is PublishOutcome.REJECTED:
            log.error("events_rejected", reason=receipt.reason, events=sending.events)
            self._give_up(sending, "rejected")
            raise NatsUnavailable(f"NATS rejects events ({receipt.reason}): publishing is retried after a pause.")
        else:
            sending.sent_at = sending.sent_at or now_s
            raise NatsUnavailable(f"NATS did not confirm events ({receipt.reason}): they are sent again.")

    def _give_up(self, sending: InFlightMessage, reason: str) -> None:
        self._in_flight = None
        self._dropped += sending.dropped
        self._unconfirmed = self._unconfirmed or sending.unconfirmed
        self._drop(sending.events, reason)

    def _drop(self, events: int, reason: str) -> None:
        DROPPED.labels(reason).inc(events)
        self._dropped += events
        self._pending.set()
