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
from rota.model.messages import Assignment, End, Portion, Run, Status
from rota.sdk.task import Task
from rota.worker.frames import Batch, Frame, Stop
from rota.worker.leavings import Leavings
from rota.worker.reports import Reports
from rota.worker.room import Room
from rota.worker.runs import Seen, within
from rota.worker.teller import Teller

log = structlog.get_logger(__name__)
REFUSED = metrics.counter("rota_worker_refused", "Frames that were not begun, by reason.", labels=("reason",))
STOPPED = metrics.counter("rota_worker_stopped", "Frames that were stopped early, by reason.", labels=("reason",))

KILLED = metrics.counter("rota_worker_killed", "Frames that did not stop when they were asked to.")

STOPPED_WITH_WORKER: Final = Stop(Status.REFUSED, "worker_stopped", "The worker is ending.")
TIMED_OUT: Final = "timeout"


class Desk:
    def __init__(
        self, room: Room, reports: Reports, teller: Teller, tasks: dict[str, Task[..., Any]], leavings: Leavings
    ) -> None:
        self.room = room
        self.reports = reports
        self.teller = teller
        self.leavings = leavings
        self.draining = False
        self.running: dict[int, Frame] = {}
        self.batches: dict[int, Batch] = {}
        """By the first token they came with."""
        self.emptied = asyncio.Event()
        self._tasks = tasks
        self._seen = Seen()
        self._loop = asyncio.get_running_loop()

    @property
    def empty(self) -> bool:
        return not self.running and not self.batches

    def held(self) -> list[Run]:
        """Every token that is ours. For any thread: each part is copied in one step."""
        waiting = [(batch.next, batch.left) for batch in tuple(self.batches.values())]
        running = [(token, 1) for token in tuple(self.running)]
        # Last, since that is where the others go.
        return [*waiting, *running, *self.reports.held()]

    def take(self, assignment: Assignment) -> list[Batch]:
        """Accept what is new, can be run and fits; refuse the rest of what is new."""
        fresh = [
            (portion, run) for portion in assignment.portions for run in self._seen.fresh(portion.token, portion.n)
        ]
        accepted = (self._accept(assignment, portion, run) for portion, run in fresh)
        return [batch for batch in accepted if batch is not None]

    def begin(self, batch: Batch, token: int) -> Frame:
        """From here on it runs. Its place in the batch is the caller's to move on."""
        now = self._loop.time()
        frame = Frame(batch, token, now, self.room.take_devices(batch.work.gpus) if batch.work.gpus else ())
        self.running[token] = frame
        self.teller.began(token, now)
        if batch.work.timeout_s > 0:
            self._later(frame, batch.work.timeout_s, self._time_out)
        return frame

    def gone(self, batch: Batch) -> None:
        """All of the batch has begun or ended."""
        if batch.next >= batch.end:
            self.batches.pop(batch.first, None)
            self._look_empty()

    def done(self, batch: Batch, first: int, n: int, took_s: float) -> None:
        """Frames that succeeded without ever having been in `running`, and returned nothing."""
        self.reports.done(first, n, took_s)
        if batch.traced is not None:
            batch.traced.ended(n, None)
        self.room.give(batch.work, n)
        if self.teller.has_heard:
            for token in range(first, first + n):
                self.teller.ended(token)

    def ended_unbegun(self, batch: Batch, end: End) -> None:
        """One that ended without ever having been in `running`."""
        self.reports.end(end)
        if batch.traced is not None:
            batch.traced.ended(1, end)
        self.room.give(batch.work, 1)
        self.teller.ended(end.token)
        self.leavings.forget(end.token)

    def end(self, frame: Frame, end: End | None) -> None:
        """A frame is over; None: it succeeded and returned nothing. The reason it was stopped for wins."""
        if frame.over:
            return
        frame.close()
        took_s = self._loop.time() - frame.began_at
        if frame.stop is not None:
            end = End(frame.token, frame.stop.status, code=frame.stop.code, error=frame.stop.reason)
        if end is None:
            self.reports.done(frame.token, 1, took_s)
        else:
            self.reports.end(_timed(end, took_s))
        if frame.batch.traced is not None:
            frame.batch.traced.ended(1, end)
        self.room.give(frame.work, 1)
        self.room.give_devices(frame.devices)
        self.teller.ended(frame.token)
        self.leavings.forget(frame.token)
        self.running.pop(frame.token, None)
        self._look_empty()

    def cancel(self, runs: Iterable[Run], reason: str) -> None:
        """Stop those of the tokens that are here; the others are somebody else's, or over."""
        stop = Stop(Status.CANCELLED, "cancelled", reason)
        for run in runs:
            for batch in tuple(self.batches.values()):
                for token in within(run, batch.next, batch.end):
                    self._drop(batch, token, stop)
            for frame in self._running_in(run):
                self.stop(frame, stop)

    def stop(self, frame: Frame, stop: Stop) -> None:
        """Ask a frame to end, and make it end `kill_after_s` later."""
        if frame.stop is not None or frame.over:
            return
        frame.stop = stop
        STOPPED.labels(stop.code).inc()
        self._later(frame, frame.work.kill_after_s, self._kill)
        frame.ask()

    def drop_waiting(self, stop: Stop) -> None:
        """Nothing that has not begun will begin."""
        for batch in tuple(self.batches.values()):
            self.fail_waiting(batch, stop)

    def fail_waiting(self, batch: Batch, stop: Stop) -> None:
        """Nothing of this batch will begin."""
        for token in range(batch.next, batch.end):
            self._drop(batch, token, stop)
        batch.next = batch.end
        self.gone(batch)

    def stop_at_once(self, stop: Stop) -> None:
        """Nothing waits, nothing runs: everything has ended here, whatever it still does."""
        self.drop_waiting(stop)
        for frame in tuple(self.running.values()):
            frame.stop = stop
            frame.kill()
            self.end(frame, None)

    def _running_in(self, run: Run) -> list[Frame]:
        tokens = range(run[0], run[0] + run[1])
        if len(tokens) > len(self.running):
            return [frame for token, frame in self.running.items() if token in tokens]
        return [self.running[token] for token in tokens if token in self.running]

    def _accept(self, assignment: Assignment, portion: Portion, run: Run) -> Batch | None:
        first, n = run
        work = assignment.works[portion.work]
        task = None if work.argv else self._tasks.get(work.task)
        fitting, code, reason = self.room.fitting(work, n), "no_room", "It does not fit what is free on this worker."
        if self.draining:
            fitting, code, reason = 0, "draining", "The worker is ending and takes no more frames."
        elif task is None and not work.argv:
            fitting, code, reason = 0, "unknown_task", f"No task {work.task!r} on this worker."
        if fitting < n:
            self._refuse((first + fitting, n - fitting), code, reason)
        if not fitting:
            return None
        self.room.take(work, fitting)
        batch = Batch(portion, (first, fitting), work, task)
        self.batches[first] = batch
        self.emptied.clear()
        return batch

    def _refuse(self, run: Run, code: str, reason: str) -> None:
        REFUSED.labels(code).inc(run[1])
        for token in range(run[0], run[0] + run[1]):
            self.reports.end(End(token, Status.REFUSED, code=code, error=reason))

    def _drop(self, batch: Batch, token: int, stop: Stop) -> None:
        if token not in batch.dropped:
            batch.dropped.add(token)
            end = End(token, stop.status, code=stop.code, error=stop.reason)
            self.ended_unbegun(batch, end)
            STOPPED.labels(stop.code).inc()

    def _time_out(self, frame: Frame) -> None:
        reason = f"It ran for longer than {frame.work.timeout_s:g} s."
        self.stop(frame, Stop(Status.TIMEOUT, TIMED_OUT, reason))

    def _kill(self, frame: Frame) -> None:
        if not frame.over:
            KILLED.inc()
            log.warning("frame_killed", task=frame.work.task, frame=frame.number, reason=frame.stop and frame.stop.code)
            frame.kill()

    def _later(self, frame: Frame, seconds: float, call: Callable[[Frame], None]) -> None:
        frame.timers.append(self._loop.call_later(seconds, call, frame))

    def _look_empty(self) -> None:
        if self.empty:
            self.emptied.set()


def _timed(end: End, took_s: float) -> End:
    return End(
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
