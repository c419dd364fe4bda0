"""Event sources: connects the callbacks of the engine's parts to the event publisher.

Each part calls its callback after its commit; by default callbacks do nothing. A job that ends within a fifth of a
second skips the intermediate states (`rota.engine.dispatch.state_writer`), so only its end is published. Jobs submitted
in a caller's own transaction are first published when they are dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController, AdmissionOutcome
from rota.engine.cluster.worker_registration import WorkerRegistration
from rota.engine.completion.finisher import DeadLetterNotice, Finisher, JobEnd
from rota.engine.dispatch.state_writer import JobStateChange, JobStateWriter
from rota.engine.events.publisher import EventPublisher
from rota.engine.recovery.dead_letter_recorder import DeadLetterRecorder
from rota.engine.recovery.reconciler import EngineReconciler
from rota.engine.submission.submitter import Submitter
from rota.model.approvals import Approval, ApprovalState
from rota.model.job_states import JobState
from rota.model.jobs.submission import SubmitResult
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.protocol import Register

_DENYING_STATES: Final = (ApprovalState.REJECTED, ApprovalState.EXPIRED)


class EventSources:
    def __init__(self, publisher: EventPublisher) -> None:
        self.publisher = publisher

    def connect(
        self,
        submitter: Submitter,
        admission: AdmissionController,
        approver: Approver,
        state_writer: JobStateWriter,
        finisher: Finisher,
        registration: WorkerRegistration,
        reconciler: EngineReconciler,
        dead_letters: DeadLetterRecorder,
    ) -> None:
        submitter.on_submitted = self.on_submitted
        admission.on_decided = self.on_admission_decided
        admission.approval_requests.on_requested = self.on_approvals_requested
        approver.on_decided = self.on_approval_decided
        state_writer.on_marked = self.on_job_state_changed
        finisher.listeners.append(self.on_jobs_ended)
        finisher.on_dead_letters = self.on_dead_letters
        registration.on_registered = self.on_worker_registered
        reconciler.on_worker = self.on_worker_changed
        dead_letters.on_dead_letter = self.on_message_dead_lettered

    def on_submitted(self, plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult]) -> None:
        self.publisher.emit_job_states(
            (one.state, plan.show, plan.topic, one.job)
            for plan, one in zip(plans, submitted, strict=True)
            if one.state is not None and not one.already
        )

    def on_admission_decided(self, outcome: AdmissionOutcome) -> None:
        admitted, denied, held = set(outcome.admitted), set(outcome.denied), set(outcome.held)
        self.publisher.emit_job_states(
            (JobState.SCHEDULED if job.id in admitted else JobState.APPROVAL_REQUIRED, job.show, job.topic, job.id)
            for job in outcome.asked
            if job.id in admitted or job.id in held
        )
        for job in outcome.asked:
            if job.id in denied:
                self.publisher.emit_dead_letter("job", outcome.decisions[job.id].reason, job.show, [job.id])

    def on_approvals_requested(self, approvals: Sequence[Approval]) -> None:
        for approval in approvals:
            jobs = [UUID(approval.subject)] if approval.kind == "job" else []
            facts = {"approval": str(approval.id), "of": approval.kind, "rule": approval.rule}
            self.publisher.emit("approval.requested", show=approval.show_id, jobs=jobs, runs=(), **facts)

    def on_approval_decided(self, approval: Approval) -> None:
        """The audit trail publishes the decision; only the dead letter of a denied job is published here."""
        if approval.kind == "job" and approval.state in _DENYING_STATES:
            self.publisher.emit_dead_letter(
                "job", f"approval_{approval.state}", approval.show_id, [UUID(approval.subject)]
            )

    def on_job_state_changed(self, state: str, changes: Sequence[JobStateChange]) -> None:
        self.publisher.emit_job_states((state, each.show, each.topic, each.job) for each in changes)

    def on_jobs_ended(self, jobs: Sequence[JobEnd]) -> None:
        self.publisher.emit_job_states((job.state, job.show, job.topic, job.job) for job in jobs)

    def on_dead_letters(self, dead_letters: Sequence[DeadLetterNotice]) -> None:
        for dead_letter in dead_letters:
            self.publisher.emit_dead_letter(dead_letter.what, dead_letter.reason, dead_letter.show, [dead_letter.job])

    def on_worker_registered(self, worker: UUID, register: Register) -> None:
        self.on_worker_changed("came", worker, register.name, register.pool)

    def on_worker_changed(self, change: str, worker: UUID, name: str, pool: str) -> None:
        self.publisher.emit(f"worker.{change}", worker=str(worker), name=name, pool=pool)

    def on_message_dead_lettered(self, reason: str) -> None:
        self.publisher.emit_dead_letter("message", reason)
