"""A process for sync tasks, the frame that it runs, and the frames of the same series that were sent ahead.

Short frames of a series are sent before those in front of them have ended, so that the process never waits for the
worker. They stay in the request queue (`processes.request_queue`) and in their series until the process takes them.
Invariants:
- at most one frame is with the process: `frame`, or until its result is read, one of `ahead`. `take_back` finds out
  which, and leaves no request in the queue; `FrameTable` calls it before it stops or hands back frames of the series;
- the process sends the result of a frame before it takes another one, so results arrive in the order of requests, and a
  long frame delays no result in front of it;
- output is read while nothing is in the queue, and a process whose output is unread takes no other frame: so all that
  is read belongs to `frame`. A series that writes output goes on one frame at a time, and so does one that uses files
  or returns large values, which have to be stored first;
- a process that ends fails the frame that it had taken. Others start in another process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import structlog

from rota.infra.telemetry import metrics
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.processes.child import ChildProcess, ChildProgram, OutputStream
from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.ipc import GO_ON, ProcessReady, encode_message
from rota.worker.processes.os_process import describe_exit
from rota.worker.processes.request_queue import REQUEST_BYTES_MAX, REQUESTS_MAX
from rota.worker.runners.process_messages import (
    TaskProcessArtifact,
    TaskProcessLogLine,
    TaskProcessMessage,
    TaskProcessProgress,
    TaskProcessRequest,
    TaskProcessResult,
)
from rota.worker.series import FrameSeries

log = structlog.get_logger(__name__)
PROCESSES_STARTED = metrics.counter("rota_worker_processes_started", "Processes started for sync tasks.")

READ_INTERVAL_S: Final = 0.001
"""While frames are in the queue, messages are read this often at most: waking the worker for each costs as much as a
short frame. When the process runs dry, it wakes the worker."""


class TaskProcess(ChildProcess[TaskProcessMessage]):
    def __init__(
        self,
        program: ChildProgram[TaskProcessMessage],
        guard: ProcessGroupGuard,
        frame_table: FrameTable,
        payloads: Payloads,
        is_contended: Callable[[], bool],
    ) -> None:
        """`is_contended`: whether frames wait for a process. Then a series gives it up after each frame."""
        self._frame_table = frame_table
        self._payloads = payloads
        self._is_contended = is_contended
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        """Set when it has nothing more to run, as far as it can start that without waiting."""
        self._over.set_result(None)
        self._series: FrameSeries | None = None
        self._one_at_a_time = False
        """Nothing of this series is sent ahead any more."""
        self._frame: RunningFrame | None = None
        """Started, and not ended as far as is known."""
        self._next: AssignedBatch | None = None
        """What follows the last frame, which has ended. Not started as far as is known."""
        self._ahead: deque[AssignedBatch] = deque()
        """Whose requests were queued behind that of `_frame`. The first of them may be `_next`."""
        self._ended_at = 0.0
        """When the last frame ended; the next one in the queue began then."""
        self._has_run = False
        self._advance_handle: asyncio.Handle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        super().__init__(program, guard)
        self._loop.add_reader(self._requests.dry, self._on_dry)
        PROCESSES_STARTED.inc()

    async def run(self, frame: RunningFrame) -> RunningFrame | AssignedBatch | None:
        """Runs a frame that has started, and others of its series. Returns what is left for the next call or another
        process: a frame that this one has not taken, or the batch that follows."""
        self._series = frame.batch.series
        if self._series is not None:
            self._series.process = self
        self._over = self._loop.create_future()
        try:
            self._set_frame(frame)
            request = self._encode_request(frame.batch, frame.token, frame.devices)
            self._one_at_a_time = self._series is None or len(request) > REQUEST_BYTES_MAX
            await self._send_request(request)
            self._schedule_advance()
            await self._over
            return self._frame or self._next
        finally:
            self._leave_series()
            self._ahead.clear()
            self._frame = self._next = None

    def continue_with(self, batch: AssignedBatch) -> bool:
        """Runs the next batch of the series after its last frame; False: another process has to."""
        if self._frame is not None or (not self._ahead and (not self.alive or self._is_contended())):
            return False
        self._next = batch
        return True

    def take_back(self) -> None:
        """Leaves the process `_frame` at most: all others that have not ended wait in their series."""
        if not self._ahead:
            return
        if not self._empty_queue() and (frame := self._frame) is not None:
            # The process is about to take it, and it counts as started.
            self._put(self._encode_request(frame.batch, frame.token, frame.devices))
        self._reader.drain()
        self._start_taken()
        self._schedule_advance()

    async def close(self) -> None:
        self._loop.remove_reader(self._requests.dry)
        self._stop_timers()
        await super().close()

    def _before_output(self) -> None:
        if self._ahead:
            self._one_at_a_time = True
            self.take_back()

    def _on_output(self, stream: OutputStream, data: bytes) -> None:
        """Output after the end of a frame is dropped."""
        if self._frame is not None:
            self._frame_table.progress_reporter.write(self._frame.token, stream, data)

    def _on_dry(self) -> None:
        self._requests.clear_dry()
        self._read()

    def _on_data(self, data: bytes) -> None:
        super()._on_data(data)
        self._schedule_advance()

    def _on_message(self, message: TaskProcessMessage) -> None:
        match message:
            case ProcessReady():
                super()._on_message(message)
            case TaskProcessResult():
                self._on_result(message)
            case _ if not self._is_running(message.token):
                log.debug("task_process_message_late")
            case TaskProcessProgress():
                self._frame_table.progress_reporter.progress(message.token, message.percent, message.word)
            case TaskProcessLogLine():
                self._frame_table.progress_reporter.log(message.token, message.line)
            case TaskProcessArtifact() if message.name:
                self._frame_table.artifacts.add_artifact(message.token, Path(message.path), message.name)
            case TaskProcessArtifact():
                self._frame_table.artifacts.folder(message.token)

    def _on_result(self, result: TaskProcessResult) -> None:
        if result.waits:
            self._one_at_a_time = True
            self._empty_queue()
        elif self._frame is None and self._ahead and self._ahead[0].first == result.token:
            self._end_unseen(result)
            return
        if self._is_running(result.token):
            self._end_running(result)
        else:
            log.debug("task_process_message_late")
        if result.waits:
            with suppress(OSError):  # it died
                self._socket.send(GO_ON)

    def _on_exit(self) -> None:
        taken = self._empty_queue()
        self._start_taken()
        frame = self._frame
        # A process that ends before its first frame would do so again.
        if frame is not None and (taken or not self._has_run):
            self._frame = None
            code, sentence = describe_exit(self.process.status or 0)
            error = f"The task's process exited: {sentence}"
            self._frame_table.end(frame, AttemptResult(frame.token, AttemptStatus.FAILED, code=code, error=error))
        self._set_over()

    def _is_running(self, token: int) -> bool:
        """Whether the process has this frame, which is started if that was not known."""
        if self._frame is None and self._ahead and self._ahead[0].first == token:
            self._start_sent()
        return self._frame is not None and self._frame.token == token

    def _empty_queue(self) -> bool:
        """Takes all requests back; whether the process had taken that of `_frame`."""
        untaken = self._requests.take_back()
        while untaken and self._ahead:
            untaken -= 1
            self._ahead.pop()
        return not untaken

    def _start_taken(self) -> None:
        """After the queue was emptied and all messages were read: what is left of `_ahead` is running."""
        if self._ahead:
            self._start_sent()
        assert not self._ahead, "a process runs one frame"

    def _start_sent(self) -> None:
        """Starts the frame whose request was queued behind the last one."""
        batch = self._ahead.popleft()
        assert batch is self._next, "results arrive in the order of requests"
        self._next = None
        frame = self._frame_table.start_next(batch, self._ended_at)
        assert frame is not None, "frames are dropped after they were taken back"
        self._set_frame(frame)

    def _set_frame(self, frame: RunningFrame) -> None:
        self._frame = frame
        frame.request_stop = self.request_stop
        frame.kill = self.kill

    def _schedule_advance(self) -> None:
        """In a step of its own, after the caller of `take_back` has decided about the frames that wait again."""
        if self._advance_handle is None and not self._over.done():
            self._advance_handle = self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Starts the next frame, sends others ahead, and decides when to read."""
        self._advance_handle = None
        while self._frame is None and self._next is not None and self.alive:
            if self._ahead:
                self._start_sent()
            elif not self._start_waiting():
                break
        if self._frame is None and not self._ahead:
            self._set_over()
            return
        self._send_ahead()
        if not self._ahead:
            self._stop_read_timer()
            self._reader.resume()
        elif self._read_timer is None:
            self._reader.pause()
            self._read_timer = self._loop.call_later(READ_INTERVAL_S, self._read)

    def _start_waiting(self) -> bool:
        """Starts `_next`; False: its request cannot be sent from here."""
        batch, self._next = self._next, None
        assert batch is not None, "there is a next one"
        frame = self._frame_table.start_next(batch)
        if frame is None:
            return True  # it was dropped, and its series has set the next one
        self._set_frame(frame)
        request = self._encode_request(batch, frame.token, frame.devices)
        if len(request) <= REQUEST_BYTES_MAX:
            self._put(request)
            return True
        self._set_over()
        return False

    def _send_ahead(self) -> None:
        frame, series = self._frame, self._series
        if (
            frame is None
            or series is None
            or self._one_at_a_time
            or not self.alive
            or len(self._ahead) > REQUESTS_MAX / 2
        ):
            return
        if frame.stop is not None or frame.work.artifacts or self._is_contended():
            return
        for batch in islice(series.waiting, len(self._ahead), REQUESTS_MAX):
            if not _may_go_ahead(batch):
                break
            request = self._encode_request(batch, batch.next, ())
            if len(request) > REQUEST_BYTES_MAX or not self._requests.put(request):
                break
            self._ahead.append(batch)

    def _read(self) -> None:
        """Reads messages now. If there are none, a frame takes longer: the next message wakes the worker."""
        self._stop_read_timer()
        if not self._reader.read():
            self._reader.resume()

    def _set_over(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
            self._reader.resume()
            self._leave_series()

    def _leave_series(self) -> None:
        self._stop_timers()
        if self._series is not None:
            self._series.process = None
            self._series = None

    def _stop_timers(self) -> None:
        self._stop_read_timer()
        if self._advance_handle is not None:
            self._advance_handle.cancel()
            self._advance_handle = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _encode_request(self, batch: AssignedBatch, token: int, devices: tuple[int, ...]) -> bytes:
        assigned, work = batch.assigned, batch.work
        return encode_message(
            TaskProcessRequest(
                token,
                work.task,
                assigned.job,
                assigned.layer,
                batch.frame_number(token),
                assigned.attempt,
                batch.input,
                work.env,
                devices,
                batch.trace,
                self._frame_table.artifacts.dir_name(token),
                batch.series is not None,
            )
        )

    def _end_running(self, result: TaskProcessResult) -> None:
        frame = self._frame
        assert frame is not None, "it is running"
        if result.waits or self._series is None:
            self.process.drain()
        self._frame, self._ended_at, self._has_run = None, result.ended_at, True
        ran = result.began_at, result.ended_at
        if result.status is not AttemptStatus.SUCCEEDED:
            self._frame_table.end(frame, _failure(result), ran)
            return
        live = frame.stop is None and not frame.over
        end = self._payloads.resolve_encoded_result(frame.batch, frame.token, result.value, frame) if live else None
        if not isinstance(end, RunningFrame):
            self._frame_table.end(frame, end, ran)
        else:
            # Its output is being stored, and the process may run another frame meanwhile.
            frame.request_stop = frame.kill = partial(self._frame_table.end, frame, None)

    def _end_unseen(self, result: TaskProcessResult) -> None:
        """Ends a frame that was sent ahead, and has ended before it was known to have started."""
        batch = self._ahead.popleft()
        assert batch is self._next, "results arrive in the order of requests"
        self._next, self._ended_at = None, result.ended_at
        end = None
        if result.status is not AttemptStatus.SUCCEEDED:
            end = _failure(result)
        elif result.value is not None:
            end = AttemptResult(result.token, AttemptStatus.SUCCEEDED, result.value)
        self._frame_table.end_next(batch, end, (result.began_at, result.ended_at))


def _failure(result: TaskProcessResult) -> AttemptResult:
    return AttemptResult(result.token, result.status, code=result.code, error=result.error, after_s=result.after_s)


def _may_go_ahead(batch: AssignedBatch) -> bool:
    """Whether its request can be made before its turn, and another one may follow before its end is reported."""
    return (
        batch.task is not None
        and not batch.task.is_async
        and not batch.dropped
        and (batch.input is not None or batch.assigned.pointer is None)
        and not batch.work.gpus
        and not batch.work.artifacts
    )
