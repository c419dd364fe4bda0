"""Frame logs: received from workers, stored by day, read back in order.

Workers publish chunks as core NATS messages, and one server receives each; they are not redelivered, so a chunk may be
lost, which its offset in the stream reveals. Invariants:
- bounded memory: at most `BUFFER_BYTES` wait to be written, further chunks are dropped and counted;
- bounded tables: `FRAME_BYTES_MAX` per frame and server, `CHUNK_BYTES_MAX` per chunk; days are dropped by retention
  (`rota.engine.recovery.retention`);
- chunks are written in batches. A batch with an unknown commit outcome is written again, so chunks may be stored twice;
  readers skip bytes they have read.

A chunk belongs to the attempt of its token, which the queue knows while the claim is in its ring; chunks of unknown
attempts are dropped. A crash loses chunks received and not yet written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.api.jobs import JobView
from rota.api.logs import STREAMS, Stream
from rota.engine.queries.jobs import JobQueries
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, CoreMessage
from rota.infra.postgres import Database, Record, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.ids import JobId, LayerId
from rota.model.policy.outputs import check_readable
from rota.model.protocol import LOG_SUBJECT, LogChunk, decode
from rota.queue.queue import LOOKUP_TOKENS
from rota.queue.tokens import masks_of

ADD = query(__package__, "logs_add")
READ = query(__package__, "logs_read")

log = structlog.get_logger(__name__)

RECEIVE_QUEUE_MAX: Final = 1024
BUFFER_BYTES: Final = 32 * 1024 * 1024
BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH: Final = 1000
CHUNK_BYTES_MAX: Final = 256 * 1024
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
CACHE_MAX: Final = 20_000
OFFSET_END: Final = 2**53
DEBOUNCE_S: Final = 0.05
"""Chunks that arrive within this time are written together."""
RETRY_BACKOFF: Final = Backoff(0.2, 5.0)
READ_MAX: Final = 1000

STORED_BYTES = metrics.counter("rota_log_bytes", "Bytes of logs stored.")
DROPPED = metrics.counter("rota_log_dropped", "Log chunks dropped, by reason.", labels=("reason",))


class LogOwner(msgspec.Struct, frozen=True):
    """The attempt that a log belongs to."""

    layer: UUID
    frame: int
    """Its queue number."""
    attempt: int


class LogWriter:
    """Runs in every replica; each chunk is received by one."""

    def __init__(self, database: Database, bus: Bus, *, clock: Clock | None = None) -> None:
        self.database = database
        self.bus = bus
        self._clock = clock or SystemClock()
        self._buffer: deque[LogChunk] = deque()
        self._bytes = 0
        self._has_chunks = asyncio.Event()
        self._owners: dict[int, LogOwner] = {}
        self._written: dict[int, int] = {}
        """Bytes accepted per token; best effort, since the cache is bounded."""

    async def run(self, life: Lifecycle) -> None:
        async with (
            self.bus.subscribe_core(LOG_SUBJECT, group="rota-servers", most=RECEIVE_QUEUE_MAX) as messages,
            asyncio.TaskGroup() as tasks,
        ):
            loops = [tasks.create_task(self._receive(messages)), tasks.create_task(self._write_loop())]
            life.ready()
            await life.until_draining()
            for task in loops:
                task.cancel()
        await self._write_remaining()

    async def _receive(self, messages: asyncio.Queue[CoreMessage]) -> None:
        while True:
            self.enqueue(await messages.get())

    def enqueue(self, message: CoreMessage) -> None:
        """Buffer a chunk for writing, or drop it."""
        try:
            chunk = decode(LogChunk, message.data)
        except InvalidInput:
            DROPPED.labels("unreadable").inc()
            return
        if (why := self._drop_reason(chunk)) is not None:
            DROPPED.labels(why).inc()
            return
        self._buffer.append(chunk)
        self._bytes += len(chunk.data)
        self._count_bytes(chunk)
        self._has_chunks.set()

    def _drop_reason(self, chunk: LogChunk) -> str | None:
        if not 0 <= chunk.token < OFFSET_END or not 0 <= chunk.at < OFFSET_END or not 0 <= chunk.dropped < OFFSET_END:
            return "unreadable"
        if len(chunk.data) > CHUNK_BYTES_MAX:
            return "too_large"
        if self._written.get(chunk.token, 0) + len(chunk.data) > FRAME_BYTES_MAX:
            return "frame_limit"
        return "full" if self._bytes + len(chunk.data) > BUFFER_BYTES else None

    def _count_bytes(self, chunk: LogChunk) -> None:
        if len(self._written) >= CACHE_MAX:
            self._written.clear()
        self._written[chunk.token] = self._written.get(chunk.token, 0) + len(chunk.data)

    async def _write_loop(self) -> None:
        streak = 0
        while True:
            await self._has_chunks.wait()
            await self._clock.sleep(DEBOUNCE_S)
            try:
                await self.flush()
                streak = 0
            except PostgresUnavailable as error:
                streak += 1
                log.warning("log_write_failed", reason=error.sentence, waiting=len(self._buffer))
                await self._clock.sleep(RETRY_BACKOFF.pause_s(streak, 0.5))

    async def _write_remaining(self) -> None:
        try:
            await self.flush()
        except PostgresUnavailable:
            DROPPED.labels("ended").inc(len(self._buffer))

    async def flush(self) -> None:
        """Write the buffer. A chunk stays in it until it is written."""
        while self._buffer:
            batch = self._next_batch()
            await self._write_batch(batch)
            for _ in batch:
                self._bytes -= len(self._buffer.popleft().data)
        self._has_chunks.clear()

    def _next_batch(self) -> list[LogChunk]:
        batch: list[LogChunk] = []
        size = 0
        for chunk in self._buffer:
            size += len(chunk.data)
            if batch and (size > BATCH_BYTES or len(batch) >= BATCH):
                break
            batch.append(chunk)
        return batch

    async def _write_batch(self, batch: Sequence[LogChunk]) -> None:
        owners = await self._owners_of({chunk.token for chunk in batch})
        known = [(chunk, owners[chunk.token]) for chunk in batch if chunk.token in owners]
        if known:
            await self.database.run(
                ADD,
                [owner.layer for _, owner in known],
                [owner.frame for _, owner in known],
                [owner.attempt for _, owner in known],
                [chunk.token for chunk, _ in known],
                [chunk.stream for chunk, _ in known],
                [chunk.at for chunk, _ in known],
                [chunk.dropped for chunk, _ in known],
                [chunk.data for chunk, _ in known],
                [chunk.last for chunk, _ in known],
            )
        DROPPED.labels("unknown_frame").inc(len(batch) - len(known))
        STORED_BYTES.inc(sum(len(chunk.data) for chunk, _ in known))

    async def _owners_of(self, tokens: set[int]) -> dict[int, LogOwner]:
        unknown = sorted(tokens.difference(self._owners))
        if unknown:
            if len(self._owners) >= CACHE_MAX:
                self._owners.clear()
                unknown = sorted(tokens)
            for row in await self.database.rows(LOOKUP_TOKENS, *masks_of(unknown)):
                self._owners[row["token"]] = LogOwner(row["layer_id"], row["frame"], row["attempt"])
        return {token: self._owners[token] for token in tokens if token in self._owners}


class LogSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a stream from offset `at` on."""

    attempt: int
    stream: Stream
    at: int
    data: bytes
    dropped: int = 0
    """Bytes right before it that exceeded the limits."""
    lost: int = 0
    """Bytes right before it that are missing for another reason: they may still arrive, or are lost."""
    last: bool = False
    """End of this stream."""


class LogReader:
    """Reads frame logs."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._jobs = JobQueries(database)

    async def read(
        self,
        job: JobId,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        stream: Stream | None = None,
        after: int = 0,
        most: int = 100,
    ) -> list[LogSegment]:
        """The log of a frame, stream by stream, each in order; of its last attempt unless one is given.

        Without a frame or layer: the first one. To continue a stream, name it and pass as `after` the offset behind the
        last byte read.
        """
        if not 1 <= most <= READ_MAX:
            raise InvalidInput(f"{most} is not a valid number of segments: use 1 to {READ_MAX}.")
        found = await self._jobs.get(job)
        pk_layer, place = _locate_frame(found, layer, frame)
        rows = await self.database.rows(READ, pk_layer, place, attempt, stream, max(after, 0), most)
        if not rows:
            withheld = await self._jobs.withheld_outputs(pk_layer, frame=place, most=1)
            check_readable(withheld.get(place), found.id, found.frame_number(pk_layer, place))
        return _to_segments(rows, after if stream is not None else 0)


def _locate_frame(job: JobView, name: str | None, frame: int | None) -> tuple[LayerId, int]:
    layers = [layer for layer in job.layers if name is None or layer.name == name]
    if not layers:
        names = ", ".join(layer.name for layer in job.layers)
        raise InvalidInput(f"Job {job.id} has no layer {name!r}: it has {names}.")
    frames = layers[0].frames
    place = frames.queue_ranges()[0][0] if frame is None else frames.queue_number(frame)
    if place is None:
        raise InvalidInput(f"Layer {layers[0].name} of job {job.id} has no frame {frame}.")
    return layers[0].id, place


def _to_segments(rows: Sequence[Record], after: int) -> list[LogSegment]:
    """Rows in order as segments that do not overlap; missing bytes are counted in the next segment."""
    segments: list[LogSegment] = []
    ends = dict.fromkeys(STREAMS, after)
    for row in rows:
        stream: Stream = row["stream"]
        at, data = row["at"], bytes(row["data"])
        read = max(0, ends[stream] - at)
        if read >= len(data) and not row["last"]:
            continue
        missing = max(0, at - ends[stream])
        dropped = min(row["dropped"], missing)
        ends[stream] = max(ends[stream], at + len(data))
        segments.append(
            LogSegment(
                attempt=row["attempt"],
                stream=stream,
                at=at + read,
                data=data[read:],
                dropped=dropped,
                lost=missing - dropped,
                last=row["last"],
            )
        )
    return segments
