"""Where events come from: what the parts of the engine say of their work, as it is told to the stream.

Each part has a callback that it calls after its commit; without anybody here they say it to nobody. A job that ends
within a fifth of a second is not marked (`rota.engine.marks`), so only its end is told. Jobs that are submitted in a
transaction of somebody else's are heard of when they are dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from rota.engine.approving import Approver
from rota.engine.doors import Doors
from rota.engine.events import Teller
from rota.engine.finish import Finisher, JobEnd, Letter
from rota.engine.gatekeeper import Gatekeeper, Judged
from rota.engine.marks import Marked, Marks
from rota.engine.recovery import Recovery
from rota.engine.submit import Submitter
from rota.engine.upkeep_letters import Letters
from rota.model.approval import Approval, ApprovalState
from rota.model.job import Submitted
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState
from rota.model.messages import Hello

_DENYING: Final = (ApprovalState.REJECTED, ApprovalState.EXPIRED)


class Sources:
    def __init__(self, teller: Teller) -> None:
        self.teller = teller

    def connect(
        self,
        submitter: Submitter,
        gatekeeper: Gatekeeper,
        approver: Approver,
        marks: Marks,
        finisher: Finisher,
        doors: Doors,
        recovery: Recovery,
        letters: Letters,
    ) -> None:
        submitter.on_submitted = self.submitted
        gatekeeper.on_judged = self.judged
        gatekeeper.gated.on_requested = self.requested
        approver.on_decided = self.approval
        marks.on_marked = self.marked
        finisher.listeners.append(self.ended)
        finisher.on_letters = self.letters
        doors.on_came = self.came
        recovery.on_worker = self.worker
        letters.on_letter = self.letter

    def submitted(self, plans: Sequence[Plan], submitted: Sequence[Submitted]) -> None:
        self.teller.jobs(
            (one.state, plan.show, plan.topic, one.job)
            for plan, one in zip(plans, submitted, strict=True)
            if one.state is not None and not one.already
        )

    def judged(self, judged: Judged) -> None:
        admitted, denied, held = set(judged.admitted), set(judged.denied), set(judged.held)
        self.teller.jobs(
            (JobState.SCHEDULED if job.id in admitted else JobState.APPROVAL_REQUIRED, job.show, job.topic, job.id)
            for job in judged.asked
            if job.id in admitted or job.id in held
        )
        for job in judged.asked:
            if job.id in denied:
                self.teller.letter("job", judged.decisions[job.id].reason, job.show, [job.id])

    def requested(self, approvals: Sequence[Approval]) -> None:
        for approval in approvals:
            jobs = [UUID(approval.subject)] if approval.kind == "job" else []
            facts = {"approval": str(approval.id), "of": approval.kind, "rule": approval.rule}
            self.teller.tell("approval.requested", show=approval.show_id, jobs=jobs, runs=(), **facts)

    def approval(self, approval: Approval) -> None:
        """Decided, which is told by the audit trail; the letter of a job that is denied by it is not."""
        if approval.kind == "job" and approval.state in _DENYING:
            self.teller.letter("job", f"approval_{approval.state}", approval.show_id, [UUID(approval.subject)])

    def marked(self, state: str, marked: Sequence[Marked]) -> None:
        self.teller.jobs((state, each.show, each.topic, each.job) for each in marked)

    def ended(self, jobs: Sequence[JobEnd]) -> None:
        self.teller.jobs((job.state, job.show, job.topic, job.job) for job in jobs)

    def letters(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self.teller.letter(letter.what, letter.reason, letter.show, [letter.job])

    def came(self, worker: UUID, hello: Hello) -> None:
        self.worker("came", worker, hello.name, hello.pool)

    def worker(self, how: str, worker: UUID, name: str, pool: str) -> None:
        self.teller.tell(f"worker.{how}", worker=str(worker), name=name, pool=pool)

    def letter(self, reason: str) -> None:
        self.teller.letter("message", reason)
