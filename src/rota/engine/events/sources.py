"""Where events come from: what the parts of the engine say of their work, as it is told to the stream.

Each part has a callback that it calls after its commit; without anybody here they say it to nobody. A job that ends
within a fifth of a second is not marked (`rota.engine.dispatch.state_writer`), so only its end is told. Jobs that are submitted in a
transaction of somebody else's are heard of when they are dispatched.
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
    def __init__(self, teller: EventPublisher) -> None:
        self.teller = teller

    def connect(
        self,
        submitter: Submitter,
        gatekeeper: AdmissionController,
        approver: Approver,
        marks: JobStateWriter,
        finisher: Finisher,
        doors: WorkerRegistration,
        recovery: EngineReconciler,
        letters: DeadLetterRecorder,
    ) -> None:
        submitter.on_submitted = self.on_submitted
        gatekeeper.on_decided = self.on_admission_decided
        gatekeeper.approval_requests.on_requested = self.on_approvals_requested
        approver.on_decided = self.on_approval_decided
        marks.on_marked = self.on_job_state_changed
        finisher.listeners.append(self.on_jobs_ended)
        finisher.on_dead_letters = self.on_dead_letters
        doors.on_came = self.on_worker_registered
        recovery.on_worker = self.on_worker_changed
        letters.on_letter = self.on_message_dead_lettered

    def on_submitted(self, plans: Sequence[ValidatedSubmission], submitted: Sequence[SubmitResult]) -> None:
        self.teller.emit_job_states(
            (one.state, plan.show, plan.topic, one.job)
            for plan, one in zip(plans, submitted, strict=True)
            if one.state is not None and not one.already
        )

    def on_admission_decided(self, judged: AdmissionOutcome) -> None:
        admitted, denied, held = set(judged.admitted), set(judged.denied), set(judged.held)
        self.teller.emit_job_states(
            (JobState.SCHEDULED if job.id in admitted else JobState.APPROVAL_REQUIRED, job.show, job.topic, job.id)
            for job in judged.asked
            if job.id in admitted or job.id in held
        )
        for job in judged.asked:
            if job.id in denied:
                self.teller.emit_dead_letter("job", judged.decisions[job.id].reason, job.show, [job.id])

    def on_approvals_requested(self, approvals: Sequence[Approval]) -> None:
        for approval in approvals:
            jobs = [UUID(approval.subject)] if approval.kind == "job" else []
            facts = {"approval": str(approval.id), "of": approval.kind, "rule": approval.rule}
            self.teller.emit("approval.requested", show=approval.show_id, jobs=jobs, runs=(), **facts)

    def on_approval_decided(self, approval: Approval) -> None:
        """Decided, which is told by the audit trail; the letter of a job that is denied by it is not."""
        if approval.kind == "job" and approval.state in _DENYING_STATES:
            self.teller.emit_dead_letter(
                "job", f"approval_{approval.state}", approval.show_id, [UUID(approval.subject)]
            )

    def on_job_state_changed(self, state: str, marked: Sequence[JobStateChange]) -> None:
        self.teller.emit_job_states((state, each.show, each.topic, each.job) for each in marked)

    def on_jobs_ended(self, jobs: Sequence[JobEnd]) -> None:
        self.teller.emit_job_states((job.state, job.show, job.topic, job.job) for job in jobs)

    def on_dead_letters(self, letters: Sequence[DeadLetterNotice]) -> None:
        for letter in letters:
            self.teller.emit_dead_letter(letter.what, letter.reason, letter.show, [letter.job])

    def on_worker_registered(self, worker: UUID, hello: Register) -> None:
        self.on_worker_changed("came", worker, hello.name, hello.pool)

    def on_worker_changed(self, how: str, worker: UUID, name: str, pool: str) -> None:
        self.teller.emit(f"worker.{how}", worker=str(worker), name=name, pool=pool)

    def on_message_dead_lettered(self, reason: str) -> None:
        self.teller.emit_dead_letter("message", reason)
