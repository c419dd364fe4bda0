"""LISTEN for a whole process on one connection of its own, through restarts of the server.

A notification is a hint and never the truth: PostgreSQL keeps none for a listener that is away. Hence the one rule for
consumers: `None` means "some may have been missed, look for yourself". It comes after each reconnect, when a consumer
was too slow for its queue, and when `next` ran out of time. Look once after entering, too: what was committed before is
not repeated.

A backend that was terminated is noticed at once, a connection that died silently within `HEARTBEAT_S` plus the target's
command timeout. Channel names are constants of the source: a channel stays listened to when its last consumer leaves.
Whoever begins to listen while we close is refused: after `close` there is neither a connection nor a task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

import structlog

from rota.infra.postgres import failures
from rota.infra.postgres.driver import Connection, close_connection, connect
from rota.infra.postgres.target import PostgresTarget
from rota.model.backoff import Backoff
from rota.model.errors import PostgresUnavailable, RotaError

log = structlog.get_logger(__name__)

HEARTBEAT_INTERVAL_S = 10.0
RECONNECT_BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
QUEUE_MAX = 1024


class Notifications:
    """What one consumer was told: payloads, and `None` for "look for yourself"."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(QUEUE_MAX)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str | None:
        return await self._queue.get()

    async def next(self, timeout_s: float) -> str | None:
        """The next payload, or None when it is time to look: some were missed, or `timeout_s` went by."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None

    def push(self, payload: str | None) -> None:
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
            payload = None
        self._queue.put_nowait(payload)


class NotificationListener:
    """The one listening connection of a `Database`: opened by the first consumer, kept until `close`."""

    def __init__(self, target: PostgresTarget) -> None:
        self._target = target
        self._consumers: dict[str, set[Notifications]] = {}
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._lost = asyncio.Event()
        # A connection runs one statement at a time; this orders heartbeats and new channels.
        self._turn = asyncio.Lock()
        self._closing = False

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Notifications]:
        """Notifications on `channel` from now on: the LISTEN is in force when the body starts."""
        consumer = Notifications()
        self._consumers.setdefault(channel, set()).add(consumer)
        try:
            await self._start(channel)
            yield consumer
        finally:
            self._consumers[channel].discard(consumer)

    async def close(self) -> None:
        self._closing = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    async def _start(self, channel: str) -> None:
        async with self._turn:
            if self._closing:
                raise failures.stopping_error(self._target)
            if self._keeper is None:
                await self._connect()
                self._keeper = asyncio.create_task(self._reconnect_loop(), name="postgres.listen")
        try:
            async with asyncio.timeout(self._target.connect_timeout_s):
                await self._listening.wait()
                async with self._turn:
                    await self._add_channel(channel)
        except failures.FAILURES as error:
            raise failures.on_connect(error, self._target) from None

    async def _add_channel(self, channel: str) -> None:
        if self._connection is None:
            raise ConnectionResetError
        await self._connection.add_listener(channel, self._dispatch)

    async def _connect(self) -> None:
        """Open the connection and listen to every channel that has a consumer."""
        connection = await connect(self._target)
        self._lost.clear()
        try:
            connection.add_termination_listener(lambda *_: self._lost.set())
            for channel in [name for name, consumers in self._consumers.items() if consumers]:
                await connection.add_listener(channel, self._dispatch)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, failures.FAILURES):
                raise failures.on_connect(error, self._target) from None
            raise
        if self._closing:
            connection.terminate()
            raise failures.stopping_error(self._target)
        self._connection = connection
        self._listening.set()

    async def _reconnect_loop(self) -> None:
        """Watch the connection for as long as this process listens; replace it when it is lost."""
        while True:
            await self._wait_until_lost()
            self._listening.clear()
            async with self._turn:
                if self._connection is not None:
                    self._connection.terminate()
                    self._connection = None
            log.warning("postgres_listen_lost", address=self._target.address)
            await self._reconnect()
            for consumers in self._consumers.values():
                for consumer in consumers:
                    consumer.push(None)

    async def _wait_until_lost(self) -> None:
        """Return when the connection is gone."""
        while not self._lost.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self._lost.wait()
            if not await self._is_alive():
                return

    async def _is_alive(self) -> bool:
        async with self._turn:
            if self._connection is None or self._connection.is_closed():
                return False
            try:
                await self._connection.execute("SELECT 1")
            except failures.FAILURES:
                return False
            return True

    async def _reconnect(self) -> None:
        streak = 0
        while True:
            try:
                async with self._turn:
                    return await self._connect()
            except RotaError as error:
                if not isinstance(error, PostgresUnavailable):
                    log.warning("postgres_listen_refused", error=error.sentence, code=error.code)
            streak += 1
            chance = random.random()  # noqa: S311 - spreads replicas, keeps no secret
            await asyncio.sleep(RECONNECT_BACKOFF.pause_s(streak, chance))

    def _dispatch(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        for consumer in self._consumers.get(channel, ()):
            consumer.push(str(payload))
