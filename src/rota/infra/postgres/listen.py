"""LISTEN for the whole process on one dedicated connection, with reconnect.

A notification is only a hint: PostgreSQL stores none for a disconnected listener. Consumers follow one rule: `None`
means "notifications may have been missed, query the tables". It arrives after each reconnect, after a consumer's queue
overflowed, and when `next` timed out. Query once after entering as well: earlier commits are not notified again.

A terminated backend is detected immediately, a silently dead connection within `HEARTBEAT_INTERVAL_S` plus the
target's command timeout. Channel names are constants of the source, so a channel stays subscribed after its last
consumer leaves. `listen` during `close` is refused: after `close` neither a connection nor a task remains.
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
    """One consumer's queue: payloads, and `None` for "notifications may have been missed"."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(QUEUE_MAX)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str | None:
        return await self._queue.get()

    async def next(self, timeout_s: float) -> str | None:
        """The next payload, or None when some were missed or `timeout_s` elapsed."""
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
    """The listening connection of a `Database`: opened by the first consumer, kept until `close`."""

    def __init__(self, target: PostgresTarget) -> None:
        self._target = target
        self._consumers: dict[str, set[Notifications]] = {}
        self._connection: Connection | None = None
        self._reconnect_task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._lost = asyncio.Event()
        # A connection runs one statement at a time; this lock serializes heartbeats and new channels.
        self._statement_lock = asyncio.Lock()
        self._closing = False

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Notifications]:
        """Notifications on `channel` from now on: LISTEN is in effect when the body starts."""
        consumer = Notifications()
        self._consumers.setdefault(channel, set()).add(consumer)
        try:
            await self._start(channel)
            yield consumer
        finally:
            self._consumers[channel].discard(consumer)

    async def close(self) -> None:
        self._closing = True
        task, self._reconnect_task = self._reconnect_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    async def _start(self, channel: str) -> None:
        async with self._statement_lock:
            if self._closing:
                raise failures.stopping_error(self._target)
            if self._reconnect_task is None:
                await self._connect()
                self._reconnect_task = asyncio.create_task(self._reconnect_loop(), name="postgres.listen")
        try:
            async with asyncio.timeout(self._target.connect_timeout_s):
                await self._listening.wait()
                async with self._statement_lock:
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
        """Watch the connection until `close`; replace it when it is lost."""
        while True:
            await self._wait_until_lost()
            self._listening.clear()
            async with self._statement_lock:
                if self._connection is not None:
                    self._connection.terminate()
                    self._connection = None
            log.warning("postgres_listener_disconnected", address=self._target.address)
            await self._reconnect()
            for consumers in self._consumers.values():
                for consumer in consumers:
                    consumer.push(None)

    async def _wait_until_lost(self) -> None:
        while not self._lost.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self._lost.wait()
            if not await self._is_alive():
                return

    async def _is_alive(self) -> bool:
        async with self._statement_lock:
            if self._connection is None or self._connection.is_closed():
                return False
            try:
                await self._connection.execute("SELECT 1")
            except failures.FAILURES:
                return False
            return True

    async def _reconnect(self) -> None:
        failures_in_a_row = 0
        while True:
            try:
                async with self._statement_lock:
                    return await self._connect()
            except RotaError as error:
                if not isinstance(error, PostgresUnavailable):
                    log.warning("postgres_listener_reconnect_failed", error=error.sentence, code=error.code)
            failures_in_a_row += 1
            jitter = random.random()  # noqa: S311 - jitter, not a secret
            await asyncio.sleep(RECONNECT_BACKOFF.pause_s(failures_in_a_row, jitter))

    def _dispatch(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        for consumer in self._consumers.get(channel, ()):
            consumer.push(str(payload))
