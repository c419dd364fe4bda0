"""Taking messages from a stream: pulls, deliveries and their answers.

A `Consumer` keeps at most one pull at the server: "up to `most` messages, for `wait_s`". Messages come as they are
stored; `fetch` hands out what has come and never waits for a batch to fill. The rest of an unfilled pull may arrive
while a batch is being worked on: at most `most` messages lie here, and one that lay longer than its ack wait is
dropped, because by then NATS has given it to somebody else.

What may go wrong, and who sees it:
- the consumer or its stream is gone (JetStream was wiped): the server says so in answer to a pull, and `restore` makes
  both anew; with `deliver="all"` nothing that is stored is skipped;
- the pull is lost (reconnect, new leader): `up` is called, or its heartbeats stop; we look after the consumer, as
  above, and pull again;
- we die: NATS delivers again what was not acknowledged, after its ack wait. An acknowledgement is therefore not a
  fence: a late one may answer for somebody else's delivery. Handlers must be idempotent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
    "rota_bus_late", "Messages that lay here for longer than their ack wait.", labels=("consumer",)
)
CONSUMERS_RESTORED = metrics.counter(
    "rota_bus_restored", "Consumers ensured again because NATS seemed to have lost them.", labels=("consumer",)
)

HEARTBEAT_INTERVAL_S = 5.0
PULL_MIN_S = 0.1
PULL_RETRY_BACKOFF = Backoff(first_s=0.05, longest_s=2.0)

RestoreConsumer = Callable[[ConsumerSpec], Awaitable[None]]


class _Pull(msgspec.Struct):
    """One question for messages. `left` of what was asked may still come."""

    subject: str
    left: int
    heartbeat_s: float
    silent_at: float
    """When not even a heartbeat has come until then, nobody works on it any more."""

    def touch(self, now: float) -> None:
        self.silent_at = now + 2 * self.heartbeat_s + PULL_MIN_S


class Consumer:
    """One reader of a durable consumer; several in one process or in many share its messages. Not for two tasks."""

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
        self._route: BusSubscription | None = None

    async def open(self) -> None:
        self._inbox = self._connection.new_inbox()
        self._route = await self._connection.subscribe(f"{self._inbox}.*", self._on_message)
        self._connection.watchers.add(self)

    async def close(self) -> None:
        """Stop pulling and hand back at once what was delivered and not taken.

        A message that NATS was just sending for an unfilled pull may still be lost on the way; it comes again after
        its ack wait.
        """
        self._connection.watchers.discard(self)
        if self._route is not None:
            await self._connection.unsubscribe(self._route)
        self._pull = None
        with suppress(NatsUnavailable):
            while self._waiting:
                await self._waiting.popleft().nak()

    async def batches(self, most: int = 256, wait_s: float = 30.0) -> AsyncIterator[list[Delivery]]:
        """Batches for ever, through outages; never an empty one."""
        while True:
            if batch := await self.fetch(most, wait_s):
                yield batch

    async def fetch(self, most: int = 256, wait_s: float = 30.0) -> list[Delivery]:
        """What has come, `most` at most; waits for the first. Empty when none came within `wait_s`.

        Asking takes a round trip, so the wait is `SHORTEST_PULL_S` at least. May be cancelled at any moment without
        losing a message. An outage is only a long wait.
        """
        deadline = self._clock.monotonic() + max(wait_s, PULL_MIN_S)
        while not (batch := self._take(most)):
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                break
            await self._step(most, left_s)
        return batch

    def on_connected(self) -> None:
        # Whatever was asked on the old connection is forgotten by the server.
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
        """One step towards the next message: connect, mend, ask or wait, for `left_s` at most."""
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            raise SetupFailed(f"NATS refuses to hand out messages of consumer {self.spec.durable}: {refusal}.")
        if not self._connection.connected:
            await self._connection.until_connected(left_s)
        elif self._pull is not None:
            await self._await_pull(self._pull, left_s)
        elif self._failures and not await self._recover(left_s):
            return
        else:
            await self._send_pull(most, left_s)

    async def _recover(self, left_s: float) -> bool:
        """Wait out the pause after a failed pull, and mend what was lost. False when it could not be mended."""
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
        pull = _Pull(f"{self._inbox}.{self._pulls}", most, heartbeat_s, 0.0)
        pull.touch(self._clock.monotonic())
        question = {"batch": most, "expires": round(expires_s * 1e9), "idle_heartbeat": int(heartbeat_s * 1e9)}
        self._pull = pull
        try:
            await self._connection.send(self._next, msgspec.json.encode(question), reply=pull.subject)
        except NatsUnavailable:
            self._failures += 1
            self._end_pull()

    async def _await_pull(self, pull: _Pull, left_s: float) -> None:
        """Wait for a message, for the end of the pull or for a silence that means it was lost."""
        self._changed.clear()
        now = self._clock.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, pull.silent_at - now)):
                await self._changed.wait()
        if self._pull is pull and self._clock.monotonic() >= pull.silent_at:
            log.info("pull_went_silent", consumer=self.spec.durable)
            # Servers before 2.10 say nothing to a pull on a consumer that they do not have.
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
        """The server speaks about a pull itself: it is alive, it is over, or it cannot be."""
        if self._pull is None or msg.subject != self._pull.subject:
            return
        headers = msg.headers or {}
        status, said = headers.get("Status"), headers.get("Description", "")
        match status:
            case "100":
                self._pull.touch(self._clock.monotonic())
                return
            case "404" | "408":
                self._failures = 0
            case "400":
                self._refusal = said
            case _:
                # 503: nobody there. 409: deleted, a new leader, or too many pulls.
                self._failures += 1
                self._lost = self._lost or status == "503" or "Deleted" in said
                log.info("pull_ended", consumer=self.spec.durable, status=status, said=said.strip())
        self._end_pull()

    def _end_pull(self) -> None:
        self._pull = None
        self._changed.set()


@asynccontextmanager
async def keep_in_progress(deliveries: Sequence[Delivery], every_s: float, clock: Clock) -> AsyncIterator[None]:
    """Tell NATS every `every_s` that these are being worked on, so that it does not deliver them again."""
    beat = asyncio.create_task(_send_in_progress(deliveries, every_s, clock), name="nats.in_progress")
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.wait([beat])


async def _send_in_progress(deliveries: Sequence[Delivery], every_s: float, clock: Clock) -> None:
    while True:
        await clock.sleep(every_s)
        with suppress(NatsUnavailable):
            for delivery in deliveries:
                if not delivery.settled:
                    await delivery.in_progress()
