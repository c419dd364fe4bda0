"""In-memory backend: stores submissions and runs them during `submit` (`inline`) or on `drain` (`manual`)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from rota.api.explanation import JobExplanation
from rota.api.jobs import JobHistoryEntry, JobView
from rota.client.connections import TasksByName, override_backend
from rota.client.transport import FrameResult, JobOutcome, LogSource, Transport
from rota.engine.submission.submitter import validate_submissions
from rota.model.errors import IdempotencyConflict, InvalidInput, NotEnded, NotFound
from rota.model.ids import ENTROPY_BYTES, JobId, uuid7
from rota.model.job_states import JobState
from rota.model.jobs.submission import Submission, SubmitResult
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.jobs.work import Work
from rota.model.reasons import Reason
from rota.sdk.background_loop import run_blocking
from rota.sdk.job import Job
from rota.sdk.payload import encode_value
from rota.sdk.task import Task
from rota.sdk.workflow.run import Run
from rota.testing.clock import MovableClock
from rota.testing.simulated_jobs import SimulatedFrame, SimulatedJob, apply_attempt_end, run_attempt
from rota.testing.simulated_runs import SimulatedRuns
from rota.testing.transport import InMemoryHttpClient

R = TypeVar("R")
DRAIN_ATTEMPTS_MAX: Final = 100_000
"""Attempts of one `drain`: bounds jobs that submit each other endlessly."""
POLL_INTERVAL_S: Final = 0.005
_UNDISPATCHED: Final = (JobState.PENDING, JobState.SCHEDULED)
_WORK_DECODER = msgspec.msgpack.Decoder(Work)


class Rehearsal:
    """The jobs and runs of a test, and its clock."""

    def __init__(self, *, at_once: bool, clock: MovableClock | None = None) -> None:
        self.clock = clock or MovableClock()
        self._at_once = at_once
        self._lock = threading.RLock()
        self._jobs: dict[JobId, SimulatedJob] = {}
        self._tasks: dict[JobId, TasksByName] = {}
        self._keys: dict[tuple[str, str], tuple[bytes | None, JobId]] = {}
        self.runs = SimulatedRuns(self)

    def transport(self, tasks: TasksByName) -> Transport:
        return InMemoryTransport(self, tasks)

    def submitted(self, task: Task[..., R]) -> list[Job[R]]:
        """Jobs of this task, in submission order."""
        return [task.job(job.id) for job in self._jobs_of(task)]

    def assert_submitted(self, task: Task[..., R], *args: Any, **kwargs: Any) -> Job[R]:
        """The first job of this task whose call has the given arguments; AssertionError if there is none."""
        calls = [(job, call) for job in self._jobs_of(task) for call in self._calls_of(task, job)]
        expected = task.signature.bind_arguments(*_roundtrip(args, kwargs))
        for job, call in calls:
            if all(name in call and call[name] == value for name, value in expected.items()):
                return task.job(job.id)
        shown = ", ".join(repr(call) for _, call in calls[:5]) or "not at all"
        raise AssertionError(f"{task.name} was not submitted with {expected or 'anything'}; it was submitted: {shown}")

    def assert_not_submitted(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            job = self.assert_submitted(task, *args, **kwargs)
        except AssertionError:
            return
        raise AssertionError(f"{task.name} was submitted: job {job.id}")

    def artifacts(self, job: Job[Any]) -> dict[str, bytes]:
        """Artifacts of a job, by name."""
        return dict(self.find(job.id).artifacts)

    async def drain(self) -> int:
        """Runs all due frames, including those they submit; returns the number of attempts."""
        for attempts in range(DRAIN_ATTEMPTS_MAX):
            self._expire()
            self._advance()
            due = self._take_due_frame()
            if due is None:
                return attempts
            await self._run(due)
        raise AssertionError(
            f"Work remains after {DRAIN_ATTEMPTS_MAX} attempts: check for jobs that submit each other endlessly."
        )

    def drain_sync(self) -> int:
        """`drain` for tests without an event loop."""
        return run_blocking(self.drain())

    async def approve(self, run: Run[Any], step: str, *, by: str = "somebody", reason: str = "") -> None:
        """Approves a waiting approval step."""
        self.runs.decide(run.id, step, by=by, agrees=True, reason=reason)
        await self.submitted_more()

    async def reject(self, run: Run[Any], step: str, *, by: str = "somebody", reason: str = "") -> None:
        """Rejects a waiting approval step: the step is denied."""
        self.runs.decide(run.id, step, by=by, agrees=False, reason=reason)
        await self.submitted_more()

    def find(self, job: JobId) -> SimulatedJob:
        if job not in self._jobs:
            raise NotFound(f"There is no job {job} in this test.", job=str(job))
        return self._jobs[job]

    def known(self, job: JobId) -> SimulatedJob | None:
        return self._jobs.get(job)

    def play(self, tasks: TasksByName, plan: ValidatedSubmission) -> JobId:
        """Adds a job of a workflow step."""
        with self._lock:
            return self._add_job(tasks, plan).job

    async def submitted_more(self) -> None:
        """Called after new work was added: drains if inline."""
        if self._at_once:
            await self.drain()

    async def add(self, tasks: TasksByName, submissions: Sequence[Submission]) -> list[SubmitResult]:
        plans = validate_submissions(submissions)
        with self._lock:
            self._check_keys(plans)
            for dependency in {dependency for plan in plans for dependency in plan.after}:
                self.find(JobId(dependency))
            added = [self._add_job(tasks, plan) for plan in plans]
        await self.submitted_more()
        return [SubmitResult(each.job, self._jobs[each.job].state, each.already) for each in added]

    def _check_keys(self, plans: Sequence[ValidatedSubmission]) -> None:
        for plan in plans:
            digest, job = self._keys.get((plan.show, plan.key or ""), (plan.digest, None))
            if plan.key is not None and digest != plan.digest:
                raise IdempotencyConflict(
                    f"The idempotency key {plan.key!r} was used for another submission, job {job}.", job=str(job)
                )

    def _add_job(self, tasks: TasksByName, plan: ValidatedSubmission) -> SubmitResult:
        if plan.key is not None and (plan.show, plan.key) in self._keys:
            job = self._keys[plan.show, plan.key][1]
            return SubmitResult(job, self._jobs[job].state, already=True)
        now_ms = self.clock.now_ms()
        job = JobId(uuid7(now_ms, os.urandom(ENTROPY_BYTES)))
        if plan.key is not None:
            self._keys[plan.show, plan.key] = plan.digest, job
        self._jobs[job] = SimulatedJob(job, plan, now_ms)
        self._tasks[job] = tasks
        return SubmitResult(job, self._jobs[job].state)

    def _advance(self) -> None:
        """Advances workflow runs until they wait for jobs or timers."""
        with self._lock:
            for _ in range(DRAIN_ATTEMPTS_MAX):
                if not self.runs.advance_all():
                    return
        raise AssertionError(
            f"No job to run after {DRAIN_ATTEMPTS_MAX} steps: check for workflows that start each other endlessly."
        )

    def _take_due_frame(self) -> SimulatedFrame | None:
        """Takes the next due frame: highest priority first, then oldest."""
        now_ms = self.clock.now_ms()
        with self._lock:
            waiting = [
                frame
                for job in self._jobs.values()
                for frame in job.frames
                if job.state is not JobState.PENDING
                if frame.due_ms <= now_ms and not frame.taken
            ]
            frame = max(waiting, key=lambda frame: frame.job.plan.priority, default=None)
            if frame is not None:
                frame.taken = True
            return frame

    async def _run(self, frame: SimulatedFrame) -> None:
        job, name = frame.job, _WORK_DECODER.decode(frame.plan.work).task
        task = self._tasks[job.id].get(name)
        if not name:
            raise InvalidInput(f"Job {job.id} is a command: in tests only tasks run, so wrap it in a task.")
        if task is None:
            raise InvalidInput(f"The app that submitted job {job.id} has no task {name!r}: declare it.")
        if job.state is JobState.SCHEDULED:
            job.transition_to(JobState.DISPATCHED, self.clock.now_ms())
            job.transition_to(JobState.RUNNING, self.clock.now_ms())
        try:
            end = await run_attempt(frame, task)
        finally:
            frame.taken = False
        with self._lock:
            apply_attempt_end(frame, end, self.clock.now_ms(), at_once=self._at_once)

    def _expire(self) -> None:
        now_ms = self.clock.now_ms()
        with self._lock:
            for job in self._jobs.values():
                if job.state is JobState.PENDING:
                    job.apply_dependencies([self._jobs[JobId(dependency)] for dependency in job.plan.after], now_ms)
                if job.frames and job.deadline_ms is not None and job.deadline_ms <= now_ms:
                    job.end(JobState.TIMEOUT, now_ms, Reason.DEADLINE_EXPIRED.value)
                elif job.state in _UNDISPATCHED and job.wait_ms is not None and job.wait_ms <= now_ms:
                    job.end(JobState.FAILED, now_ms, Reason.MAX_WAIT_EXPIRED.value)

    def cancel(self, job: JobId) -> bool:
        with self._lock:
            found = self.find(job)
            if found.state.terminal:
                return False
            found.end(JobState.CANCELLED, self.clock.now_ms(), Reason.CANCELLED.value)
            return True

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        """Submits a new job for the failed frames of a job, or for all."""
        found = self.find(job)
        with self._lock:
            [added] = [self._add_job(self._tasks[job], found.resubmission(every_frame=every_frame))]
        await self.submitted_more()
        return added.job

    def _jobs_of(self, task: Task[..., Any]) -> list[SimulatedJob]:
        return [
            job
            for job in self._jobs.values()
            if any(_WORK_DECODER.decode(layer.work).task == task.name for layer in job.plan.layers)
        ]

    def _calls_of(self, task: Task[..., Any], job: SimulatedJob) -> Iterator[dict[str, Any]]:
        for layer in job.plan.layers:
            for data in layer.items or (layer.input,):
                call = msgspec.msgpack.decode(data) if data is not None else {}
                yield task.signature.bind_arguments(*_roundtrip(call.get("args", ()), call.get("kwargs", {})))


class InMemoryTransport:
    """`Transport` of one app in a rehearsal."""

    def __init__(self, rehearsal: Rehearsal, tasks: TasksByName) -> None:
        self._rehearsal = rehearsal
        self._tasks = tasks
        self.http = InMemoryHttpClient(rehearsal, tasks)

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[SubmitResult]:
        return await self._rehearsal.add(self._tasks, submissions)

    async def get(self, job: JobId) -> JobView:
        return self._rehearsal.find(job).to_view()

    async def wait_until_ended(self, job: JobId, within_s: float) -> JobView:
        """Waits for frames running in other tasks of this test; raises NotEnded if none is running."""
        found, until = self._rehearsal.find(job), asyncio.get_running_loop().time() + within_s
        while not found.state.terminal:
            if not any(frame.taken for frame in found.frames):
                raise NotEnded(
                    f"Job {job} is {found.state} in a test: call drain() to run due work, clock.advance() to move time."
                )
            if asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        return found.to_view()

    async def wait_for_outcome(self, job: JobId, within_s: float) -> JobOutcome:
        return JobOutcome(await self.wait_until_ended(job, within_s))

    async def results(self, job: JobId) -> AsyncIterator[FrameResult]:
        for result in sorted(self._rehearsal.find(job).results, key=lambda result: (result.layer, result.place)):
            yield result

    async def cancel(self, job: JobId) -> bool:
        return self._rehearsal.cancel(job)

    async def retry(self, job: JobId, *, every_frame: bool) -> JobId:
        return await self._rehearsal.retry(job, every_frame=every_frame)

    async def read_log(self, job: JobId, source: LogSource, *, follow: bool) -> AsyncIterator[bytes]:
        """Lines of `context().log`. Output printed by a task goes to the test's own output."""
        del follow  # nothing runs while the reader waits
        found = self._rehearsal.find(job)
        names = [each.name for each in found.plan.layers]
        if source.layer is not None and source.layer not in names:
            raise InvalidInput(f"Job {job} has no layer {source.layer!r}: use one of {', '.join(names)}.")
        number = 0 if source.layer is None else names.index(source.layer)
        frame = source.frame if source.frame is not None else found.plan.layers[number].frames.first
        attempts = [key[2] for key in found.logs if key[:2] == (number, frame)]
        lines = found.logs.get((number, frame, source.attempt or max(attempts, default=1)), [])
        if source.stream == "log" and lines:
            yield "".join(lines).encode()

    async def events(self, job: JobId) -> AsyncIterator[JobHistoryEntry]:
        for entry in self._rehearsal.find(job).history:
            yield entry

    async def explain(self, job: JobId) -> JobExplanation:
        return self._rehearsal.find(job).explain(self._rehearsal.clock.now_ms())

    async def close(self) -> None:
        return None


@contextmanager
def inline(clock: MovableClock | None = None) -> Iterator[Rehearsal]:
    """In this block, due jobs of any app run before `submit` returns; retries follow immediately."""
    rehearsal = Rehearsal(at_once=True, clock=clock)
    with override_backend(rehearsal):
        yield rehearsal


@contextmanager
def manual(clock: MovableClock | None = None) -> Iterator[Rehearsal]:
    """In this block, jobs of any app wait for `drain`, and for their time on the clock."""
    rehearsal = Rehearsal(at_once=False, clock=clock)
    with override_backend(rehearsal):
        yield rehearsal


def _roundtrip(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they arrive at a worker."""
    args, kwargs = msgspec.msgpack.decode(encode_value((args, kwargs)))
    return tuple(args), kwargs
