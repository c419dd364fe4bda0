"""The dispatch forecast for frames of one placement class: placement, then limits, in dispatch order. Pure.

Dispatch spreads a batch over workers and books worker by worker in the order of the plan; this checks the limits in the
same order. A subscription that refuses closes its pool, and the remaining frames go to the next pool of the topic; any
other limit refuses wherever a frame would run. It is dispatch without side effects, on the same functions:
`WorkerRegistry.preview_plan` and `quota.fits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol
from uuid import UUID

import msgspec

from rota.accounting.ledger import QuotaKey
from rota.accounting.limits_snapshot import LimitsSnapshot
from rota.model.ids import PoolId
from rota.model.quota import Ask, Level, Refusal, Usage
from rota.model.reasons import Reason
from rota.placement import PlacementPlan


class PlacementLookup(Protocol):
    def __call__(self, n: int, *, without: Collection[PoolId] = ()) -> PlacementPlan: ...


class PoolQuotaRefusal(msgspec.Struct, frozen=True):
    """A limit that refuses a frame, and the pool in which it would have run."""

    refusal: Refusal
    pool: PoolId
    pool_name: str

    @property
    def level(self) -> Level:
        return self.refusal.table


class RefusalUsage(msgspec.Struct, frozen=True):
    """Usage of a refused resource by the count that refused it, and by the record if they may differ."""

    counted: int
    recorded: int | None
    has_share: bool

    def excess(self, refusal: Refusal) -> int:
        """How much the count is above the record, if the frame would fit by the record; 0 otherwise."""
        starts_some = refusal.current > self.counted
        if starts_some or self.recorded is None or self.recorded + refusal.asked > refusal.limit:
            return 0
        return max(0, self.counted - self.recorded)


class QuotaUsage(msgspec.Struct, frozen=True):
    """The limits with the count that decides, and usage by the record (None: the record itself decides)."""

    limits: LimitsSnapshot
    recorded: Mapping[QuotaKey, Usage] | None

    def against(self, pool_refusal: PoolQuotaRefusal, key: UUID) -> RefusalUsage:
        level, resource = pool_refusal.level, pool_refusal.refusal.resource
        return RefusalUsage(
            counted=self.limits.usage_at(level, pool_refusal.pool).of(resource),
            recorded=None if self.recorded is None else self.recorded.get((level, key), Usage()).of(resource),
            has_share=pool_refusal.pool in self.limits.shares,
        )


class DispatchForecast(msgspec.Struct, frozen=True, kw_only=True):
    """How many frames would start, and the reason that refuses the next; None if none is refused."""

    starts: int = 0
    refused_by: Reason | None = None
    refused: tuple[PoolQuotaRefusal, ...] = ()
    """Limits that refused, each once: subscriptions of several pools, or the limit that ended the search."""
    placed: bool = True
    """False: no worker had capacity, so no limit was checked."""


def forecast_dispatch(preview: PlacementLookup, frames: int, limits: LimitsSnapshot, ask: Ask) -> DispatchForecast:
    plan = preview(frames)
    if not plan.portions:
        return DispatchForecast(refused_by=plan.refusal or Reason.NO_WORKERS, placed=False)
    if limits.undecided is not None:
        return DispatchForecast(refused_by=Reason.BOOKS_UNAVAILABLE)
    started: Counter[PoolId] = Counter()
    full: dict[PoolId, PoolQuotaRefusal] = {}
    while True:  # every pass closes a pool, or is the last
        limits, refused = _book_plan(plan, limits, ask, started)
        shares = {each.pool: each for each in refused if each.level is Level.SUBSCRIPTION}
        final = next((each for each in refused if each.level is not Level.SUBSCRIPTION), None)
        if final is not None:
            return _refused_forecast(started, Reason.of_level(final.level), [*full.values(), *shares.values(), final])
        full |= shares
        remaining = frames - started.total()
        if not shares or not remaining:
            break
        # The preview does not know of frames started here: request room for them again and skip them in the plan.
        already_started = sum(n for pool, n in started.items() if pool not in full)
        plan = preview(remaining + already_started, without=full.keys())
    if not remaining:
        return DispatchForecast(starts=frames)
    reason = plan.refusal or Reason.NO_WORKERS
    if full and reason is Reason.NO_WORKERS:
        reason = Reason.QUOTA_SUBSCRIPTION
    return _refused_forecast(started, reason, [*full.values()])


def _book_plan(
    plan: PlacementPlan, limits: LimitsSnapshot, ask: Ask, started: Counter[PoolId]
) -> tuple[LimitsSnapshot, list[PoolQuotaRefusal]]:
    """Book the frames of a plan beyond those in `started`, which is updated; and the refusals, in order."""
    skip = Counter(started)
    refused: list[PoolQuotaRefusal] = []
    for portion in plan.portions:
        pool = portion.pool_id
        old = min(skip[pool], portion.n)
        skip[pool] -= old
        fit = limits.fits(pool, ask, portion.n - old)
        limits = limits.with_booked(pool, ask, fit.count)
        started[pool] += fit.count
        if fit.refusal is not None:
            refused.append(PoolQuotaRefusal(fit.refusal, pool, portion.pool))
    return limits, refused


def _refused_forecast(started: Counter[PoolId], by: Reason, refused: list[PoolQuotaRefusal]) -> DispatchForecast:
    return DispatchForecast(starts=started.total(), refused_by=by, refused=tuple(refused))
