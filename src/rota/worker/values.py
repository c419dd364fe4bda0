"""Values on their way in and out: small ones travel with the message, large ones lie in the store.

Reading and writing the store is slow and may fail, so it happens apart from the loop, and a frame whose value is being
stored is still running. If we die in between, a file that nobody points to is left; the store's retention removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from rota.model.errors import InvalidSetting, RotaError
from rota.model.messages import End, Status
from rota.worker import endings
from rota.worker.desk import Desk
from rota.worker.endings import Unencodable
from rota.worker.frames import Batch, Frame, Stop
from rota.worker.store import Store

log = structlog.get_logger(__name__)


class Values:
    def __init__(self, desk: Desk, store: Store | None) -> None:
        self._desk = desk
        self._store = store
        self._under_way: set[asyncio.Task[None]] = set()

    def ended(self, batch: Batch, token: int, value: object, frame: Frame | None = None) -> End | Frame:
        """How a frame that returned `value` ended, or the frame while its value is being stored."""
        try:
            data = endings.encoded(value)
        except Unencodable as error:
            return endings.unencodable(token, error)
        return self.ended_with(batch, token, data, frame)

    def ended_with(self, batch: Batch, token: int, data: bytes, frame: Frame | None = None) -> End | Frame:
        """The same for a value that is encoded already."""
        if len(data) <= endings.VALUE_MAX:
            return End(token, Status.SUCCEEDED, data)
        if self._store is None:
            return endings.too_large(token, len(data))
        frame = frame or self._desk.begin(batch, token)
        self._apart(self._put(frame, data, self._store))
        return frame

    def fetch(self, batch: Batch, then: Callable[[Batch], None]) -> None:
        """Get the input of a batch that has only a pointer, then go on."""
        self._apart(self._get(batch, then))

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    async def _put(self, frame: Frame, data: bytes, store: Store) -> None:
        try:
            pointer = await asyncio.to_thread(store.put, data)
        except RotaError as error:
            log.warning("result_not_stored", code=error.code, reason=error.sentence)
            failure = f"The result of {len(data)} bytes could not be stored. {error.sentence}"
            self._desk.end(frame, End(frame.token, Status.FAILED, code="result_too_large", error=failure))
        else:
            self._desk.end(frame, End(frame.token, Status.SUCCEEDED, pointer=pointer))

    async def _get(self, batch: Batch, then: Callable[[Batch], None]) -> None:
        pointer = batch.portion.pointer or ""
        try:
            if self._store is None:
                raise InvalidSetting("This worker has no store.directory: set the one that the servers have.")
            batch.input = await asyncio.to_thread(self._store.get, pointer)
        except RotaError as error:
            reason = endings.told(f"The input at {pointer} cannot be read. {error.sentence}")
            self._desk.fail_waiting(batch, Stop(Status.FAILED, "input_missing", reason))
        else:
            then(batch)

    def _apart(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
