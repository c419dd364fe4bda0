"""In-memory jobs, and the execution of one attempt of a frame.

Retries and results are decided by the functions the engine and the worker use.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from contextvars import copy_context
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from rota.api.explanation import Cause, JobExplanation
from rota.api.jobs import JobHistoryEntry, JobView, Layer
from rota.client.transport import FrameResult
from rota.engine.completion.retry_decision import decide_retry
from rota.engine.resubmission.plan import RETRY_OF
from rota.model.attempt_codes import AttemptCode
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, LayerId
from rota.model.job_states import RESCHEDULE_AFTER_S, FrameState, JobState, worst_state
from rota.model.jobs.frame_ranges import FrameSet
from rota.model.jobs.submission import decode_details
from rota.model.jobs.validation import ValidatedLayer, ValidatedSubmission
from rota.model.jobs.work import Work, work_view
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.model.reasons import Reason
from rota.model.token_ranges import to_ranges
from rota.sdk.context import CURRENT_CONTEXT, Context
from rota.sdk.task import Task
from rota.worker import outcomes

_WORK_DECODER = msgspec.msgpack.Decoder(Work)


def to_datetime(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class SimulatedFrame:
    """A frame that has not ended."""

    def __init__(self, job: SimulatedJob, layer: int, place: int, due_ms: int) -> None:
        self.job = job
        self.layer = layer
        self.place = place
        self.due_ms = due_ms
        self.attempt = 1
        self.failures = 0
        self.context: Context | None = None
        self.taken = False
        """Whether it is running."""

    @property
    def plan(self) -> ValidatedLayer:
        return self.job.plan.layers[self.layer]

    @property
    def number(self) -> int:
        frames = self.plan.frames
        return next(islice(frames.numbers(), self.place, None))

    @property
    def input(self) -> bytes | None:
        return self.plan.items[self.place] if self.plan.items else self.plan.input


class SimulatedJob:
    def __init__(self, job: JobId, plan: ValidatedSubmission, now_ms: int) -> None:
        self.id = job
        self.plan = plan
        self.state = JobState.PENDING
        self.reason: str | None = Reason.WAITING_ON_JOB.value if plan.after else None
        self.submitted_ms = now_ms
        self.finished_ms: int | None = None
        self.history = [JobHistoryEntry(JobState.PENDING, to_datetime(now_ms), self.reason)]
        self.results: list[FrameResult] = []
        self.ended: list[dict[FrameState, int]] = [{} for _ in plan.layers]
        self.logs: dict[tuple[int, int, int], list[str]] = {}
        """By layer, frame number and attempt."""
        self.artifacts: dict[str, bytes] = {}
        self._resubmitted: set[tuple[int, int]] = set()
        due_ms = now_ms if plan.run_at is None else round(plan.run_at.timestamp() * 1000)
        self.frames = [
            SimulatedFrame(self, number, place, max(due_ms, now_ms))
            for number, layer in enumerate(plan.layers)
            for place in range(layer.frames.count)
        ]
        self.deadline_ms = None if plan.deadline_ms is None else now_ms + plan.deadline_ms
        self.wait_ms = None if plan.max_wait_s is None else max(due_ms, now_ms) + round(plan.max_wait_s * 1000)
        if not plan.after:
            self.transition_to(JobState.SCHEDULED, now_ms)

    def transition_to(self, state: JobState, now_ms: int, reason: str | None = None) -> None:
        if state is not self.state:
            self.state, self.reason = state, reason
            self.history.append(JobHistoryEntry(state, to_datetime(now_ms), reason))

    def apply_dependencies(self, dependencies: Sequence[SimulatedJob], now_ms: int) -> None:
        """Schedules or ends the job according to the jobs it depends on."""
        failed = [each for each in dependencies if each.state.terminal and each.state is not JobState.SUCCEEDED]
        if failed and self.plan.after_failed != "run":
            state = JobState.FAILED if self.plan.after_failed == "fail" else JobState.CANCELLED
            self.end(state, now_ms, Reason.JOB_BEFORE_FAILED.value)
        elif all(each.state.terminal for each in dependencies):
            self.transition_to(JobState.SCHEDULED, now_ms)

    def reschedule_if_idle(self, now_ms: int) -> None:
        """Back to SCHEDULED when none of its frames runs or is due soon."""
        soon_ms = now_ms + round(RESCHEDULE_AFTER_S * 1000)
        if self.frames and not any(frame.taken or frame.due_ms < soon_ms for frame in self.frames):
            self.transition_to(JobState.SCHEDULED, now_ms)

    def frame_ended(self, frame: SimulatedFrame, state: FrameState, now_ms: int) -> None:
        """Ends a frame; the last one ends the job."""
        self.frames.remove(frame)
        counts = self.ended[frame.layer]
        counts[state] = counts.get(state, 0) + 1
        if not self.frames:
            self._finish(now_ms)

    def end(self, state: JobState, now_ms: int, reason: str) -> None:
        """Ends all remaining frames in this state."""
        self.reason = reason
        for frame in list(self.frames):
            if frame.context is not None:
                frame.context.cancelled = True
            self.frame_ended(frame, FrameState(state.value), now_ms)

    def _finish(self, now_ms: int) -> None:
        ends = [JobState(state.value) for counts in self.ended for state in counts]
        self.finished_ms = now_ms
        self.transition_to(worst_state(ends), now_ms, self.reason)

    def resubmission(self, *, every_frame: bool) -> ValidatedSubmission:
        """A new job for the failed frames, or for all."""
        if every_frame and not self.state.terminal:
            raise InvalidInput(f"Job {self.id} has not ended: to run all of it again, cancel it or wait for its end.")
        failed = {(each.layer, each.place) for each in self.results if each.state is not FrameState.SUCCEEDED}
        if not every_frame and not failed - self._resubmitted:
            raise InvalidInput(f"Job {self.id} has no failed frame to retry: retry all of it, or submit it again.")
        selected = None if every_frame else failed - self._resubmitted
        self._resubmitted |= failed
        layers = [_layer_to_retry(layer, number, selected) for number, layer in enumerate(self.plan.layers)]
        labels = {**(msgspec.json.decode(self.plan.labels) if self.plan.labels else {}), RETRY_OF: str(self.id)}
        return msgspec.structs.replace(
            self.plan,
            layers=tuple(layer for layer in layers if layer is not None),
            labels=msgspec.json.encode(labels).decode(),
            key=None,
            digest=None,
            run_at=None,
            after=(),
            like=None,
        )

    def explain(self, now_ms: int) -> JobExplanation:
        """What the job waits for in a test: other jobs, the clock, or `drain`."""
        waiting = 0 if self.state.terminal else len(self.frames)
        causes: tuple[Cause, ...] = ()
        if self.state is JobState.PENDING:
            causes = (_cause(Reason.WAITING_ON_JOB, Reason.WAITING_ON_JOB.meaning, "Let that job end."),)
        elif waiting and min(frame.due_ms for frame in self.frames) > now_ms:
            causes = (
                _cause(Reason.DEFERRED, "Its start time is in the future.", "Move the clock: clock.advance(...)."),
            )
        elif waiting:
            causes = (_cause(Reason.QUEUED, "It has not been run.", "Call drain()."),)
        return JobExplanation(
            job=self.id,
            name=self.plan.name,
            show=self.plan.show,
            state=self.state,
            reason=self.reason,
            sentence=causes[0].sentence if causes else f"It is {self.state}.",
            waiting=waiting,
            on_workers=0,
            reasons=causes,
        )

    def to_view(self) -> JobView:
        """The view the engine would return."""
        plan = self.plan
        return JobView(
            id=self.id,
            show=plan.show,
            folder=plan.folder,
            dept=plan.dept,
            name=plan.name,
            topic=plan.topic,
            priority=plan.priority,
            state=self.state,
            reason=self.reason,
            labels=msgspec.json.decode(plan.labels) if plan.labels else {},
            details=decode_details(plan.details),
            workflow_id=plan.workflow_id,
            submitted_at=to_datetime(self.submitted_ms),
            deadline_at=None if self.deadline_ms is None else to_datetime(self.deadline_ms),
            wait_until=None if self.wait_ms is None else to_datetime(self.wait_ms),
            run_at=plan.run_at,
            finished_at=None if self.finished_ms is None else to_datetime(self.finished_ms),
            history=list(self.history),
            layers=[self._layer_view(number, each) for number, each in enumerate(plan.layers)],
        )

    def _layer_view(self, number: int, plan: ValidatedLayer) -> Layer:
        counts = dict(self.ended[number])
        if remaining := plan.frames.count - sum(counts.values()):
            counts[FrameState.WAITING] = remaining
        return Layer(
            id=LayerId(UUID(int=self.id.int + 1 + number)),
            number=number,
            name=plan.name,
            queue=f"{self.plan.show}/{self.plan.folder}/{self.plan.topic}",
            work=work_view(_WORK_DECODER.decode(plan.work)),
            input=plan.input,
            frames=plan.frames,
            counts=counts,
        )


def _cause(code: Reason, sentence: str, remedy: str) -> Cause:
    assert code.tier is not None
    return Cause(tier=code.tier, code=code, sentence=sentence, remedy=remedy)


def _layer_to_retry(layer: ValidatedLayer, number: int, selected: set[tuple[int, int]] | None) -> ValidatedLayer | None:
    """The selected frames of a layer; None selects all."""
    if selected is None:
        return layer
    places = sorted(place for of, place in selected if of == number)
    if not places:
        return None
    in_queue = list(layer.frames.queue_numbers())
    ranges = tuple(to_ranges([in_queue[place] for place in places]))
    frames = FrameSet(layer.frames.first, len(places), layer.frames.step, ranges)
    items = tuple(layer.items[place] for place in places) if layer.items else ()
    return msgspec.structs.replace(layer, frames=frames, items=items)


class _SimulatedFrameSink:
    """`FrameSink` of the running frame."""

    def __init__(self, frame: SimulatedFrame) -> None:
        self.lines: list[str] = frame.job.logs.setdefault((frame.layer, frame.number, frame.attempt), [])
        self.artifacts_by_name: dict[str, Path] = {}
        self.path: Path | None = None

    def progress(self, _token: int, _percent: float, _text: str) -> None:
        return None

    def log(self, _token: int, line: str) -> None:
        self.lines.append(f"{line}\n")

    def folder(self, _token: int) -> Path:
        self.path = self.path or Path(tempfile.mkdtemp(prefix="rota-rehearsal-"))
        return self.path

    def add_artifact(self, _token: int, path: Path, name: str) -> None:
        self.artifacts_by_name[name] = path

    def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


class _SimulatedAttempt(msgspec.Struct, frozen=True):
    job: UUID
    layer: UUID
    attempt: int


async def run_attempt(frame: SimulatedFrame, task: Task[..., Any]) -> AttemptResult:
    """Runs one attempt as a worker would, but a sync task in a thread instead of a process."""
    sink = _SimulatedFrameSink(frame)
    attempt = _SimulatedAttempt(frame.job.id, UUID(int=frame.job.id.int + 1 + frame.layer), frame.attempt)
    context = frame.context = Context(attempt, frame.number, 0, sink)
    try:
        return await _call_task(task, frame, context, sink)
    finally:
        frame.context = None
        sink.close()


async def _call_task(
    task: Task[..., Any], frame: SimulatedFrame, context: Context, sink: _SimulatedFrameSink
) -> AttemptResult:
    try:
        arguments = outcomes.decode_input(frame.input, task.signature)
        task.signature.check(tuple(arguments.args), arguments.kwargs)
    except (msgspec.DecodeError, TypeError) as error:
        return outcomes.bad_input_end(0, error)
    try:
        value = await _run_function(task, arguments, context)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - as on a worker, any exception ends the frame
        if not isinstance(error, outcomes.INTENTIONAL_EXCEPTIONS):
            sink.log(0, outcomes.format_traceback(error))
        return outcomes.failure_end(0, error)
    try:
        frame.job.artifacts |= {name: path.read_bytes() for name, path in sink.artifacts_by_name.items()}
        return AttemptResult(0, AttemptStatus.SUCCEEDED, None if value is None else outcomes.encode_result(value))
    except outcomes.UnencodableResult as error:
        return outcomes.unencodable_end(0, error)
    except OSError as error:
        return AttemptResult(
            0, AttemptStatus.FAILED, code=AttemptCode.ARTIFACT_MISSING, error=outcomes.redact_and_truncate(str(error))
        )


async def _run_function(task: Task[..., Any], arguments: outcomes.TaskInput, context: Context) -> Any:
    variables = copy_context()
    variables.run(CURRENT_CONTEXT.set, context)
    if task.is_async:
        call = asyncio.get_running_loop().create_task(
            task.function(*arguments.args, **arguments.kwargs), context=variables
        )
        return await call
    return await asyncio.to_thread(variables.run, task.function, *arguments.args, **arguments.kwargs)


def apply_attempt_end(frame: SimulatedFrame, end: AttemptResult, now_ms: int, *, at_once: bool) -> None:
    """Ends the frame, or schedules a retry after its backoff (with `at_once`, without)."""
    job = frame.job
    if frame not in job.frames:
        return  # it was cancelled while it ran
    if end.status is AttemptStatus.SUCCEEDED:
        state, reason = FrameState.SUCCEEDED, ""
    else:
        ending = decide_retry(end, _WORK_DECODER.decode(frame.plan.work).retries, frame.failures)
        frame.failures += 1
        if ending.state == "RETRIED":
            frame.attempt += 1
            frame.due_ms = now_ms + (0 if at_once else round(ending.delay_s * 1000))
            job.reschedule_if_idle(now_ms)
            return
        state, reason = FrameState(ending.state), ending.reason
    if state is not FrameState.SUCCEEDED or end.value is not None:
        job.results.append(
            FrameResult(
                layer=frame.layer,
                place=frame.place,
                frame=frame.number,
                attempt=frame.attempt,
                state=state,
                value=end.value,
                code=reason,
                error=end.error,
            )
        )
    job.frame_ended(frame, state, now_ms)
    job.reschedule_if_idle(now_ms)
    if state is not FrameState.SUCCEEDED and job.frames and _WORK_DECODER.decode(frame.plan.work).fail_fast:
        job.end(JobState.CANCELLED, now_ms, reason)
