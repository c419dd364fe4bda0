"""Jobs that end: the last statement of every transaction that ends frames."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from rota.infra.postgres import Record, Transaction, query
from rota.model.ids import JobId, ShowId
from rota.model.job_states import JobState

COUNT_ENDS = query(__package__, "layers_count")
END_AS = query(__package__, "job_end_as")
FINISH = query(__package__, "jobs_finish")


class JobEnd(msgspec.Struct, frozen=True):
    """A job that ended in this transaction."""

    job: JobId
    show: ShowId
    topic: str
    state: JobState
    workflow_id: str | None


async def finish_jobs(tx: Transaction, jobs: Iterable[UUID], because: str | None = None) -> list[JobEnd]:
    """End those of the jobs that have no open frame."""
    return [job_end(row) for row in await tx.rows(FINISH, sorted(jobs), because)]


def job_end(row: Record) -> JobEnd:
    return JobEnd(
        JobId(row["pk_job"]), ShowId(row["pk_show"]), row["topic"], JobState(row["state"]), row["workflow_id"]
    )
