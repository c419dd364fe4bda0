"""Inputs and results: small values are sent inside messages, large ones and artifacts through the blob store.

Store access is slow and may fail, so it runs in threads; a frame whose result is being stored still counts as running.
Crash in between: an unreferenced file remains until the store's retention removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from rota.model.attempt_codes import AttemptCode
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
    def __init__(self, frame_table: FrameTable, store: WorkerBlobStore | None) -> None:
        self._frame_table = frame_table
        self._store = store
        self._background_tasks: set[asyncio.Task[None]] = set()

    def resolve_result(
        self, batch: AssignedBatch, token: int, value: object, frame: RunningFrame | None = None
    ) -> AttemptResult | RunningFrame | None:
        """The end of a frame that returned `value`, or the frame itself while its output is being stored.

        None: it succeeded without a result or artifacts.
        """
        try:
            data = None if value is None else outcomes.encode_result(value)
        except UnencodableResult as error:
            return outcomes.unencodable_end(token, error)
        return self.resolve_encoded_result(batch, token, data, frame)

    def resolve_encoded_result(
        self, batch: AssignedBatch, token: int, data: bytes | None, frame: RunningFrame | None = None
    ) -> AttemptResult | RunningFrame | None:
        """As `resolve_result`, for an encoded value."""
        large = data is not None and len(data) > outcomes.INLINE_VALUE_BYTES_MAX
        if large or batch.work.artifacts or token in self._frame_table.artifacts.open:
            frame = frame or self._frame_table.start_frame(batch, token)
            self._run_in_background(self.store_and_end(frame, data))
            return frame
        return None if data is None else AttemptResult(token, AttemptStatus.SUCCEEDED, data)

    async def store_and_end(self, frame: RunningFrame, data: bytes | None) -> None:
        """Stores the artifacts and result of a successful frame, then ends it."""
        work, token = frame.work, frame.token
        pointer = None
        try:
            artifacts = await asyncio.to_thread(
                self._frame_table.artifacts.store_all, token, work.artifacts, self._store, work.artifact_bytes_max
            )
            if data is not None and len(data) > outcomes.INLINE_VALUE_BYTES_MAX:
                pointer, data = await self._put_result(data), None
        except OutputNotStored as problem:
            self._frame_table.end(
                frame,
                AttemptResult(
                    token, AttemptStatus.FAILED, code=problem.code, error=outcomes.redact_and_truncate(str(problem))
                ),
            )
            return
        plain = data is None and pointer is None and not artifacts
        end = None if plain else AttemptResult(token, AttemptStatus.SUCCEEDED, data, pointer, artifacts=artifacts)
        self._frame_table.end(frame, end)

    def fetch_input(self, batch: AssignedBatch, then: Callable[[AssignedBatch], None]) -> None:
        """Reads the input of a batch from the blob store, then calls `then` with the batch."""
        self._run_in_background(self._get_input(batch, then))

    async def close(self) -> None:
        for task in self._background_tasks:
            task.cancel()
        if self._background_tasks:
            await asyncio.wait(set(self._background_tasks))

    async def _put_result(self, data: bytes) -> str:
        if self._store is None:
            raise OutputNotStored(AttemptCode.RESULT_TOO_LARGE, outcomes.too_large_message(len(data)))
        try:
            return await asyncio.to_thread(self._store.put, data)
        except RotaError as error:
            log.warning("result_store_failed", code=error.code, reason=error.sentence)
            failure = f"The result of {len(data)} bytes could not be stored. {error.sentence}"
            raise OutputNotStored(AttemptCode.RESULT_TOO_LARGE, failure) from error

    async def _get_input(self, batch: AssignedBatch, then: Callable[[AssignedBatch], None]) -> None:
        pointer = batch.assigned.pointer or ""
        try:
            if self._store is None:
                raise InvalidSetting("This worker has no store.directory: set the same one as the servers.")
            batch.input = await asyncio.to_thread(self._store.get, pointer)
        except RotaError as error:
            reason = outcomes.redact_and_truncate(f"The input at {pointer} cannot be read. {error.sentence}")
            self._frame_table.fail_waiting(batch, StopReason(AttemptStatus.FAILED, AttemptCode.INPUT_MISSING, reason))
        else:
            then(batch)

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
