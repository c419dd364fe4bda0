"""What a run waits for, or how it ended, in a sentence and with what helps. Reads, and changes nothing.

What holds: a run is told to wait for what its state says that is under way, and for nothing else: the jobs, runs and
approvals that its steps name, the timers it has, whoever paused it. What has happened and was not taken up comes first,
since all else may be over by it. Jobs are explained by `rota.engine.explain`, runs inside runs by this.

An answer is as of a moment: what is read first may have changed when the last is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime

import msgspec

from rota.engine.explain import Explainer
from rota.engine.explain_policy import who_must
from rota.engine.explain_told import Explained
from rota.engine.recovery import LEASE
from rota.infra.postgres import Record, query
from rota.model.approval import Approval
from rota.model.errors import NotFound
from rota.model.ids import JobId, RunId
from rota.model.reasons import Reason
from rota.model.units import span
from rota.model.workflow_approval import subject_of
from rota.model.workflow_run import DEPTH_MAX, Happened, RunState, StepState
from rota.model.workflow_views import Entry, Run, Saga, Step
from rota.policy.approvals import Approvals
from rota.workflow.explain_told import JOBS_MAX, STEPS_MAX, RunCause, RunExplained, cause
from rota.workflow.looking import Looking

READ = query(__package__, "explain_run")

_LIVE = (StepState.RUNNING, StepState.STOPPING)
_NOT_UNDONE = ("failed", "skipped", "corrupt")


class RunExplainer:
    def __init__(self, explainer: Explainer) -> None:
        self.database = explainer.database
        self._jobs = explainer
        self._looking = Looking(self.database)
        self._approvals = Approvals(self.database)

    async def explain(self, run: RunId) -> RunExplained:
        """NotFound when there is no such run."""
        return await _Telling(self).explain(run)

    async def read(self, run: RunId) -> tuple[Run, Saga | None, Record]:
        found = await self._looking.get(run)
        row = await self.database.row(READ, run, LEASE)
        assert row is not None
        return found, await self._looking.saga(found.show_id, str(run)), row

    async def approvals(self, run: Run) -> Mapping[str, Approval]:
        waiting = [step.id for step in run.steps if step.type == "approval" and step.state is StepState.RUNNING]
        return await self._approvals.latest("step", [subject_of(run.id, step) for step in waiting]) if waiting else {}

    async def job(self, job: JobId) -> Explained | None:
        """None: it is not kept any more."""
        try:
            return await self._jobs.explain(job)
        except NotFound:
            return None


class _Telling:
    """One explanation, with the jobs that were explained for it."""

    def __init__(self, reads: RunExplainer) -> None:
        self._reads = reads
        self._jobs: list[Explained] = []

    async def explain(self, run: RunId, depth: int = 0) -> RunExplained:
        found, saga, row = await self._reads.read(run)
        if found.state.ended:
            reasons: list[RunCause] = []
            sentence = _ended(found, saga)
        else:
            reasons = [each async for each in self._live(found, saga, row, depth)]
            sentence = reasons[0].sentence if reasons else Reason.NEWS_WAITING.meaning
        return RunExplained(
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

    async def _live(self, run: Run, saga: Saga | None, row: Record, depth: int) -> AsyncIterator[RunCause]:
        for each in _unheard(run, row):
            yield each
        if run.state is RunState.PAUSED:
            yield _paused(run, row)
        if run.state is RunState.COMPENSATING:
            yield await self._undone(run, saga)
        async for each in self._steps(run, row["now"], depth):
            yield each
        if row["leader"] is None:
            yield cause(Reason.NO_SERVER, run.id, next_try="as soon as one is up")

    async def _steps(self, run: Run, now: datetime, depth: int) -> AsyncIterator[RunCause]:
        approvals = await self._reads.approvals(run)
        for step in [step for step in run.steps if step.state in _LIVE][:STEPS_MAX]:
            match step.type:
                case "approval":
                    yield _asked(run, step, approvals.get(subject_of(run.id, step.id)), now)
                case "delay":
                    yield _delayed(run, step, now)
                case "workflow":
                    async for each in self._inner(run, step, depth):
                        yield each
                case "job":
                    yield await self._job(run, step)

    async def _job(self, run: Run, step: Step) -> RunCause:
        told = await self._told(step)
        said = f": {told}" if told else "."
        return cause(
            Reason.ENDING if step.state is StepState.STOPPING else Reason.WAITING_ON_JOB,
            run.id,
            f"{_that_waits(run, step)} for job {step.job}{said}",
            remedy=_explain(step),
            step=step.id,
            waits_for=step.job,
            next_try="when that job has ended",
        )

    async def _told(self, step: Step) -> str:
        """What a job says of itself; it is told in full besides, unless there are too many of them."""
        if step.job is None or len(self._jobs) >= JOBS_MAX:
            return ""
        told = await self._reads.job(JobId(step.job))
        if told is None:
            return ""
        self._jobs.append(told)
        if not told.state.terminal and not told.waiting and told.on_workers:
            return f"{told.on_workers} of its frames are on workers."
        return told.sentence

    async def _inner(self, run: Run, step: Step, depth: int) -> AsyncIterator[RunCause]:
        assert step.job is not None, "a step that runs a workflow names its run"
        inner = await self.explain(RunId(step.job), depth + 1) if depth < DEPTH_MAX else None
        said = f": {inner.sentence}" if inner is not None else "."
        yield cause(
            Reason.WAITING_ON_RUN,
            run.id,
            f"{_that_waits(run, step)} for run {step.job}{said}",
            remedy=_explain(step),
            step=step.id,
            waits_for=step.job,
            next_try="when that run has ended",
        )
        for each in inner.reasons if inner is not None else ():
            yield each

    async def _undone(self, run: Run, saga: Saga | None) -> RunCause:
        entries = saga.entries if saga is not None else []
        failed = [entry for entry in entries if entry.state in _NOT_UNDONE]
        sentence = f"It failed ({(run.error or 'no reason is known').rstrip('.')}), and what it did is being undone"
        at = next((entry for entry in entries if entry.state == "running"), None)
        if at is not None and at.undo is not None:
            told = await self._reads.job(JobId(at.undo))
            self._jobs += [told] if told is not None else []
            sentence += f": {_named(at)} by job {at.undo}"
        left = sum(entry.state == "pending" for entry in entries)
        sentence += f", and {left} more after it." if left else "."
        return cause(
            Reason.COMPENSATING,
            run.id,
            f"{sentence}{_could_not(failed)}",
            waits_for=at.undo if at is not None else None,
            next_try="when all of it is undone, or cannot be",
        )


def _unheard(run: Run, row: Record) -> Iterator[RunCause]:
    if row["scanned"]:
        job = row["scanned"][0]
        sentence = f"The output of job {job} is being scanned, and is handed on once that is done."
        yield cause(Reason.NEWS_WAITING, run.id, sentence, waits_for=job, next_try="when the scan has ended")
    elif row["news"] or row["due"]:
        yield cause(Reason.NEWS_WAITING, run.id, next_try="when a server next looks, within a second")


def _paused(run: Run, row: Record) -> RunCause:
    told = msgspec.json.decode(row["paused"] or "[]", type=list[Happened])
    by = next((each.why for each in reversed(told) if each.what == "paused" and each.why), "")
    since = f" since {row['paused_at']:%Y-%m-%d %H:%M:%S}" if row["paused_at"] is not None else ""
    sentence = f"It is paused{f' by {by}' if by else ''}{since}: no step of it begins."
    return cause(Reason.RUN_PAUSED, run.id, sentence, next_try="when somebody resumes it")


def _delayed(run: Run, step: Step, now: datetime) -> RunCause:
    if step.due_at is None:
        return cause(Reason.DEFERRED, run.id, remedy=_patience(run), step=step.id)
    left = span(max(0.0, (step.due_at - now).total_seconds()))
    sentence = f"Step {step.id} waits until {step.due_at:%Y-%m-%d %H:%M:%S} UTC, for {left} more."
    return cause(
        Reason.DEFERRED,
        run.id,
        sentence,
        remedy=_patience(run),
        step=step.id,
        next_at=step.due_at,
        next_try="at that time",
    )


def _asked(run: Run, step: Step, approval: Approval | None, now: datetime) -> RunCause:
    subject = subject_of(run.id, step.id)
    said = ""
    if approval is not None:
        agreed = ", ".join(vote.voter for vote in approval.votes if vote.agrees)
        said = f": {who_must(approval, now)}{f' ({agreed})' if agreed else ''}."
    ends = f" It has time until {step.due_at:%Y-%m-%d %H:%M:%S} UTC." if step.due_at is not None else ""
    dates = [at for at in (step.due_at, approval.expires_at if approval is not None else None) if at is not None]
    return cause(
        Reason.APPROVAL_REQUIRED,
        run.id,
        f"Step {step.id} waits for people to agree{said or '.'}{ends}",
        remedy=f"`rota approvals show {subject}` tells to what; `rota approvals approve {subject}` agrees to it.",
        step=step.id,
        waits_for=step.job,
        next_at=min(dates, default=None),
        next_try="when enough people have approved it",
    )


def _ended(run: Run, saga: Saga | None) -> str:
    sentence = f"It has ended as {run.state}{f': {run.error}' if run.error else '.'}"
    sentence = sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
    if saga is None or not saga.entries:
        return sentence
    failed = [entry for entry in saga.entries if entry.state in _NOT_UNDONE]
    match saga.state:
        case "open":
            return f"{sentence} What it did is not undone: `rota workflow rollback {run.id}` does that."
        case "rolling_back":
            return f"{sentence} What it did is being undone.{_could_not(failed)}"
        case "rolled_back":
            return f"{sentence} What it did was undone."
        case _:
            again = f" `rota workflow rollback {run.id}` tries that again."
            return f"{sentence} What it did was undone in part.{_could_not(failed)}{again}"


def _could_not(failed: list[Entry]) -> str:
    told = "; ".join(f"{_named(each)} ({(each.error or each.state).rstrip('.')})" for each in failed[:5])
    return f" Not undone: {told}." if told else ""


def _named(entry: Entry) -> str:
    return f"step {entry.step}" if entry.step else f"job {entry.job}"


def _that_waits(run: Run, step: Step) -> str:
    if step.state is not StepState.STOPPING:
        return f"Step {step.id} waits"
    ending = f"It is being ended ({run.error.rstrip('.')}); step" if run.error else "Step"
    return f"{ending} {step.id} was told to stop, and waits"


def _explain(step: Step) -> str:
    return f"`rota explain {step.job}` tells why that one has not ended."


def _patience(run: Run) -> str:
    return f"Wait for that time, or stop the run with `rota workflow cancel {run.id}`."
