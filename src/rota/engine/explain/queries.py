"""Statements for explanations, besides those for the job itself: index lookups, or a scan over procs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal
from uuid import UUID

from rota.api.explanation import HOLDERS_MAX, RUNNING_MAX, BlockingJob, Holder, RunningFramesView
from rota.api.jobs import JobView, Layer
from rota.engine.explain.estimate import RecentThroughput
from rota.engine.recovery.reconciler import LEASE
from rota.infra.postgres import Database, Query, Record, query
from rota.model.approvals import Approval
from rota.model.ids import JobId, LayerId, PoolId, ShowId
from rota.model.quota import Level
from rota.policy.approvals import ApprovalStore

JOB = query(__package__, "explain_job")
BLOCKING_JOBS = query(__package__, "explain_before")
LAYERS = query(__package__, "explain_layers")
POSITION = query(__package__, "explain_position")
HOLDERS = query(__package__, "explain_holders")
HOLDERS_POOLS = query(__package__, "explain_holders_pools")
HOLDERS_JOBS = query(__package__, "explain_holders_jobs")
RUNNING = query(__package__, "explain_running")
THROUGHPUT = query(__package__, "explain_rate")

ENTRIES_MAX: Final = 20_000
"""Queue entries of a job that are examined for its position; beyond that the position is unknown."""
THROUGHPUT_JOBS_MAX: Final = 50


class ExplainQueries:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def job(self, job: JobId) -> Record | None:
        """None when the job is not live."""
        return await self.database.row(JOB, job, LEASE)

    async def layers(self, job: JobId, layers: Sequence[Layer]) -> dict[LayerId, Record]:
        rows = await self.database.rows(LAYERS, job, [layer.id for layer in layers])
        return {LayerId(row["pk_layer"]): row for row in rows}

    async def blocking_jobs(self, job: JobId) -> tuple[list[BlockingJob], int]:
        """The first jobs that it waits for, and their total number."""
        rows = await self.database.rows(BLOCKING_JOBS, job, HOLDERS_MAX)
        jobs = [BlockingJob(**{name: row[name] for name in BlockingJob.__struct_fields__}) for row in rows]
        return jobs, rows[0]["jobs"] if rows else 0

    async def approval(self, job: JobId) -> Approval | None:
        """Its latest approval request, if there is one."""
        return (await ApprovalStore(self.database).latest("job", [str(job)])).get(str(job))

    async def frames_ahead(self, job: JobView, layer: Layer) -> int | None:
        """Frames of its own queue ahead of its first; None when there are too many entries to count."""
        found = await self.database.value(POSITION, job.id, layer.id, layer.queue, job.priority, ENTRIES_MAX)
        return None if found is None else int(found)

    async def recent_throughput(self, show: ShowId) -> RecentThroughput:
        row = await self.database.row(THROUGHPUT, show, THROUGHPUT_JOBS_MAX)
        return RecentThroughput(row["jobs"], row["frames"], row["span_s"]) if row is not None else RecentThroughput()

    async def running(self, job: JobId, names: Mapping[LayerId, str]) -> tuple[RunningFramesView, ...]:
        """The workers that run frames of these layers."""
        return tuple(
            RunningFramesView(layer=names[row["layer"]], worker=row["worker"], frames=row["frames"], since=row["since"])
            for row in await self.database.rows(RUNNING, job, RUNNING_MAX)
            if row["layer"] in names
        )

    async def limit_holders(self, show: ShowId, level: Level, key: UUID) -> list[Holder]:
        """The largest users of a limit."""
        return await self._holders("layer" if level is Level.JOB else "job", HOLDERS, show, level.value, key)

    async def pool_holders(self, pools: Sequence[PoolId]) -> list[Holder]:
        return await self._holders("show", HOLDERS_POOLS, list(pools))

    async def tenant_limit_holders(self, show: ShowId) -> list[Holder]:
        """Jobs that count against the show's limit of concurrent jobs."""
        return await self._holders("job", HOLDERS_JOBS, show)

    async def _holders(self, kind: Literal["job", "layer", "show"], which: Query, *of: object) -> list[Holder]:
        return [
            Holder(
                kind=kind,
                id=row["id"],
                name=row["name"],
                frames=row["frames"],
                cores=row["cores"] / 100,
                gpus=row["gpus"],
            )
            for row in await self.database.rows(which, *of, HOLDERS_MAX)
        ]
