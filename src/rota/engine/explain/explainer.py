"""Why a job is not running, what of it runs, or how it ended. Reads, and changes nothing.

What holds, and who sees to it:
- explain and dispatch do not disagree: places come from `Registry.look`, limits from `quota.fits` on the counters of
  the ledger that decides, turns from `Board`, all asked in the order of dispatch (`explain_decide`); a property test
  lets dispatch run after every answer (`tests/property/test_explain.py`);
- what is to be mended first is told first: causes are sorted by the tier of their code (`rota.model.reasons`);
- an answer costs the same with a million frames waiting: lookups by index, a bounded look at the job's own entries, and
  a walk over what is booked and over the workers, never over what waits.

An answer is as of a moment: what is read first may have changed when the last is read. Whoever has no replica at hand
(the command line) leaves registry, board and books out; then workers, turns and usage are read from PostgreSQL, and the
answer says what that cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting.limits_snapshot import LimitsSnapshot, QuotaTarget, read_limits_snapshot
from rota.accounting.service import AccountingService
from rota.api.explanation import LAYERS_MAX, Cause, JobExplanation, QueuePosition, WaitingLayerView
from rota.engine.dispatch.pending_queues import (
    BATCH_FRAMES_MAX,
    CLASSES,
    PendingPosition,
    PendingQueues,
    QueueKey,
    queue_key_from_row,
)
from rota.engine.explain import causes
from rota.engine.explain.ended_jobs import explain_ended_job
from rota.engine.explain.estimate import RecentThroughput, estimate_start
from rota.engine.explain.placement_and_quota import DispatchForecast, PoolQuotaRefusal, forecast_dispatch
from rota.engine.explain.queries import ExplainQueries
from rota.engine.queries.jobs import JobQueries, JobView, Layer
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

UNKNOWN_WITHOUT_SERVER: Final = "how busy machines are with other work is known to servers alone"
_UNPLACEABLE: Final = frozenset({Reason.NO_POOL_MAPPING, Reason.NO_WORKERS})
"""Whoever goes first, it goes nowhere."""
_BLOCKING: Final = frozenset({Reason.TENANT_LIMIT, Reason.NO_SERVER, Reason.BUS_UNAVAILABLE})


class ExplainContext:
    """What is read once for all layers of a job."""

    def __init__(
        self, job: JobView, row: Record, registry: WorkerRegistry, board: PendingQueues, lately: RecentThroughput
    ) -> None:
        self.job = job
        self.row = row
        self.registry = registry
        self.board = board
        self.lately = lately
        self.of_job: list[Cause] = []

    @property
    def now(self) -> datetime:
        now: datetime = self.row["now"]
        return now

    @property
    def is_queued(self) -> bool:
        """Whether its frames are in the queue, and may leave it."""
        return self.job.state not in (JobState.PENDING, JobState.APPROVAL_REQUIRED) and self.row["ends_as"] is None


class PlacementFailure(msgspec.Struct, frozen=True):
    """Why there is no place for any of a layer in these pools, and how many of their workers know its task."""

    found: PlacementExplanation
    knows: int
    pools: Sequence[Pool]


class Explainer:
    def __init__(
        self,
        database: Database,
        *,
        books: AccountingService | None = None,
        registry: WorkerRegistry | None = None,
        board: PendingQueues | None = None,
        bus: Bus | None = None,
    ) -> None:
        self.database = database
        self.jobs = JobQueries(database)
        self._reads = ExplainQueries(database)
        self._books = books
        self._registry = registry
        self._board = board
        self._bus = bus

    async def explain(self, job: JobId, *, layer: str | None = None) -> JobExplanation:
        """Of a whole job, or of one of its layers by name or id. InvalidInput when there is no such job or layer."""
        found = await self.jobs.get(job)
        row = None if found.state.terminal else await self._reads.job(job)
        if row is None:
            # It may have ended between the two looks.
            found = found if found.state.terminal else await self.jobs.get(job)
            return await explain_ended_job(self.database, found, _select_layers(found, layer))
        return await self._explain_live(found, row, _select_layers(found, layer))

    async def _explain_live(self, job: JobView, row: Record, layers: Sequence[Layer]) -> JobExplanation:
        show = ShowId(row["pk_show"])
        look = ExplainContext(
            job,
            row,
            await self._worker_registry(),
            await self._pending_queues(),
            await self._reads.recent_throughput(show),
        )
        holders = await self._reads.tenant_limit_holders(show) if row["jobs_before"] is not None else []
        before = await self._reads.blocking_jobs(job.id) if job.state is JobState.PENDING else ([], 0)
        bus_is_there = self._bus is None or self._bus.connected
        approval = await self._reads.approval(job.id) if job.state is JobState.APPROVAL_REQUIRED else None
        look.of_job = [*causes.job_causes(job, row, holders, before, approval, bus_is_there=bus_is_there)]
        told = await self._layer_views(look, layers)
        found = [*look.of_job, *(each for layer in told for each in layer.reasons)]
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
            layers=tuple(told),
            running=await self._reads.running(job.id, names) if on_workers else (),
            deadline_at=job.deadline_at,
            wait_until=job.wait_until,
            known_by="postgres" if self._registry is None else "server",
            not_known=UNKNOWN_WITHOUT_SERVER if self._registry is None else "",
        )

    async def _layer_views(self, look: ExplainContext, layers: Sequence[Layer]) -> list[WaitingLayerView]:
        waiting = [layer for layer in layers if layer.counts.get(FrameState.WAITING)][:LAYERS_MAX]
        if not waiting:
            return []
        rows = await self._reads.layers(look.job.id, waiting)
        queues = await self.database.rows(CLASSES, sorted({layer.queue for layer in waiting}))
        keys = {row["queue"]: queue_key_from_row(row) for row in queues}
        return [
            await self._layer_view(look, layer, keys[layer.queue], rows[layer.id])
            for layer in waiting
            if layer.id in rows and layer.queue in keys
        ]

    async def _layer_view(self, look: ExplainContext, layer: Layer, key: QueueKey, row: Record) -> WaitingLayerView:
        waiting = layer.counts[FrameState.WAITING]
        deferred = min(row["deferred"], waiting)
        ready = waiting - deferred if look.is_queued else 0
        found: list[Cause] = [causes.paused(layer)] if row["paused"] else []
        if deferred:
            found.append(causes.deferred(look.job, layer, deferred, row["run_at"], look.now))
        decided, refusals = await self._forecast_layer(look, layer, key, max(1, ready))
        # Whether there is room matters when its time has come.
        found += [each for each in refusals if ready or each.tier is Tier.MISCONFIGURED]
        position, before = await self._queue_position(look, layer) if ready else (QueuePosition(), PendingPosition())
        if decided.refused_by not in _UNPLACEABLE:
            # Other queues keep it waiting only where they want the same room.
            contended = decided.refused_by in (None, Reason.POOL_OVERLOADED)
            found += causes.order_causes(look.job, layer, position, before if contended else PendingPosition())
        stopped = not ready or row["paused"] or any(each.code in _BLOCKING for each in look.of_job)
        told = WaitingLayerView(
            id=layer.id,
            name=layer.name,
            queue=layer.queue,
            counts=layer.counts,
            waiting=waiting,
            deferred=deferred,
            parked=look.row["parked"],
            starts=0 if stopped else decided.starts,
            refused_by=_first_refusal(look.of_job, decided) if ready else None,
            reasons=tuple(sorted(found, key=lambda each: each.tier.rank)),
            position=position,
        )
        start = estimate_start(look.job, layer, told, look.of_job, look.lately, look.now)
        return msgspec.structs.replace(told, start=start)

    async def _forecast_layer(
        self, look: ExplainContext, layer: Layer, key: QueueKey, frames: int
    ) -> tuple[DispatchForecast, list[Cause]]:
        """What dispatch would do with so many frames, and all that speaks against it."""
        place = QuotaTarget(key.show, key.folder, look.job.id, layer.id, key.dept)
        live = self._books.live if self._books else None
        met = await read_limits_snapshot(self.database, place, live, by_rows=self._books is None)
        ask = Ask(key.cls.cores, key.cls.gpus)
        decided = forecast_dispatch(
            partial(look.registry.preview_plan, key.cls), min(frames, BATCH_FRAMES_MAX), met, ask
        )
        pools = eligible_pools(key.cls, look.registry.routes).pools
        full = {each.pool for each in decided.refused if each.level is Level.SUBSCRIPTION}
        misplaced = not decided.placed or (decided.refused_by is Reason.POOL_OVERLOADED and not decided.starts)
        # In one breath with the decision: workers of a server change whenever we wait for anything.
        seen = (
            _placement_failure(look.registry, layer, key, [each for each in pools if each.id not in full])
            if misplaced
            else None
        )
        refused = decided.refused if decided.placed else _refusals_in_every_pool(ask, met, pools)
        found = [await self._quota_cause(look.job, layer, key, each, met) for each in refused]
        if met.undecided is not None:
            found = [causes.accounting_unavailable(layer, met.undecided)]
        if seen is not None:
            found.append(await self._placement_cause(layer, key, seen))
        return decided, found

    async def _quota_cause(
        self, job: JobView, layer: Layer, key: QueueKey, refused: PoolQuotaRefusal, met: LimitsSnapshot
    ) -> Cause:
        ids: dict[Level, UUID] = {
            Level.SUBSCRIPTION: refused.pool,
            Level.FOLDER: key.folder,
            Level.JOB: job.id,
            Level.LAYER: layer.id,
            Level.POINT: key.dept,
        }
        holders = await self._reads.limit_holders(key.show, refused.level, ids[refused.level])
        return causes.quota_cause(job, layer, refused, met, holders)

    async def _placement_cause(self, layer: Layer, key: QueueKey, seen: PlacementFailure) -> Cause:
        full = seen.found.reason is Reason.POOL_OVERLOADED
        holders = await self._reads.pool_holders([pool.id for pool in seen.pools]) if full else []
        names = [pool.name for pool in seen.pools]
        return causes.placement_cause(layer, key.cls, seen.found, names, knows=seen.knows, holders=holders)

    async def _queue_position(self, look: ExplainContext, layer: Layer) -> tuple[QueuePosition, PendingPosition]:
        before = look.board.position(layer.queue, look.job.priority)
        ahead = await self._reads.frames_ahead(look.job, layer)
        return QueuePosition(ahead=ahead, queues_before=before.spots, frames_before=before.frames), before

    async def _worker_registry(self) -> WorkerRegistry:
        return self._registry or await load_registry(self.database)

    async def _pending_queues(self) -> PendingQueues:
        if self._board is not None:
            return self._board
        board = PendingQueues(self.database, Queue(self.database), SystemClock())
        await board.refresh()
        await board.refresh_shares()
        return board


def _placement_failure(
    registry: WorkerRegistry, layer: Layer, key: QueueKey, pools: Sequence[Pool]
) -> PlacementFailure:
    names = {pool.name for pool in pools}
    task = f"{TASK_CAPABILITY_PREFIX}{layer.work.task}".lower()
    knows = sum(worker.pool in names and task in worker.capabilities for worker in registry.workers.values())
    return PlacementFailure(registry.explain(key.cls, pools), knows, pools)


def _refusals_in_every_pool(ask: Ask, met: LimitsSnapshot, pools: Sequence[Pool]) -> list[PoolQuotaRefusal]:
    """Where no worker has room: limits that would say no as well, if they do in every pool; each once."""
    refused: dict[tuple[Level, PoolId | None], PoolQuotaRefusal] = {}
    for pool in pools:
        fit = met.fits(pool.id, ask, 1)
        if fit.refusal is None:
            return []
        level = fit.refusal.table
        known = (level, pool.id if level is Level.SUBSCRIPTION else None)
        refused.setdefault(known, PoolQuotaRefusal(fit.refusal, pool.id, pool.name))
    return list(refused.values())


def _first_refusal(of_job: Sequence[Cause], decided: DispatchForecast) -> Reason | None:
    """With which word dispatch refuses: it looks for a place, then at how many jobs the show runs, then at limits."""
    if not decided.placed:
        return decided.refused_by
    if any(each.code is Reason.TENANT_LIMIT for each in of_job):
        return Reason.TENANT_LIMIT
    return decided.refused_by


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
        return "Nothing holds it back: it starts within moments."
    return "Nothing of it waits."
