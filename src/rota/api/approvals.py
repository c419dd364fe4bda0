"""An approval with its subject. No I/O."""

from __future__ import annotations

import msgspec

from rota.api.jobs import JobView
from rota.model.approvals import ApprovalView
from rota.model.workflows.approval_steps import StepApprovalView


class ApprovalDetail(msgspec.Struct, frozen=True, kw_only=True):
    approval: ApprovalView
    job: JobView | None
    """The job as stored; None when the approval is not for a job or the job is no longer kept."""
    step: StepApprovalView | None = None
    """The same for a step of a run."""
