"""Why a job is not running, what of it runs, or how it ended. Reads only.

Invariants and who enforces them:
- explain and dispatch agree: placement comes from `WorkerRegistry.preview_plan`, limits from `quota.fits` on the
  counters of the ledger that decides, order from `PendingQueues`, all in dispatch order (`placement_and_quota`); a
  property test runs dispatch after every answer (`tests/property/test_explain.py`);
- the cause to fix first comes first: causes are sorted by the tier of their code (`rota.model.reasons`);
- the cost does not depend on the backlog: index lookups, a bounded scan of the job's own entries, and scans over procs
  and workers, never over waiting frames.

An answer is not a snapshot: earlier reads may be stale by the last one. Callers without a replica (the CLI) omit
registry, pending queues and accounting; workers, order and usage are then read from PostgreSQL, and the answer says
what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting.ledger import DeclineReason
from rota.accounting.limits_snapshot import LimitsSnapshot, QuotaTarget, read_limits_snapshot, read_recorded_usage
from rota.accounting.service import AccountingService
from rota.api.explanation import LAYERS_MAX, Cause, JobExplanation, QueuePosition, WaitingLayerView
from rota.api.jobs import JobView, Layer
from rota.engine.dispatch.pending_queues import BATCH_FRAMES_MAX, PendingPosition, PendingQueues, QueueKey
from rota.engine.dispatch.pending_reader import CLASSES, PendingReader, queue_key_from_row
from rota.engine.explain import causes
from rota.engine.explain.ended_jobs import explain_ended_job
from rota.engine.explain.estimate import RecentThroughput, estimate_start
from rota.engine.explain.placement_and_quota import DispatchForecast, PoolQuotaRefusal, QuotaUsage, forecast_dispatch
from rota.engine.explain.queries import ExplainQueries
from rota.engine.queries.jobs import JobQueries
from rota.engine.queries.workers import load_registry
from rota.infra.clock import SystemClock
from rota.infra.nats import Bus
from rota.infra.postgres import Database, Record
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, PoolId, ShowId
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.work import TASK_CAPABILITY_PREFIX
from rota.model.quota import Ask, Level
from rota.model.reasons import Reason, Tier
from rota.placement import PlacementExplanation, Pool, WorkerRegistry
from rota.placement.explain import eligible_pools
from rota.queue import Queue

UNKNOWN_WITHOUT_SERVER: Final = "the load of machines from other work is known only to servers"
_UNPLACEABLE: Final = frozenset({Reason.NO_POOL_MAPPING, Reason.NO_WORKERS})
"""Queue order is irrelevant for these: there is no place to run."""
_BLOCKING: Final = frozenset({Reason.TENANT_LIMIT, Reason.NO_SERVER, Reason.BUS_UNAVAILABLE})


class ExplainContext:
    """State that is read once for all layers of a job."""

    def __init__(
        self,
        job: JobView,
        row: Record,
        registry: WorkerRegistry,
        pending_queues: PendingQueues,
        recent_throughput: RecentThroughput,
    ) -> None:
        self.job = job
        self.row = row
        self.registry = registry
        self.pending_queues = pending_queues
        self.recent_throughput = recent_throughput
        self.job_causes: list[Cause] = []

    @property
    def now(self) -> datetime:
        now: datetime = self.row["now"]
        return now

    @property
    def is_queued(self) -> bool:
        """Whether its frames are in the queue and may be dispatched."""
        return self.job.state not in (JobState.PENDING, JobState.APPROVAL_REQUIRED) and self.row["ends_as"] is None


class PlacementFailure(msgspec.Struct, frozen=True):
    """Why no frame of a layer can be placed in these pools, and how many of their workers have its task."""

    found: PlacementExplanation
    knows: int
    pools: Sequence[Pool]


class Explainer:
    def __init__(
        self,
        database: Database,
        *,
        accounting: AccountingService | None = None,
        registry: WorkerRegistry | None = None,
        queues: PendingQueues | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.database = database
        self.jobs = JobQueries(database)
        self._queries = ExplainQueries(database)
        self._accounting = accounting
        self._registry = registry
        self._pending = queues
        self._bus = bus

    async def explain(self, job: JobId, *, layer: str | None = None) -> JobExplanation:
        """Explains a job, or one of its layers by name or id. InvalidInput when there is no such job or layer."""
        found = await self.jobs.get(job)
        row = None if found.state.terminal else await self._queries.job(job)
        if row is None:
            # It may have ended between the two reads.
            found = found if found.state.terminal else await self.jobs.get(job)
            return await explain_ended_job(self.database, found, _select_layers(found, layer))
        return await self._explain_live(found, row, _select_layers(found, layer))

    async def _explain_live(self, job: JobView, row: Record, layers: Sequence[Layer]) -> JobExplanation:
        show = ShowId(row["pk_show"])
        context = ExplainContext(
            job,
            row,
            await self._worker_registry(),
            await self._pending_queues(),
            await self._queries.recent_throughput(show),
        )
        holders = await self._queries.tenant_limit_holders(show) if row["jobs_before"] is not None else []
        before = await self._queries.blocking_jobs(job.id) if job.state is JobState.PENDING else ([], 0)
        bus_connected = self._bus is None or self._bus.connected
        approval = await self._queries.approval(job.id) if job.state is JobState.APPROVAL_REQUIRED else None
        context.job_causes = [*causes.job_causes(job, row, holders, before, approval, bus_connected=bus_connected)]
        views = await self._layer_views(context, layers)
        found = [*context.job_causes, *(each for layer in views for each in layer.reasons)]
        found.sort(key=lambda each: each.tier.rank)
        on_workers = _count_frames(layers, FrameState.DISPATCHED)
        names = {layer.id: layer.name for layer in layers}
        return JobExplanation(
            job=job.id,
            name=job.name,
            show=job.show,
            state=job.state,
            reason=job.reason,
            sentence=_sentence(found, layers),
            waiting=_count_frames(layers, FrameState.WAITING),
            on_workers=on_workers,
            reasons=tuple(found),
            layers=tuple(views),
            running=await self._queries.running(job.id, names) if on_workers else (),
            deadline_at=job.deadline_at,
            wait_until=job.wait_until,
            known_by="postgres" if self._registry is None else "server",
            not_known=UNKNOWN_WITHOUT_SERVER if self._registry is None else "",
        )

    async def _layer_views(self, context: ExplainContext, layers: Sequence[Layer]) -> list[WaitingLayerView]:
        waiting = [layer for layer in layers if layer.counts.get(FrameState.WAITING)][:LAYERS_MAX]
        if not waiting:
            return []
        rows = await self._queries.layers(context.job.id, waiting)
        queues = await self.database.rows(CLASSES, sorted({layer.queue for layer in waiting}))
        keys = {row["queue"]: queue_key_from_row(row) for row in queues}
        return [
            await self._layer_view(context, layer, keys[layer.queue], rows[layer.id])
            for layer in waiting
            if layer.id in rows and layer.queue in keys
        ]

    async def _layer_view(self, context: ExplainContext, layer: Layer, key: QueueKey, row: Record) -> WaitingLayerView:
        waiting = layer.counts[FrameState.WAITING]
        deferred = min(row["deferred"], waiting)
        ready = waiting - deferred if context.is_queued else 0
        found: list[Cause] = [causes.paused(layer)] if row["paused"] else []
        if deferred:
            found.append(causes.deferred(context.job, layer, deferred, row["run_at"], context.now))
        forecast, refusals = await self._forecast_layer(context, layer, key, max(1, ready))
        # Capacity matters only to frames that are due.
        found += [each for each in refusals if ready or each.tier is Tier.MISCONFIGURED]
        position, before = await self._queue_position(context, layer) if ready else (QueuePosition(), PendingPosition())
        if forecast.refused_by not in _UNPLACEABLE:
            # Other queues delay it only where they compete for the same capacity.
            contended = forecast.refused_by in (None, Reason.POOL_OVERLOADED)
            found += causes.order_causes(context.job, layer, position, before if contended else PendingPosition())
        stopped = not ready or row["paused"] or any(each.code in _BLOCKING for each in context.job_causes)
        view = WaitingLayerView(
            id=layer.id,
            name=layer.name,
            queue=layer.queue,
            counts=layer.counts,
            waiting=waiting,
            deferred=deferred,
            parked=context.row["parked"],
            starts=0 if stopped else forecast.starts,
            refused_by=_first_refusal(context.job_causes, forecast) if ready else None,
            reasons=tuple(sorted(found, key=lambda each: each.tier.rank)),
            position=position,
        )
        start = estimate_start(context.job, layer, view, context.job_causes, context.recent_throughput, context.now)
        return msgspec.structs.replace(view, start=start)

    async def _forecast_layer(
        self, context: ExplainContext, layer: Layer, key: QueueKey, frames: int
    ) -> tuple[DispatchForecast, list[Cause]]:
        """The dispatch forecast for so many frames, and every cause against it."""
        place = QuotaTarget(key.show, key.folder, context.job.id, layer.id, key.dept)
        live = self._accounting.live if self._accounting else None
        limits = await read_limits_snapshot(self.database, place, live, by_rows=self._accounting is None)
        if self._accounting is not None and key.show in self._accounting.locked_shows:
            limits = msgspec.structs.replace(limits, undecided=DeclineReason.LOCKED)
        ask = Ask(key.cls.cores, key.cls.gpus)
        forecast = forecast_dispatch(
            partial(context.registry.preview_plan, key.cls), min(frames, BATCH_FRAMES_MAX), limits, ask
        )
        pools = eligible_pools(key.cls, context.registry.routes).pools
        full = {each.pool for each in forecast.refused if each.level is Level.SUBSCRIPTION}
        misplaced = not forecast.placed or (forecast.refused_by is Reason.POOL_OVERLOADED and not forecast.starts)
        # No await between this and the forecast: a server's registry may change at any await.
        failure = (
            _placement_failure(context.registry, layer, key, [each for each in pools if each.id not in full])
            if misplaced
            else None
        )
        refusals = forecast.refused if forecast.placed else _refusals_in_every_pool(ask, limits, pools)
        # Unmanaged shows are counted in PostgreSQL alone.
        live_only = limits.managed and limits.undecided is None and self._accounting is not None
        recorded = await read_recorded_usage(self.database, place) if refusals and live_only else None
        found = [
            await self._quota_cause(context.job, layer, key, each, QuotaUsage(limits, recorded)) for each in refusals
        ]
        if limits.undecided is not None:
            found = [causes.accounting_unavailable(layer, limits.undecided)]
        if failure is not None:
            found.append(await self._placement_cause(layer, key, failure))
        return forecast, found

    async def _quota_cause(
        self, job: JobView, layer: Layer, key: QueueKey, refusal: PoolQuotaRefusal, usage: QuotaUsage
    ) -> Cause:
        ids: dict[Level, UUID] = {
            Level.SUBSCRIPTION: refusal.pool,
            Level.FOLDER: key.folder,
            Level.JOB: job.id,
            Level.LAYER: layer.id,
            Level.POINT: key.dept,
        }
        holders = await self._queries.limit_holders(key.show, refusal.level, ids[refusal.level])
        return causes.quota_cause(job, layer, refusal, usage.against(refusal, ids[refusal.level]), holders)

    async def _placement_cause(self, layer: Layer, key: QueueKey, failure: PlacementFailure) -> Cause:
        full = failure.found.reason is Reason.POOL_OVERLOADED
        holders = await self._queries.pool_holders([pool.id for pool in failure.pools]) if full else []
        names = [pool.name for pool in failure.pools]
        return causes.placement_cause(layer, key.cls, failure.found, names, knows=failure.knows, holders=holders)

    async def _queue_position(self, context: ExplainContext, layer: Layer) -> tuple[QueuePosition, PendingPosition]:
        before = context.pending_queues.position(layer.queue, context.job.priority)
        ahead = await self._queries.frames_ahead(context.job, layer)
        return QueuePosition(ahead=ahead, queues_before=before.queues, frames_before=before.frames), before

    async def _worker_registry(self) -> WorkerRegistry:
        return self._registry or await load_registry(self.database)

    async def _pending_queues(self) -> PendingQueues:
        if self._pending is not None:
            return self._pending
        registry = await self._worker_registry()
        clock = SystemClock()
        pending_queues = PendingQueues(clock, registry.usable_pools)
        reader = PendingReader(pending_queues, self.database, Queue(self.database), clock)
        await reader.refresh()
        await reader.refresh_shares()
        return pending_queues


def _placement_failure(
    registry: WorkerRegistry, layer: Layer, key: QueueKey, pools: Sequence[Pool]
) -> PlacementFailure:
    names = {pool.name for pool in pools}
    task = f"{TASK_CAPABILITY_PREFIX}{layer.work.task}".lower()
    knows = sum(worker.pool in names and task in worker.capabilities for worker in registry.workers.values())
    return PlacementFailure(registry.explain(key.cls, pools), knows, pools)


def _refusals_in_every_pool(ask: Ask, limits: LimitsSnapshot, pools: Sequence[Pool]) -> list[PoolQuotaRefusal]:
    """Where no worker has capacity: the limits that would refuse as well, if they do in every pool; each once."""
    refusals: dict[tuple[Level, PoolId | None], PoolQuotaRefusal] = {}
    for pool in pools:
        fit = limits.fits(pool.id, ask, 1)
        if fit.refusal is None:
            return []
        level = fit.refusal.table
        known = (level, pool.id if level is Level.SUBSCRIPTION else None)
        refusals.setdefault(known, PoolQuotaRefusal(fit.refusal, pool.id, pool.name))
    return list(refusals.values())


def _first_refusal(job_causes: Sequence[Cause], forecast: DispatchForecast) -> Reason | None:
    """The reason dispatch would give: it checks placement, then the show's number of jobs, then the limits."""
    if not forecast.placed:
        return forecast.refused_by
    if any(each.code is Reason.TENANT_LIMIT for each in job_causes):
        return Reason.TENANT_LIMIT
    return forecast.refused_by


def _select_layers(job: JobView, layer: str | None) -> list[Layer]:
    if layer is None:
        return job.layers
    found = [each for each in job.layers if layer in (each.name, str(each.id))]
    if not found:
        names = ", ".join(each.name for each in job.layers[:LAYERS_MAX])
        raise InvalidInput(f"Job {job.id} has no layer {layer[:64]!r}: it has {names}.", job=str(job.id))
    return found


def _count_frames(layers: Sequence[Layer], state: FrameState) -> int:
    return sum(layer.counts.get(state, 0) for layer in layers)


def _sentence(found: Sequence[Cause], layers: Sequence[Layer]) -> str:
    if found:
        return found[0].sentence
    if _count_frames(layers, FrameState.WAITING):
        return "Nothing blocks it: it starts within moments."
    return "No frame of it is waiting."
