"""Values on their way in and out: small ones travel with the message, large ones lie in the store. So do artifacts.

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
from rota.worker.leavings import Unkept
from rota.worker.store import Store

log = structlog.get_logger(__name__)


class Values:
    def __init__(self, desk: Desk, store: Store | None) -> None:
        self._desk = desk
        self._store = store
        self._under_way: set[asyncio.Task[None]] = set()

    def ended(self, batch: Batch, token: int, value: object, frame: Frame | None = None) -> End | Frame | None:
        """How a frame that returned `value` ended, or the frame while something of it is being stored.

        None: it succeeded, returned nothing and left nothing.
        """
        try:
            data = None if value is None else endings.encoded(value)
        except Unencodable as error:
            return endings.unencodable(token, error)
        return self.ended_with(batch, token, data, frame)

    def ended_with(
        self, batch: Batch, token: int, data: bytes | None, frame: Frame | None = None
    ) -> End | Frame | None:
        """The same for a value that is encoded already."""
        large = data is not None and len(data) > endings.VALUE_MAX
        if large or batch.work.artifacts or token in self._desk.leavings.open:
            frame = frame or self._desk.begin(batch, token)
            self._apart(self.keep(frame, data))
            return frame
        return None if data is None else End(token, Status.SUCCEEDED, data)

    async def keep(self, frame: Frame, data: bytes | None) -> None:
        """Store what a frame that has succeeded left and returned, then end it."""
        work, token = frame.work, frame.token
        pointer = None
        try:
            artifacts = await asyncio.to_thread(
                self._desk.leavings.take, token, work.artifacts, self._store, work.artifact_bytes_max
            )
            if data is not None and len(data) > endings.VALUE_MAX:
                pointer, data = await self._put(data), None
        except Unkept as problem:
            self._desk.end(frame, End(token, Status.FAILED, code=problem.code, error=endings.told(str(problem))))
            return
        plain = data is None and pointer is None and not artifacts
        end = None if plain else End(token, Status.SUCCEEDED, data, pointer, artifacts=artifacts)
        self._desk.end(frame, end)

    def fetch(self, batch: Batch, then: Callable[[Batch], None]) -> None:
        """Get the input of a batch that has only a pointer, then go on."""
        self._apart(self._get(batch, then))

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    async def _put(self, data: bytes) -> str:
        if self._store is None:
            raise Unkept("result_too_large", endings.too_large(len(data)))
        try:
            return await asyncio.to_thread(self._store.put, data)
        except RotaError as error:
            log.warning("result_not_stored", code=error.code, reason=error.sentence)
            failure = f"The result of {len(data)} bytes could not be stored. {error.sentence}"
            raise Unkept("result_too_large", failure) from error

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
