"""Where the parts of the engine report what happened: one call after each commit, which neither blocks nor raises.

A job that ends within a fifth of a second skips the intermediate states (`rota.engine.dispatch.state_writer`), so only
its end is published. Jobs submitted in a caller's own transaction are first published when they are dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from rota.engine.events.publisher import EventPublisher
from rota.model.approvals import Approval, ApprovalState
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult
from rota.model.jobs.validation import ValidatedSubmission

if TYPE_CHECKING:
    from rota.engine.admission.controller import AdmissionOutcome
    from rota.engine.completion.job_ends import JobEnd
    from rota.engine.completion.publisher import DeadLetterNotice
    from rota.engine.dispatch.state_writer import JobStateChange

_DENYING_STATES: Final = (ApprovalState.REJECTED, ApprovalState.EXPIRED)


class EventSink(Protocol):
    def jobs_submitted(self, plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult], /) -> None: ...

    def jobs_decided(self, outcome: AdmissionOutcome, /) -> None: ...

    def job_states_changed(self, state: str, changes: Sequence[JobStateChange], /) -> None: ...

    def jobs_ended(self, jobs: Sequence[JobEnd], /) -> None: ...

    def approvals_requested(self, approvals: Sequence[Approval], /) -> None: ...

    def approval_decided(self, approval: Approval, /) -> None: ...

    def dead_lettered(self, notices: Sequence[DeadLetterNotice], /) -> None:
        """Frames or outputs."""
        ...

    def message_dead_lettered(self, reason: str, /) -> None: ...

    def worker_changed(self, change: str, worker: UUID, name: str, pool: str, /) -> None:
        """`change`: came, draining, gone or lost."""
        ...


class PublishedEvents:
    """Publishes them to the clients of all servers."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher

    def jobs_submitted(self, plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult], /) -> None:
        self._publisher.emit_job_states(
            (one.state, plan.show, plan.topic, one.job)
            for plan, one in zip(plans, submitted, strict=True)
            if one.state is not None and not one.already
        )

    def jobs_decided(self, outcome: AdmissionOutcome, /) -> None:
        admitted, denied, held = set(outcome.admitted), set(outcome.denied), set(outcome.held)
        self._publisher.emit_job_states(
            (JobState.SCHEDULED if job.id in admitted else JobState.APPROVAL_REQUIRED, job.show, job.topic, job.id)
            for job in outcome.asked
            if job.id in admitted or job.id in held
        )
        for job in outcome.asked:
            if job.id in denied:
                self._publisher.emit_dead_letter("job", outcome.decisions[job.id].reason, job.show, [job.id])

    def job_states_changed(self, state: str, changes: Sequence[JobStateChange], /) -> None:
        self._publisher.emit_job_states((state, each.show, each.topic, each.job) for each in changes)

    def jobs_ended(self, jobs: Sequence[JobEnd], /) -> None:
        self._publisher.emit_job_states((job.state, job.show, job.topic, job.job) for job in jobs)

    def approvals_requested(self, approvals: Sequence[Approval], /) -> None:
        for approval in approvals:
            jobs = [UUID(approval.subject)] if approval.kind == "job" else []
            facts = {"approval": str(approval.id), "of": approval.kind, "rule": approval.rule}
            self._publisher.emit("approval.requested", show=approval.show_id, jobs=jobs, runs=(), **facts)

    def approval_decided(self, approval: Approval, /) -> None:
        """The audit trail publishes the decision; only the dead letter of a denied job is published here."""
        if approval.kind == "job" and approval.state in _DENYING_STATES:
            self._publisher.emit_dead_letter(
                "job", f"approval_{approval.state}", approval.show_id, [UUID(approval.subject)]
            )

    def dead_lettered(self, notices: Sequence[DeadLetterNotice], /) -> None:
        for notice in notices:
            self._publisher.emit_dead_letter(notice.what, notice.reason, notice.show, [notice.job])

    def message_dead_lettered(self, reason: str, /) -> None:
        self._publisher.emit_dead_letter("message", reason)

    def worker_changed(self, change: str, worker: UUID, name: str, pool: str, /) -> None:
        self._publisher.emit(f"worker.{change}", worker=str(worker), name=name, pool=pool)


class DiscardedEvents:
    """Publishes nothing: for a process that has no connection to NATS, such as a command with PostgreSQL alone."""

    def jobs_submitted(self, plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult], /) -> None: ...

    def jobs_decided(self, outcome: AdmissionOutcome, /) -> None: ...

    def job_states_changed(self, state: str, changes: Sequence[JobStateChange], /) -> None: ...

    def jobs_ended(self, jobs: Sequence[JobEnd], /) -> None: ...

    def approvals_requested(self, approvals: Sequence[Approval], /) -> None: ...

    def approval_decided(self, approval: Approval, /) -> None: ...

    def dead_lettered(self, notices: Sequence[DeadLetterNotice], /) -> None: ...

    def message_dead_lettered(self, reason: str, /) -> None: ...

    def worker_changed(self, change: str, worker: UUID, name: str, pool: str, /) -> None: ...
