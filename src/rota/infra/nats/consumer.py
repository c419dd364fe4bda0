"""Consumes messages from a stream: pulls and deliveries.

A `Consumer` keeps at most one pull open at the server: "up to `most` messages, for `wait_s`". `fetch` returns messages
as they arrive and never waits for a full batch. The rest of an unfilled pull may arrive while a batch is processed: at
most `most` messages are buffered, and one buffered longer than its ack wait is dropped, because NATS has redelivered it
elsewhere by then.

Failures and their detection:
- the consumer or its stream is gone (JetStream was wiped): the server reports it in reply to a pull, and `restore`
  re-creates both; with `deliver="all"` no stored message is skipped;
- the pull is lost (reconnect, new leader): `on_connected` is called, or its heartbeats stop; the consumer is checked
  as above and the pull repeated;
- this process dies: NATS redelivers unacknowledged messages after their ack wait. An acknowledgement is therefore not
  a fence: a late one may acknowledge another reader's delivery. Handlers must be idempotent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog
from nats.aio.msg import Msg

from rota.infra.clock import Clock
from rota.infra.nats.connection import BusSubscription, NatsConnection
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.jetstream import API
from rota.infra.nats.streams import ConsumerSpec, NatsNames
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable, SetupFailed

log = structlog.get_logger(__name__)
LATE_DELIVERIES = metrics.counter(
    "rota_bus_late", "Messages dropped here after waiting longer than their ack wait.", labels=("consumer",)
)
CONSUMERS_RESTORED = metrics.counter(
    "rota_bus_restored", "Consumers ensured again because NATS seemed to have lost them.", labels=("consumer",)
)

HEARTBEAT_INTERVAL_S = 5.0
PULL_MIN_S = 0.1
PULL_BYTES_MAX = 64 * 1024 * 1024
"""Of the messages of one pull, so that large messages fill no memory, however many a pull asks for."""
PULL_RETRY_BACKOFF = Backoff(first_s=0.05, longest_s=2.0)

RestoreConsumer = Callable[[ConsumerSpec], Awaitable[None]]


class _Pull(msgspec.Struct):
    """One pull request. Up to `left` messages of it may still arrive."""

    subject: str
    most: int
    left: int
    heartbeat_s: float
    silent_at: float
    """Without a message or heartbeat by then, the server no longer knows the pull."""

    def touch(self, now: float) -> None:
        self.silent_at = now + 2 * self.heartbeat_s + PULL_MIN_S


class Consumer:
    """One reader of a durable consumer; readers in any process share its messages. For one task only."""

    def __init__(
        self, connection: NatsConnection, names: NatsNames, spec: ConsumerSpec, restore: RestoreConsumer, clock: Clock
    ) -> None:
        self.spec = spec
        self._connection = connection
        self._names = names
        self._restore = restore
        self._clock = clock
        self._next = f"{API}.CONSUMER.MSG.NEXT.{names.stream(spec.stream)}.{spec.durable}"
        self._waiting: deque[Delivery] = deque()
        self._changed = asyncio.Event()
        self._pull: _Pull | None = None
        self._pulls = 0
        self._lost = False
        self._failures = 0
        self._refusal = ""
        self._inbox = ""
        self._subscription: BusSubscription | None = None

    async def open(self) -> None:
        self._inbox = self._connection.new_inbox()
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._on_message)
        self._connection.watchers.add(self)

    async def close(self) -> None:
        """Stop pulling and return (nak) deliveries that were not fetched, for immediate redelivery.

        A message in flight for an unfilled pull may be missed; it is redelivered after its ack wait.
        """
        self._connection.watchers.discard(self)
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)
        self._pull = None
        with suppress(NatsUnavailable):
            while self._waiting:
                await self._waiting.popleft().nak()

    async def batches(self, most: int = 256, wait_s: float = 30.0) -> AsyncIterator[list[Delivery]]:
        """Non-empty batches, forever, across outages."""
        while True:
            if batch := await self.fetch(most, wait_s):
                yield batch

    async def fetch(self, most: int = 256, wait_s: float = 30.0) -> list[Delivery]:
        """The arrived messages, at most `most`; waits for the first. Empty when none arrived within `wait_s`.

        A pull takes a round trip, so the wait is at least `PULL_MIN_S`. Safe to cancel without losing a message. An
        outage is only a long wait.
        """
        deadline = self._clock.monotonic() + max(wait_s, PULL_MIN_S)
        while not (batch := self._take(most)):
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                break
            await self._step(most, left_s)
        return batch

    def on_connected(self) -> None:
        # The server dropped the pull with the old connection.
        self._end_pull()

    def on_disconnected(self) -> None:
        self._end_pull()

    def _take(self, most: int) -> list[Delivery]:
        now = self._clock.monotonic()
        batch: list[Delivery] = []
        while self._waiting and len(batch) < most:
            delivery = self._waiting.popleft()
            if now < delivery.expires_at:
                batch.append(delivery)
            else:
                LATE_DELIVERIES.labels(self.spec.durable).inc()
        return batch

    async def _step(self, most: int, left_s: float) -> None:
        """One step towards the next message: connect, recover, pull or wait, for at most `left_s`."""
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            raise SetupFailed(f"NATS refuses to deliver messages of consumer {self.spec.durable}: {refusal}.")
        if not self._connection.connected:
            await self._connection.until_connected(left_s)
        elif self._pull is not None:
            await self._await_pull(self._pull, left_s)
        elif self._failures and not await self._recover(left_s):
            return
        else:
            await self._send_pull(most, left_s)

    async def _recover(self, left_s: float) -> bool:
        """Wait out the back-off after a failed pull and restore a lost consumer. False when restoring failed."""
        pause_s = PULL_RETRY_BACKOFF.pause_s(self._failures, 0.5)
        await self._clock.sleep(min(pause_s, left_s))
        if not self._lost:
            return True
        try:
            async with asyncio.timeout(left_s):
                await self._restore(self.spec)
        except (NatsUnavailable, TimeoutError):
            self._failures += 1
            return False
        self._lost = False
        CONSUMERS_RESTORED.labels(self.spec.durable).inc()
        log.warning("consumer_restored", stream=self.spec.stream, consumer=self.spec.durable)
        return True

    async def _send_pull(self, most: int, wait_s: float) -> None:
        expires_s = max(wait_s, PULL_MIN_S)
        heartbeat_s = min(HEARTBEAT_INTERVAL_S, expires_s / 2)
        self._pulls += 1
        pull = _Pull(f"{self._inbox}.{self._pulls}", most, most, heartbeat_s, 0.0)
        pull.touch(self._clock.monotonic())
        request = {
            "batch": most,
            "max_bytes": PULL_BYTES_MAX,
            "expires": round(expires_s * 1e9),
            "idle_heartbeat": int(heartbeat_s * 1e9),
        }
        self._pull = pull
        try:
            await self._connection.send(self._next, msgspec.json.encode(request), reply=pull.subject)
        except NatsUnavailable:
            self._failures += 1
            self._end_pull()

    async def _await_pull(self, pull: _Pull, left_s: float) -> None:
        """Wait for a message, the end of the pull, or a silence that means it was lost."""
        self._changed.clear()
        now = self._clock.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, pull.silent_at - now)):
                await self._changed.wait()
        if self._pull is pull and self._clock.monotonic() >= pull.silent_at:
            log.info("pull_timed_out", consumer=self.spec.durable)
            # Servers before 2.10 do not reply to a pull on a missing consumer.
            self._failures += 1
            self._lost = True
            self._end_pull()

    async def _on_message(self, msg: Msg) -> None:
        if msg.subject.startswith(self._inbox):
            self._on_status(msg)
            return
        now = self._clock.monotonic()
        self._waiting.append(Delivery(msg, self._connection, self._names, self.spec, now))
        self._failures = 0
        if self._pull is not None:
            self._pull.touch(now)
            self._pull.left -= 1
            if self._pull.left <= 0:
                self._pull = None
        self._changed.set()

    def _on_status(self, msg: Msg) -> None:
        """A status message about the pull: heartbeat, end or error."""
        if self._pull is None or msg.subject != self._pull.subject:
            return
        headers = msg.headers or {}
        status, description = headers.get("Status"), headers.get("Description", "")
        match status:
            case "100":
                self._pull.touch(self._clock.monotonic())
                return
            case "404" | "408":
                self._failures = 0
            case "409" if self._pull.left < self._pull.most and "Exceeds MaxBytes" in description:
                self._failures = 0  # the pull is full
            case "400":
                self._refusal = description
            case _:
                # 503: no responder. 409: consumer deleted, new leader, or too many pulls.
                self._failures += 1
                self._lost = self._lost or status == "503" or "Deleted" in description
                log.info("pull_ended", consumer=self.spec.durable, status=status, description=description.strip())
        self._end_pull()

    def _end_pull(self) -> None:
        self._pull = None
        self._changed.set()


@asynccontextmanager
async def keep_in_progress(
    deliveries: Callable[[], Iterable[Delivery]], every_s: float, clock: Clock
) -> AsyncIterator[None]:
    """Send "in progress" every `every_s` for what `deliveries` returns then, so that NATS does not redeliver it."""
    task = asyncio.create_task(_send_in_progress(deliveries, every_s, clock), name="nats.in_progress")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _send_in_progress(deliveries: Callable[[], Iterable[Delivery]], every_s: float, clock: Clock) -> None:
    while True:
        await clock.sleep(every_s)
        with suppress(NatsUnavailable):
            for delivery in list(deliveries()):
                if not delivery.settled:
                    await delivery.in_progress()
