"""One job of one layer, as arguments of a statement that costs PostgreSQL a third of the one for many. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rota.engine.admission.decision import AdmissionDecision
from rota.engine.submission.columns import INPUT_BYTES_MAX, milliseconds
from rota.infra.postgres import query
from rota.model.ids import JobId, LayerId
from rota.model.job_states import JobState
from rota.model.jobs.validation import ValidatedSubmission

INSERT_ONE: Final = query(__package__, "submit_insert_one")


def fits_one_row(plan: ValidatedSubmission, decision: AdmissionDecision) -> bool:
    """Whether the job is one row of each table, queued at once."""
    if len(plan.layers) != 1 or decision.state is not JobState.SCHEDULED:
        return False
    [layer] = plan.layers
    is_bare = plan.caps is None and layer.caps is None and plan.run_at is None and not plan.after
    is_small = layer.input is None or len(layer.input) <= INPUT_BYTES_MAX
    return is_bare and is_small and not layer.items and not layer.frames.ranges


def single_arguments(
    plan: ValidatedSubmission, decision: AdmissionDecision, job: JobId, layer: LayerId, until: datetime | None
) -> tuple[object, ...]:
    """Arguments of the query `submit_insert_one`, in its order."""
    [of] = plan.layers
    said = decision.said.digest if decision.said is not None else None
    return (
        *(plan.show, plan.folder, plan.dept, of.digest, plan.priority),
        *(plan.name, plan.topic, plan.labels, plan.details, plan.deadline_ms, milliseconds(plan.max_wait_s)),
        *(said, until, job, plan.workflow_id, plan.key, plan.digest),
        *(layer, of.name, of.work, of.input, of.frames.first, of.frames.step, of.frames.count),
    )
