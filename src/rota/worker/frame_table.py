"""What this worker has: frames that wait, frames that run, the room they take, and one way for each to end.

Invariants, kept here by being the only place that changes them:

- every token that was accepted is waiting, running, or with `Reports`, until it is stored; `held` lists them all;
- a token that was seen before is never begun again, however often its message comes;
- an end is reported once: what a frame does after it was stopped for good is nobody's business any more;
- room is given back exactly when an end is reported.

All of it belongs to the loop's thread; only `held` may be called from another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import structlog

from rota.infra.telemetry import metrics
from rota.model.protocol import AssignedRange, Assignment, AttemptResult, AttemptStatus, TokenRange
from rota.sdk.task import Task
from rota.worker.capacity import WorkerCapacity
from rota.worker.data.artifacts import FrameArtifacts
from rota.worker.frames import AssignedBatch, RunningFrame, StopReason
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.result_reporter import ResultReporter
from rota.worker.token_ranges import TokenDeduplicator, intersect_range

log = structlog.get_logger(__name__)
FRAMES_REFUSED = metrics.counter("rota_worker_refused", "Frames that were not begun, by reason.", labels=("reason",))
FRAMES_STOPPED = metrics.counter(
    "rota_worker_stopped", "Frames that were stopped early, by reason.", labels=("reason",)
)

FRAMES_KILLED = metrics.counter("rota_worker_killed", "Frames that did not stop when they were asked to.")

WORKER_STOPPING: Final = StopReason(AttemptStatus.REFUSED, "worker_stopped", "The worker is ending.")
TIMEOUT_CODE: Final = "timeout"


class FrameTable:
    def __init__(
        self,
        room: WorkerCapacity,
        reports: ResultReporter,
        teller: ProgressReporter,
        tasks: dict[str, Task[..., Any]],
        leavings: FrameArtifacts,
    ) -> None:
        self.room = room
        self.reports = reports
        self.teller = teller
        self.leavings = leavings
        self.draining = False
        self.running: dict[int, RunningFrame] = {}
        self.batches: dict[int, AssignedBatch] = {}
        """By the first token they came with."""
        self.emptied = asyncio.Event()
        self._tasks = tasks
        self._seen = TokenDeduplicator()
        self._loop = asyncio.get_running_loop()

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.batches

    def active_tokens(self) -> list[TokenRange]:
        """Every token that is ours. For any thread: each part is copied in one step."""
        waiting = [(batch.next, batch.remaining) for batch in tuple(self.batches.values())]
        running = [(token, 1) for token in tuple(self.running)]
        # Last, since that is where the others go.
        return [*waiting, *running, *self.reports.unconfirmed_tokens()]

    def accept_assignment(self, assignment: Assignment) -> list[AssignedBatch]:
        """Accept what is new, can be run and fits; refuse the rest of what is new."""
        fresh = [
            (portion, run) for portion in assignment.portions for run in self._seen.take_new(portion.token, portion.n)
        ]
        accepted = (self._accept_range(assignment, portion, run) for portion, run in fresh)
        return [batch for batch in accepted if batch is not None]

    def start_frame(self, batch: AssignedBatch, token: int) -> RunningFrame:
        """From here on it runs. Its place in the batch is the caller's to move on."""
        now = self._loop.time()
        frame = RunningFrame(batch, token, now, self.room.reserve_devices(batch.work.gpus) if batch.work.gpus else ())
        self.running[token] = frame
        self.teller.frame_started(token, now)
        if batch.work.timeout_s > 0:
            self._schedule(frame, batch.work.timeout_s, self._time_out)
        return frame

    def remove_started_batch(self, batch: AssignedBatch) -> None:
        """All of the batch has begun or ended."""
        if batch.next >= batch.end:
            self.batches.pop(batch.first, None)
            self._notify_if_empty()

    def succeed_untracked(self, batch: AssignedBatch, first: int, n: int, took_s: float) -> None:
        """Frames that succeeded without ever having been in `running`, and returned nothing."""
        self.reports.add_succeeded(first, n, took_s)
        if batch.traced is not None:
            batch.traced.frames_ended(n, None)
        self.room.release(batch.work, n)
        if self.teller.has_output:
            for token in range(first, first + n):
                self.teller.frame_ended(token)

    def end_untracked(self, batch: AssignedBatch, end: AttemptResult) -> None:
        """One that ended without ever having been in `running`."""
        self.reports.add_end(end)
        if batch.traced is not None:
            batch.traced.frames_ended(1, end)
        self.room.release(batch.work, 1)
        self.teller.frame_ended(end.token)
        self.leavings.discard(end.token)

    def end(self, frame: RunningFrame, end: AttemptResult | None) -> None:
        """A frame is over; None: it succeeded and returned nothing. The reason it was stopped for wins."""
        if frame.over:
            return
        frame.close()
        took_s = self._loop.time() - frame.began_at
        if frame.stop is not None:
            end = AttemptResult(frame.token, frame.stop.status, code=frame.stop.code, error=frame.stop.reason)
        if end is None:
            self.reports.add_succeeded(frame.token, 1, took_s)
        else:
            self.reports.add_end(_with_duration(end, took_s))
        if frame.batch.traced is not None:
            frame.batch.traced.frames_ended(1, end)
        self.room.release(frame.work, 1)
        self.room.release_devices(frame.devices)
        self.teller.frame_ended(frame.token)
        self.leavings.discard(frame.token)
        self.running.pop(frame.token, None)
        self._notify_if_empty()

    def cancel(self, runs: Iterable[TokenRange], reason: str) -> None:
        """Stop those of the tokens that are here; the others are somebody else's, or over."""
        stop = StopReason(AttemptStatus.CANCELLED, "cancelled", reason)
        for run in runs:
            for batch in tuple(self.batches.values()):
                for token in intersect_range(run, batch.next, batch.end):
                    self._drop(batch, token, stop)
            for frame in self._running_in(run):
                self.stop(frame, stop)

    def stop(self, frame: RunningFrame, stop: StopReason) -> None:
        """Ask a frame to end, and make it end `kill_after_s` later."""
        if frame.stop is not None or frame.over:
            return
        frame.stop = stop
        FRAMES_STOPPED.labels(stop.code).inc()
        self._schedule(frame, frame.work.kill_after_s, self._kill)
        frame.ask()

    def drop_waiting(self, stop: StopReason) -> None:
        """Nothing that has not begun will begin."""
        for batch in tuple(self.batches.values()):
            self.fail_waiting(batch, stop)

    def fail_waiting(self, batch: AssignedBatch, stop: StopReason) -> None:
        """Nothing of this batch will begin."""
        for token in range(batch.next, batch.end):
            self._drop(batch, token, stop)
        batch.next = batch.end
        self.remove_started_batch(batch)

    def stop_all_now(self, stop: StopReason) -> None:
        """Nothing waits, nothing runs: everything has ended here, whatever it still does."""
        self.drop_waiting(stop)
        for frame in tuple(self.running.values()):
            frame.stop = stop
            frame.kill()
            self.end(frame, None)

    def _running_in(self, run: TokenRange) -> list[RunningFrame]:
        tokens = range(run[0], run[0] + run[1])
        if len(tokens) > len(self.running):
            return [frame for token, frame in self.running.items() if token in tokens]
        return [self.running[token] for token in tokens if token in self.running]

    def _accept_range(self, assignment: Assignment, portion: AssignedRange, run: TokenRange) -> AssignedBatch | None:
        first, n = run
        work = assignment.works[portion.work]
        task = None if work.argv else self._tasks.get(work.task)
        fitting, code, reason = (
            self.room.fitting_count(work, n),
            "no_room",
            "It does not fit what is free on this worker.",
        )
        if self.draining:
            fitting, code, reason = 0, "draining", "The worker is ending and takes no more frames."
        elif task is None and not work.argv:
            fitting, code, reason = 0, "unknown_task", f"No task {work.task!r} on this worker."
        if fitting < n:
            self._refuse((first + fitting, n - fitting), code, reason)
        if not fitting:
            return None
        self.room.reserve(work, fitting)
        batch = AssignedBatch(portion, (first, fitting), work, task)
        self.batches[first] = batch
        self.emptied.clear()
        return batch

    def _refuse(self, run: TokenRange, code: str, reason: str) -> None:
        FRAMES_REFUSED.labels(code).inc(run[1])
        for token in range(run[0], run[0] + run[1]):
            self.reports.add_end(AttemptResult(token, AttemptStatus.REFUSED, code=code, error=reason))

    def _drop(self, batch: AssignedBatch, token: int, stop: StopReason) -> None:
        if token not in batch.dropped:
            batch.dropped.add(token)
            end = AttemptResult(token, stop.status, code=stop.code, error=stop.reason)
            self.end_untracked(batch, end)
            FRAMES_STOPPED.labels(stop.code).inc()

    def _time_out(self, frame: RunningFrame) -> None:
        reason = f"It ran for longer than {frame.work.timeout_s:g} s."
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
