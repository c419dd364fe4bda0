"""Values on their way in and out: small ones travel with the message, large ones lie in the store. So do artifacts.

Reading and writing the store is slow and may fail, so it happens apart from the loop, and a frame whose value is being
stored is still running. If we die in between, a file that nobody points to is left; the store's retention removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from rota.model.errors import InvalidSetting, RotaError
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker import outcomes
from rota.worker.data.artifacts import OutputNotStored
from rota.worker.data.blob_store import WorkerBlobStore
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame, StopReason
from rota.worker.outcomes import UnencodableResult

log = structlog.get_logger(__name__)


class Payloads:
    def __init__(self, desk: FrameTable, store: WorkerBlobStore | None) -> None:
        self._desk = desk
        self._store = store
        self._under_way: set[asyncio.Task[None]] = set()

    def resolve_result(
        self, batch: AssignedBatch, token: int, value: object, frame: RunningFrame | None = None
    ) -> AttemptResult | RunningFrame | None:
        """How a frame that returned `value` ended, or the frame while something of it is being stored.

        None: it succeeded, returned nothing and left nothing.
        """
        try:
            data = None if value is None else outcomes.encode_result(value)
        except UnencodableResult as error:
            return outcomes.unencodable_end(token, error)
        return self.resolve_encoded_result(batch, token, data, frame)

    def resolve_encoded_result(
        self, batch: AssignedBatch, token: int, data: bytes | None, frame: RunningFrame | None = None
    ) -> AttemptResult | RunningFrame | None:
        """The same for a value that is encoded already."""
        large = data is not None and len(data) > outcomes.INLINE_VALUE_BYTES_MAX
        if large or batch.work.artifacts or token in self._desk.leavings.open:
            frame = frame or self._desk.start_frame(batch, token)
            self._run_in_background(self.store_and_end(frame, data))
            return frame
        return None if data is None else AttemptResult(token, AttemptStatus.SUCCEEDED, data)

    async def store_and_end(self, frame: RunningFrame, data: bytes | None) -> None:
        """Store what a frame that has succeeded left and returned, then end it."""
        work, token = frame.work, frame.token
        pointer = None
        try:
            artifacts = await asyncio.to_thread(
                self._desk.leavings.store_all, token, work.artifacts, self._store, work.artifact_bytes_max
            )
            if data is not None and len(data) > outcomes.INLINE_VALUE_BYTES_MAX:
                pointer, data = await self._put_result(data), None
        except OutputNotStored as problem:
            self._desk.end(
                frame,
                AttemptResult(
                    token, AttemptStatus.FAILED, code=problem.code, error=outcomes.redact_and_truncate(str(problem))
                ),
            )
            return
        plain = data is None and pointer is None and not artifacts
        end = None if plain else AttemptResult(token, AttemptStatus.SUCCEEDED, data, pointer, artifacts=artifacts)
        self._desk.end(frame, end)

    def fetch_input(self, batch: AssignedBatch, then: Callable[[AssignedBatch], None]) -> None:
        """Get the input of a batch that has only a pointer, then go on."""
        self._run_in_background(self._get_input(batch, then))

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(set(self._under_way))

    async def _put_result(self, data: bytes) -> str:
        if self._store is None:
            raise OutputNotStored("result_too_large", outcomes.too_large_message(len(data)))
        try:
            return await asyncio.to_thread(self._store.put, data)
        except RotaError as error:
            log.warning("result_not_stored", code=error.code, reason=error.sentence)
            failure = f"The result of {len(data)} bytes could not be stored. {error.sentence}"
            raise OutputNotStored("result_too_large", failure) from error

    async def _get_input(self, batch: AssignedBatch, then: Callable[[AssignedBatch], None]) -> None:
        pointer = batch.portion.pointer or ""
        try:
            if self._store is None:
                raise InvalidSetting("This worker has no store.directory: set the one that the servers have.")
            batch.input = await asyncio.to_thread(self._store.get, pointer)
        except RotaError as error:
            reason = outcomes.redact_and_truncate(f"The input at {pointer} cannot be read. {error.sentence}")
            self._desk.fail_waiting(batch, StopReason(AttemptStatus.FAILED, "input_missing", reason))
        else:
            then(batch)

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
