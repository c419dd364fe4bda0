"""What a run waits for, or how it ended, with remedies. Reads only.

A run waits only for what its state says is in progress: the jobs, child runs and approvals of its steps, its timers, a
pause. Unprocessed inbox messages come first, since they may end any other wait. Jobs are explained by
`rota.engine.explain.explainer`, child runs by this module.

An answer is not a snapshot: earlier reads may be stale by the last one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime

import msgspec

from rota.api.explanation import JobExplanation
from rota.api.run_explanation import JOBS_MAX, STEPS_MAX, RunCause, RunExplanation, run_cause
from rota.api.workflows import SagaEntryView, SagaView, WorkflowRunView, WorkflowStepView
from rota.engine.explain.explainer import Explainer
from rota.engine.explain.policy_causes import approval_progress_text
from rota.engine.recovery.reconciler import LEASE
from rota.infra.postgres import Record, query
from rota.model.approvals import Approval
from rota.model.errors import NotFound
from rota.model.ids import JobId, RunId
from rota.model.reasons import Reason
from rota.model.units import humanize_duration
from rota.model.workflows.approval_steps import subject_of
from rota.model.workflows.run_state import RUN_DEPTH_MAX, HistoryEvent, RunState, StepState
from rota.policy.approvals import ApprovalStore
from rota.workflow.run_queries import RunQueries

READ = query(__package__, "explain_run")

_LIVE_STATES = (StepState.RUNNING, StepState.STOPPING)
_FAILED_ENTRY_STATES = ("failed", "skipped", "corrupt")


class RunExplainer:
    def __init__(self, explainer: Explainer) -> None:
        self.database = explainer.database
        self._jobs = explainer
        self._queries = RunQueries(self.database)
        self._approvals = ApprovalStore(self.database)

    async def explain(self, run: RunId) -> RunExplanation:
        """NotFound when there is no such run."""
        return await _ExplanationBuilder(self).explain(run)

    async def read(self, run: RunId) -> tuple[WorkflowRunView, SagaView | None, Record]:
        found = await self._queries.get(run)
        row = await self.database.row(READ, run, LEASE)
        assert row is not None
        return found, await self._queries.saga(found.show_id, str(run)), row

    async def approvals(self, run: WorkflowRunView) -> Mapping[str, Approval]:
        waiting = [step.id for step in run.steps if step.type == "approval" and step.state is StepState.RUNNING]
        return await self._approvals.latest("step", [subject_of(run.id, step) for step in waiting]) if waiting else {}

    async def job(self, job: JobId) -> JobExplanation | None:
        """None: it is no longer retained."""
        try:
            return await self._jobs.explain(job)
        except NotFound:
            return None


class _ExplanationBuilder:
    """Builds one explanation, and collects the explanations of its jobs."""

    def __init__(self, reads: RunExplainer) -> None:
        self._reads = reads
        self._jobs: list[JobExplanation] = []

    async def explain(self, run: RunId, depth: int = 0) -> RunExplanation:
        found, saga, row = await self._reads.read(run)
        if found.state.ended:
            reasons: list[RunCause] = []
            sentence = _ended_sentence(found, saga)
        else:
            reasons = [each async for each in self._live_causes(found, saga, row, depth)]
            sentence = reasons[0].sentence if reasons else Reason.NEWS_WAITING.meaning
        return RunExplanation(
            run=run,
            workflow=found.workflow,
            version=found.version,
            show=found.show,
            state=found.state,
            sentence=sentence,
            reasons=tuple(reasons),
            jobs=tuple(self._jobs) if depth == 0 else (),
            saga=saga,
        )

    async def _live_causes(
        self, run: WorkflowRunView, saga: SagaView | None, row: Record, depth: int
    ) -> AsyncIterator[RunCause]:
        for each in _inbox_causes(run, row):
            yield each
        if run.state is RunState.PAUSED:
            yield _pause_cause(run, row)
        if run.state is RunState.COMPENSATING:
            yield await self._compensation_cause(run, saga)
        async for each in self._step_causes(run, row["now"], depth):
            yield each
        if row["leader"] is None:
            yield run_cause(Reason.NO_SERVER, run.id, next_try="as soon as one is up")

    async def _step_causes(self, run: WorkflowRunView, now: datetime, depth: int) -> AsyncIterator[RunCause]:
        approvals = await self._reads.approvals(run)
        for step in [step for step in run.steps if step.state in _LIVE_STATES][:STEPS_MAX]:
            match step.type:
                case "approval":
                    yield _approval_cause(run, step, approvals.get(subject_of(run.id, step.id)), now)
                case "delay":
                    yield _delay_cause(run, step, now)
                case "workflow":
                    async for each in self._child_run_causes(run, step, depth):
                        yield each
                case "job":
                    yield await self._job_cause(run, step)

    async def _job_cause(self, run: WorkflowRunView, step: WorkflowStepView) -> RunCause:
        sentence = await self._job_sentence(step)
        detail = f": {sentence}" if sentence else "."
        return run_cause(
            Reason.ENDING if step.state is StepState.STOPPING else Reason.WAITING_ON_JOB,
            run.id,
            f"{_waiting_step(run, step)} for job {step.job}{detail}",
            remedy=_explain_remedy(step),
            step=step.id,
            waits_for=step.job,
            next_try="when that job has ended",
        )

    async def _job_sentence(self, step: WorkflowStepView) -> str:
        """The summary of a job; its full explanation is collected, unless there are too many."""
        if step.job is None or len(self._jobs) >= JOBS_MAX:
            return ""
        explanation = await self._reads.job(JobId(step.job))
        if explanation is None:
            return ""
        self._jobs.append(explanation)
        if not explanation.state.terminal and not explanation.waiting and explanation.on_workers:
            return f"{explanation.on_workers} of its frames are on workers."
        return explanation.sentence

    async def _child_run_causes(
        self, run: WorkflowRunView, step: WorkflowStepView, depth: int
    ) -> AsyncIterator[RunCause]:
        assert step.job is not None, "a step that runs a workflow names its run"
        inner = await self.explain(RunId(step.job), depth + 1) if depth < RUN_DEPTH_MAX else None
        detail = f": {inner.sentence}" if inner is not None else "."
        yield run_cause(
            Reason.WAITING_ON_RUN,
            run.id,
            f"{_waiting_step(run, step)} for run {step.job}{detail}",
            remedy=_explain_remedy(step),
            step=step.id,
            waits_for=step.job,
            next_try="when that run has ended",
        )
        for each in inner.reasons if inner is not None else ():
            yield each

    async def _compensation_cause(self, run: WorkflowRunView, saga: SagaView | None) -> RunCause:
        entries = saga.entries if saga is not None else []
        failed = [entry for entry in entries if entry.state in _FAILED_ENTRY_STATES]
        sentence = f"It failed ({(run.error or 'no reason is known').rstrip('.')}), and its jobs are being undone"
        at = next((entry for entry in entries if entry.state == "running"), None)
        if at is not None and at.undo is not None:
            explanation = await self._reads.job(JobId(at.undo))
            self._jobs += [explanation] if explanation is not None else []
            sentence += f": {_entry_name(at)} by job {at.undo}"
        remaining = sum(entry.state == "pending" for entry in entries)
        sentence += f", and {remaining} more after it." if remaining else "."
        return run_cause(
            Reason.COMPENSATING,
            run.id,
            f"{sentence}{_failed_compensations_sentence(failed)}",
            waits_for=at.undo if at is not None else None,
            next_try="when all compensations have ended",
        )


def _inbox_causes(run: WorkflowRunView, row: Record) -> Iterator[RunCause]:
    if row["scanned"]:
        job = row["scanned"][0]
        sentence = f"The output of job {job} is being scanned; the run continues after that."
        yield run_cause(Reason.NEWS_WAITING, run.id, sentence, waits_for=job, next_try="when the scan has ended")
    elif row["news"] or row["due"]:
        yield run_cause(Reason.NEWS_WAITING, run.id, next_try="at the next poll of a server, within a second")


def _pause_cause(run: WorkflowRunView, row: Record) -> RunCause:
    events = msgspec.json.decode(row["paused"] or "[]", type=list[HistoryEvent])
    by = next((each.why for each in reversed(events) if each.what == "paused" and each.why), "")
    since = f" since {row['paused_at']:%Y-%m-%d %H:%M:%S}" if row["paused_at"] is not None else ""
    sentence = f"It is paused{f' by {by}' if by else ''}{since}: no further step starts."
    return run_cause(Reason.RUN_PAUSED, run.id, sentence, next_try="when it is resumed")


def _delay_cause(run: WorkflowRunView, step: WorkflowStepView, now: datetime) -> RunCause:
    if step.due_at is None:
        return run_cause(Reason.DEFERRED, run.id, remedy=_delay_remedy(run), step=step.id)
    remaining = humanize_duration(max(0.0, (step.due_at - now).total_seconds()))
    sentence = f"Step {step.id} waits until {step.due_at:%Y-%m-%d %H:%M:%S} UTC, for {remaining} more."
    return run_cause(
        Reason.DEFERRED,
        run.id,
        sentence,
        remedy=_delay_remedy(run),
        step=step.id,
        next_at=step.due_at,
        next_try="at that time",
    )


def _approval_cause(run: WorkflowRunView, step: WorkflowStepView, approval: Approval | None, now: datetime) -> RunCause:
    subject = subject_of(run.id, step.id)
    detail = ""
    if approval is not None:
        agreed = ", ".join(vote.voter for vote in approval.votes if vote.agrees)
        detail = f": {approval_progress_text(approval, now)}{f' ({agreed})' if agreed else ''}."
    timeout = f" The step times out at {step.due_at:%Y-%m-%d %H:%M:%S} UTC." if step.due_at is not None else ""
    dates = [at for at in (step.due_at, approval.expires_at if approval is not None else None) if at is not None]
    return run_cause(
        Reason.APPROVAL_REQUIRED,
        run.id,
        f"Step {step.id} waits for approval{detail or '.'}{timeout}",
        remedy=f"`rota approvals show {subject}` shows the request; `rota approvals approve {subject}` approves it.",
        step=step.id,
        waits_for=step.job,
        next_at=min(dates, default=None),
        next_try="when enough people have approved it",
    )


def _ended_sentence(run: WorkflowRunView, saga: SagaView | None) -> str:
    sentence = f"It has ended as {run.state}{f': {run.error}' if run.error else '.'}"
    sentence = sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
    if saga is None or not saga.entries:
        return sentence
    failed = [entry for entry in saga.entries if entry.state in _FAILED_ENTRY_STATES]
    match saga.state:
        case "open":
            return f"{sentence} Its jobs are not undone: `rota workflow rollback {run.id}` does that."
        case "rolling_back":
            return f"{sentence} Its jobs are being undone.{_failed_compensations_sentence(failed)}"
        case "rolled_back":
            return f"{sentence} Its jobs were undone."
        case _:
            again = f" `rota workflow rollback {run.id}` retries."
            return f"{sentence} Its jobs were undone in part.{_failed_compensations_sentence(failed)}{again}"


def _failed_compensations_sentence(failed: list[SagaEntryView]) -> str:
    names = "; ".join(f"{_entry_name(each)} ({(each.error or each.state).rstrip('.')})" for each in failed[:5])
    return f" Not undone: {names}." if names else ""


def _entry_name(entry: SagaEntryView) -> str:
    return f"step {entry.step}" if entry.step else f"job {entry.job}"


def _waiting_step(run: WorkflowRunView, step: WorkflowStepView) -> str:
    if step.state is not StepState.STOPPING:
        return f"Step {step.id} waits"
    ending = f"It is being ended ({run.error.rstrip('.')}); step" if run.error else "Step"
    return f"{ending} {step.id} is being stopped, and waits"


def _explain_remedy(step: WorkflowStepView) -> str:
    return f"`rota explain {step.job}` explains why it has not ended."


def _delay_remedy(run: WorkflowRunView) -> str:
    return f"Wait for that time, or stop the run with `rota workflow cancel {run.id}`."
