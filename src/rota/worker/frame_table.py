"""State of all frames on this worker: waiting, running, the capacity they use, and the single path by which they end.

Invariants, enforced here because no other module changes this state:

- an accepted token is waiting, running, or in `ResultReporter` until its result is stored; `active_tokens` lists all;
- a token accepted before is never started again, however often its message is redelivered;
- an end is reported once: output of a frame after it was killed is ignored;
- capacity is released exactly when an end is reported; that of a series when the last of its ends is;
- of a series one frame runs at a time: its next batch goes to a runner when the frames of the one before have ended.

Not thread-safe: only `active_tokens` may be called from a thread other than the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import structlog

from rota.infra import failpoints
from rota.infra.telemetry import metrics
from rota.model.attempt_codes import AttemptCode
from rota.model.jobs.work import Work
from rota.model.protocol import AssignedRange, Assignment, AttemptResult, AttemptStatus
from rota.model.reasons import Reason
from rota.model.token_ranges import TokenRange, intersect_range, tokens_in_range
from rota.sdk.task import Task
from rota.worker.capacity import WorkerCapacity
from rota.worker.data.artifacts import FrameArtifacts
from rota.worker.frames import AssignedBatch, RunningFrame, StopReason
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.result_reporter import ResultReporter
from rota.worker.series import HAND_BACK_AFTER_S, FrameSeries
from rota.worker.token_deduplicator import TokenDeduplicator

log = structlog.get_logger(__name__)
FRAMES_REFUSED = metrics.counter(
    "rota_worker_refused", "Frames refused before they started, by reason.", labels=("reason",)
)
FRAMES_STOPPED = metrics.counter("rota_worker_stopped", "Frames stopped early, by reason.", labels=("reason",))

FRAMES_KILLED = metrics.counter("rota_worker_killed", "Frames killed because they did not stop on request.")

WORKER_STOPPING: Final = StopReason(AttemptStatus.REFUSED, AttemptCode.WORKER_STOPPED, "The worker is stopping.")
HANDED_BACK: Final = StopReason(
    AttemptStatus.REFUSED, AttemptCode.HANDED_BACK, "It waited behind other frames, and another slot may be free."
)
TIMEOUT_CODE: Final = AttemptCode.TIMEOUT
NO_ROOM_REASON: Final = "The frame does not fit this worker's free capacity."

FreshRange = tuple[AssignedRange, TokenRange]
"""An assigned range, and the part of it that was not received before."""
RunTimes = tuple[float, float]
"""When a frame began and ended, by the clock of the event loop."""


class FrameTable:
    def __init__(
        self,
        capacity: WorkerCapacity,
        result_reporter: ResultReporter,
        progress_reporter: ProgressReporter,
        tasks: dict[str, Task[..., Any]],
        artifacts: FrameArtifacts,
        start_batch: Callable[[AssignedBatch], None],
    ) -> None:
        """`start_batch` gives a batch to its runner."""
        self.capacity = capacity
        self.result_reporter = result_reporter
        self.progress_reporter = progress_reporter
        self.artifacts = artifacts
        self.draining = False
        self.running: dict[int, RunningFrame] = {}
        self.batches: dict[int, AssignedBatch] = {}
        """By first token."""
        self.emptied = asyncio.Event()
        self._tasks = tasks
        self._start_batch = start_batch
        self._deduplicator = TokenDeduplicator()
        self._loop = asyncio.get_running_loop()

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.batches

    def active_tokens(self) -> list[TokenRange]:
        """Every token this worker has. Thread-safe: each part is copied in one step."""
        waiting = [(batch.next, batch.remaining) for batch in tuple(self.batches.values())]
        running = [(token, 1) for token in tuple(self.running)]
        # Last, because waiting and running tokens move there.
        return [*waiting, *running, *self.result_reporter.unconfirmed_tokens()]

    def accept_assignment(self, assignment: Assignment) -> None:
        """Accepts new frames that can run and fit, refuses the other new ones, and skips duplicates."""
        accepted: list[AssignedBatch | None] = []
        in_series: dict[int, list[FreshRange]] = defaultdict(list)
        for assigned in assignment.portions:
            for token_range in self._deduplicator.take_new(assigned.token, assigned.n):
                if assigned.series:
                    in_series[assigned.series].append((assigned, token_range))
                else:
                    accepted.append(self._accept_range(assignment, assigned, token_range))
        accepted += [self._accept_series(assignment, ranges) for ranges in in_series.values()]
        for batch in accepted:
            if batch is not None:
                self._start_batch(batch)

    def start_next(self, batch: AssignedBatch, began_at: float | None = None) -> RunningFrame | None:
        """Starts the next frame of a batch, unless it was dropped."""
        token = batch.next
        frame = None
        if token < batch.end and token not in batch.dropped:
            frame = self.start_frame(batch, token, began_at)
        batch.next = min(token + 1, batch.end)
        self.remove_started_batch(batch)
        return frame

    def start_frame(self, batch: AssignedBatch, token: int, began_at: float | None = None) -> RunningFrame:
        """Marks a frame as running since `began_at`, or now. The caller advances `batch.next`."""
        now = self._loop.time()
        frame = RunningFrame(
            batch, token, began_at or now, self.capacity.reserve_devices(batch.work.gpus) if batch.work.gpus else ()
        )
        self.running[token] = frame
        if batch.series is not None:
            batch.series.running = frame
            batch.series.has_run = True
        self.progress_reporter.frame_started(token, frame.began_at)
        if batch.work.timeout_s > 0:
            self._schedule(frame, frame.began_at + batch.work.timeout_s - now, self._time_out)
        return frame

    def remove_started_batch(self, batch: AssignedBatch) -> None:
        """Removes the batch once all its frames have started or ended."""
        if batch.next >= batch.end:
            self.batches.pop(batch.first, None)
            if batch.series is not None and batch.series.current is batch:
                self._continue_series(batch.series)
            self._notify_if_empty()

    def record_duration(self, batch: AssignedBatch, frames: int, took_s: float, ended_at: float | None = None) -> None:
        """Reports how long frames of a batch, which have ended now or at `ended_at`, ran in total."""
        slot_s = took_s
        if batch.series is not None:
            batch.series.has_run = True
            slot_s = batch.series.take_slot_time(self._loop.time() if ended_at is None else ended_at)
        if batch.timing_key:
            self.result_reporter.add_duration(batch.timing_key, frames, took_s, slot_s)

    def succeed_untracked(self, batch: AssignedBatch, first: int, n: int, took_s: float) -> None:
        """Reports frames that succeeded without a result and were never in `running`."""
        self.result_reporter.add_succeeded(first, n, took_s)
        if batch.span is not None:
            batch.span.frames_ended(n, None)
        self._release(batch, n)
        if self.progress_reporter.has_output:
            for token in range(first, first + n):
                self.progress_reporter.frame_ended(token)

    def end_untracked(self, batch: AssignedBatch, end: AttemptResult) -> None:
        """Reports a frame that ended and was never in `running`."""
        self.result_reporter.add_end(end)
        if batch.span is not None:
            batch.span.frames_ended(1, end)
        self._release(batch, 1)
        self.progress_reporter.frame_ended(end.token)
        self.artifacts.discard(end.token)

    def end_next(self, batch: AssignedBatch, end: AttemptResult | None, ran: RunTimes) -> None:
        """Ends the next frame of a batch, which was never in `running`; None: it succeeded without a result."""
        token, took_s = batch.next, ran[1] - ran[0]
        if end is None:
            self.succeed_untracked(batch, token, 1, took_s)
        else:
            self.end_untracked(batch, _with_duration(end, took_s))
        self.record_duration(batch, 1, took_s, ran[1])
        batch.next = token + 1
        self.remove_started_batch(batch)

    def end(self, frame: RunningFrame, end: AttemptResult | None, ran: RunTimes | None = None) -> None:
        """Ends a frame; None: it succeeded without a result. A stop reason takes precedence over `end`."""
        if frame.over:
            return
        frame.close()
        began_at, ended_at = ran or (frame.began_at, self._loop.time())
        took_s = ended_at - began_at
        if frame.stop is not None:
            end = AttemptResult(frame.token, frame.stop.status, code=frame.stop.code, error=frame.stop.reason)
        if end is None:
            self.result_reporter.add_succeeded(frame.token, 1, took_s)
        else:
            self.result_reporter.add_end(_with_duration(end, took_s))
        if frame.batch.span is not None:
            frame.batch.span.frames_ended(1, end)
        self._release(frame.batch, 1)
        self.capacity.release_devices(frame.devices)
        self.progress_reporter.frame_ended(frame.token)
        self.artifacts.discard(frame.token)
        self.running.pop(frame.token, None)
        self.record_duration(frame.batch, 1, took_s, ended_at)
        self._frame_of_series_ended(frame)
        self._notify_if_empty()

    def cancel(self, ranges: Iterable[TokenRange], reason: str) -> None:
        """Stops those tokens that are on this worker; cancels are broadcast, so most may not be."""
        stop = StopReason(AttemptStatus.CANCELLED, Reason.CANCELLED.value, reason)
        for token_range in ranges:
            for batch in tuple(self.batches.values()):
                if batch.series is not None and intersect_range(token_range, batch.next, batch.end):
                    batch.series.settle()
                for token in intersect_range(token_range, batch.next, batch.end):
                    self._drop(batch, token, stop)
            for frame in self._running_in(token_range):
                self.stop(frame, stop)

    def hand_back(self, ranges: Iterable[TokenRange]) -> None:
        """Returns those of these frames that wait in series, with all that wait behind them, to the servers."""
        for token_range in ranges:
            for batch in tuple(self.batches.values()):
                if batch.series is not None and intersect_range(token_range, batch.next, batch.end):
                    self._hand_back(batch.series, all_frames=False)

    def stop(self, frame: RunningFrame, stop: StopReason) -> None:
        """Requests a stop, and kills the frame `kill_after_s` later."""
        if frame.batch.series is not None:
            # Otherwise the next frame could be stopped in its place.
            frame.batch.series.settle()
        if frame.stop is not None or frame.over:
            return
        frame.stop = stop
        FRAMES_STOPPED.labels(stop.code).inc()
        self._schedule(frame, frame.work.kill_after_s, self._kill)
        frame.request_stop()

    def drop_waiting(self, stop: StopReason) -> None:
        """Ends all frames that have not started; those in series are handed back."""
        for series in {batch.series for batch in self.batches.values() if batch.series is not None}:
            self._hand_back(series, all_frames=True)
        for batch in tuple(self.batches.values()):
            self.fail_waiting(batch, stop)

    def fail_waiting(self, batch: AssignedBatch, stop: StopReason) -> None:
        """Ends the frames of one batch that have not started."""
        for token in range(batch.next, batch.end):
            self._drop(batch, token, stop)
        batch.next = batch.end
        self.remove_started_batch(batch)

    def stop_all_now(self, stop: StopReason) -> None:
        """Ends every waiting and running frame without waiting for its code to return."""
        self.drop_waiting(stop)
        for frame in tuple(self.running.values()):
            frame.stop = stop
            frame.kill()
            self.end(frame, None)

    def _running_in(self, token_range: TokenRange) -> list[RunningFrame]:
        tokens = tokens_in_range(token_range)
        if len(tokens) > len(self.running):
            return [frame for token, frame in self.running.items() if token in tokens]
        return [self.running[token] for token in tokens if token in self.running]

    def _accept_range(
        self, assignment: Assignment, assigned: AssignedRange, token_range: TokenRange
    ) -> AssignedBatch | None:
        first, n = token_range
        work = assignment.works[assigned.work]
        if self._refuse_unrunnable(work, token_range):
            return None
        fitting = self.capacity.fitting_count(work, n)
        if fitting < n:
            self._refuse((first + fitting, n - fitting), AttemptCode.NO_ROOM, NO_ROOM_REASON)
        if not fitting:
            return None
        self.capacity.reserve(work, fitting)
        return self._add_batch(assignment, assigned, (first, fitting))

    def _accept_series(self, assignment: Assignment, ranges: Sequence[FreshRange]) -> AssignedBatch | None:
        """Returns the batch that starts first."""
        runnable: list[FreshRange] = []
        for assigned, token_range in ranges:
            work = assignment.works[assigned.work]
            if self._refuse_unrunnable(work, token_range):
                continue
            if self.capacity.fitting_count(work, 1):
                runnable.append((assigned, token_range))
            else:
                self._refuse(token_range, AttemptCode.NO_ROOM, NO_ROOM_REASON)
        if not runnable:
            return None
        batches: list[AssignedBatch] = []
        for assigned, (first, n) in runnable:
            task = self._tasks.get(assignment.works[assigned.work].task)
            # Only async tasks run without a process: a runner of processes starts all frames of a batch it is given.
            size = n if task is not None and task.is_async else 1
            batches += [self._add_batch(assignment, assigned, (token, size)) for token in range(first, first + n, size)]
        series = FrameSeries(batches, self._loop.time())
        for batch in batches:
            batch.series = series
        self.capacity.reserve(series.work, 1)
        series.timer = self._loop.call_later(HAND_BACK_AFTER_S, partial(self._hand_back, series, all_frames=False))
        return series.next_batch()

    def _refuse_unrunnable(self, work: Work, token_range: TokenRange) -> bool:
        """Refuses frames that this worker cannot run, whatever is free; returns whether it did."""
        if self.draining:
            self._refuse(token_range, AttemptCode.DRAINING, "The worker is draining and accepts no frames.")
        elif not work.argv and work.task not in self._tasks:
            self._refuse(token_range, AttemptCode.TASK_MISSING, f"This worker has no task {work.task!r}.")
        else:
            return False
        return True

    def _add_batch(self, assignment: Assignment, assigned: AssignedRange, token_range: TokenRange) -> AssignedBatch:
        work = assignment.works[assigned.work]
        batch = AssignedBatch(assigned, token_range, work, None if work.argv else self._tasks[work.task])
        if assigned.work < len(assignment.timing_keys):
            batch.timing_key = assignment.timing_keys[assigned.work]
        self.batches[token_range[0]] = batch
        self.emptied.clear()
        return batch

    def _release(self, batch: AssignedBatch, n: int) -> None:
        """Releases the capacity of frames that ended."""
        series = batch.series
        if series is None:
            self.capacity.release(batch.work, n)
            self.result_reporter.set_due()
            return
        series.unended -= n
        if not series.unended:
            self.capacity.release(series.work, 1)
            self.result_reporter.set_due()
            if series.timer is not None:
                series.timer.cancel()

    def _frame_of_series_ended(self, frame: RunningFrame) -> None:
        batch, series = frame.batch, frame.batch.series
        if series is None or series.running is not frame:
            return
        series.running = None
        if batch.suspended:
            batch.suspended = False
            self._start_batch(batch)
        elif batch.next >= batch.end and series.current is batch:
            self._continue_series(series)

    def _continue_series(self, series: FrameSeries) -> None:
        """Gives the next batch of a series to its runner, unless one of its frames is running."""
        if series.running is not None:
            return
        while (batch := series.next_batch()) is not None:
            failpoints.hit("worker.in_series")
            if len(batch.dropped) < batch.remaining:
                self._start_batch(batch)
                return
            batch.next = batch.end
            self.batches.pop(batch.first, None)

    def _hand_back(self, series: FrameSeries, *, all_frames: bool) -> None:
        """Returns the frames of a series that have not started to the servers; see `FrameSeries.take_unstarted`."""
        failpoints.hit("worker.before_hand_back")
        series.settle()
        for batch, first in series.take_unstarted(all_frames=all_frames):
            for token in range(first, batch.end):
                self._drop(batch, token, HANDED_BACK)
            batch.end = min(batch.end, first)
            self.remove_started_batch(batch)

    def _refuse(self, token_range: TokenRange, code: str, reason: str) -> None:
        FRAMES_REFUSED.labels(code).inc(token_range[1])
        for token in tokens_in_range(token_range):
            self.result_reporter.add_end(AttemptResult(token, AttemptStatus.REFUSED, code=code, error=reason))
        self.result_reporter.set_due()

    def _drop(self, batch: AssignedBatch, token: int, stop: StopReason) -> None:
        if token not in batch.dropped:
            batch.dropped.add(token)
            end = AttemptResult(token, stop.status, code=stop.code, error=stop.reason)
            self.end_untracked(batch, end)
            self.result_reporter.set_due()
            FRAMES_STOPPED.labels(stop.code).inc()

    def _time_out(self, frame: RunningFrame) -> None:
        reason = f"The frame ran for longer than {frame.work.timeout_s:g} s."
        self.stop(frame, StopReason(AttemptStatus.TIMEOUT, TIMEOUT_CODE, reason))

    def _kill(self, frame: RunningFrame) -> None:
        if not frame.over:
            FRAMES_KILLED.inc()
            log.warning("frame_killed", task=frame.work.task, frame=frame.number, reason=frame.stop and frame.stop.code)
            frame.kill()

    def _schedule(self, frame: RunningFrame, seconds: float, call: Callable[[RunningFrame], None]) -> None:
        frame.timers.append(self._loop.call_later(seconds, call, frame))

    def _notify_if_empty(self) -> None:
        if self.is_empty:
            self.emptied.set()


def _with_duration(end: AttemptResult, took_s: float) -> AttemptResult:
    return AttemptResult(
        end.token,
        end.status,
        end.value,
        end.pointer,
        end.code,
        end.error,
        round(took_s * 1000),
        end.artifacts,
        end.after_s,
    )
