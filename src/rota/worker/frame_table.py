"""State of all frames on this worker: waiting, running, the capacity they use, and the single path by which they end.

Invariants, enforced here because no other module changes this state:

- an accepted token is waiting, running, or in `ResultReporter` until its result is stored; `active_tokens` lists all;
- a token accepted before is never started again, however often its message is redelivered;
- an end is reported once: output of a frame after it was killed is ignored;
- capacity is released exactly when an end is reported.

Not thread-safe: only `active_tokens` may be called from a thread other than the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog

from rota.infra.telemetry import metrics
from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AssignedRange, Assignment, AttemptResult, AttemptStatus
from rota.model.reasons import Reason
from rota.model.token_ranges import TokenRange, intersect_range, tokens_in_range
from rota.sdk.task import Task
from rota.worker.capacity import WorkerCapacity
from rota.worker.data.artifacts import FrameArtifacts
from rota.worker.frames import AssignedBatch, RunningFrame, StopReason
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.result_reporter import ResultReporter
from rota.worker.token_deduplicator import TokenDeduplicator

log = structlog.get_logger(__name__)
FRAMES_REFUSED = metrics.counter(
    "rota_worker_refused", "Frames refused before they started, by reason.", labels=("reason",)
)
FRAMES_STOPPED = metrics.counter("rota_worker_stopped", "Frames stopped early, by reason.", labels=("reason",))

FRAMES_KILLED = metrics.counter("rota_worker_killed", "Frames killed because they did not stop on request.")

WORKER_STOPPING: Final = StopReason(AttemptStatus.REFUSED, AttemptCode.WORKER_STOPPED, "The worker is stopping.")
TIMEOUT_CODE: Final = AttemptCode.TIMEOUT


class FrameTable:
    def __init__(
        self,
        capacity: WorkerCapacity,
        result_reporter: ResultReporter,
        progress_reporter: ProgressReporter,
        tasks: dict[str, Task[..., Any]],
        artifacts: FrameArtifacts,
    ) -> None:
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

    def accept_assignment(self, assignment: Assignment) -> list[AssignedBatch]:
        """Accepts new frames that can run and fit, refuses the other new ones, and skips duplicates."""
        fresh = [
            (assigned, token_range)
            for assigned in assignment.portions
            for token_range in self._deduplicator.take_new(assigned.token, assigned.n)
        ]
        accepted = (self._accept_range(assignment, assigned, token_range) for assigned, token_range in fresh)
        return [batch for batch in accepted if batch is not None]

    def start_frame(self, batch: AssignedBatch, token: int) -> RunningFrame:
        """Marks a frame as running. The caller advances `batch.next`."""
        now = self._loop.time()
        frame = RunningFrame(
            batch, token, now, self.capacity.reserve_devices(batch.work.gpus) if batch.work.gpus else ()
        )
        self.running[token] = frame
        self.progress_reporter.frame_started(token, now)
        if batch.work.timeout_s > 0:
            self._schedule(frame, batch.work.timeout_s, self._time_out)
        return frame

    def remove_started_batch(self, batch: AssignedBatch) -> None:
        """Removes the batch once all its frames have started or ended."""
        if batch.next >= batch.end:
            self.batches.pop(batch.first, None)
            self._notify_if_empty()

    def succeed_untracked(self, batch: AssignedBatch, first: int, n: int, took_s: float) -> None:
        """Reports frames that succeeded without a result and were never in `running`."""
        self.result_reporter.add_succeeded(first, n, took_s)
        if batch.span is not None:
            batch.span.frames_ended(n, None)
        self.capacity.release(batch.work, n)
        if self.progress_reporter.has_output:
            for token in range(first, first + n):
                self.progress_reporter.frame_ended(token)

    def end_untracked(self, batch: AssignedBatch, end: AttemptResult) -> None:
        """Reports a frame that ended and was never in `running`."""
        self.result_reporter.add_end(end)
        if batch.span is not None:
            batch.span.frames_ended(1, end)
        self.capacity.release(batch.work, 1)
        self.progress_reporter.frame_ended(end.token)
        self.artifacts.discard(end.token)

    def end(self, frame: RunningFrame, end: AttemptResult | None) -> None:
        """Ends a frame; None: it succeeded without a result. A stop reason takes precedence over `end`."""
        if frame.over:
            return
        frame.close()
        took_s = self._loop.time() - frame.began_at
        if frame.stop is not None:
            end = AttemptResult(frame.token, frame.stop.status, code=frame.stop.code, error=frame.stop.reason)
        if end is None:
            self.result_reporter.add_succeeded(frame.token, 1, took_s)
        else:
            self.result_reporter.add_end(_with_duration(end, took_s))
        if frame.batch.span is not None:
            frame.batch.span.frames_ended(1, end)
        self.capacity.release(frame.work, 1)
        self.capacity.release_devices(frame.devices)
        self.progress_reporter.frame_ended(frame.token)
        self.artifacts.discard(frame.token)
        self.running.pop(frame.token, None)
        self._notify_if_empty()

    def cancel(self, ranges: Iterable[TokenRange], reason: str) -> None:
        """Stops those tokens that are on this worker; cancels are broadcast, so most may not be."""
        stop = StopReason(AttemptStatus.CANCELLED, Reason.CANCELLED.value, reason)
        for token_range in ranges:
            for batch in tuple(self.batches.values()):
                for token in intersect_range(token_range, batch.next, batch.end):
                    self._drop(batch, token, stop)
            for frame in self._running_in(token_range):
                self.stop(frame, stop)

    def stop(self, frame: RunningFrame, stop: StopReason) -> None:
        """Requests a stop, and kills the frame `kill_after_s` later."""
        if frame.stop is not None or frame.over:
            return
        frame.stop = stop
        FRAMES_STOPPED.labels(stop.code).inc()
        self._schedule(frame, frame.work.kill_after_s, self._kill)
        frame.request_stop()

    def drop_waiting(self, stop: StopReason) -> None:
        """Ends all frames that have not started."""
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
        task = None if work.argv else self._tasks.get(work.task)
        fitting, code, reason = (
            self.capacity.fitting_count(work, n),
            AttemptCode.NO_ROOM,
            "The frame does not fit this worker's free capacity.",
        )
        if self.draining:
            fitting, code, reason = 0, AttemptCode.DRAINING, "The worker is draining and accepts no frames."
        elif task is None and not work.argv:
            fitting, code, reason = 0, AttemptCode.TASK_MISSING, f"This worker has no task {work.task!r}."
        if fitting < n:
            self._refuse((first + fitting, n - fitting), code, reason)
        if not fitting:
            return None
        self.capacity.reserve(work, fitting)
        batch = AssignedBatch(assigned, (first, fitting), work, task)
        self.batches[first] = batch
        self.emptied.clear()
        return batch

    def _refuse(self, token_range: TokenRange, code: str, reason: str) -> None:
        FRAMES_REFUSED.labels(code).inc(token_range[1])
        for token in tokens_in_range(token_range):
            self.result_reporter.add_end(AttemptResult(token, AttemptStatus.REFUSED, code=code, error=reason))

    def _drop(self, batch: AssignedBatch, token: int, stop: StopReason) -> None:
        if token not in batch.dropped:
            batch.dropped.add(token)
            end = AttemptResult(token, stop.status, code=stop.code, error=stop.reason)
            self.end_untracked(batch, end)
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
