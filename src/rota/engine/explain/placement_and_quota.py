"""What dispatch would do with frames of a class now: the plan of placement, then the limits, in its order. Pure.

A batch is spread over workers, and the books are asked worker by worker in the order of the plan, so this asks them in
the same order. A share that refuses closes its pool, and what is left goes on to the next pool of the topic; any other
limit refuses wherever a frame would run. It is dispatch without its effects, and rests on the same functions:
`Registry.look`, `quota.fits`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

import msgspec

from rota.accounting.limits_snapshot import LimitsSnapshot
from rota.model.ids import PoolId
from rota.model.quota import Ask, Level, Refusal
from rota.model.reasons import Reason
from rota.placement import PlacementPlan


class PlacementLookup(Protocol):
    def __call__(self, n: int, *, without: Collection[PoolId] = ()) -> PlacementPlan: ...


class PoolQuotaRefusal(msgspec.Struct, frozen=True):
    """A limit that says no to a frame, and the pool in which it would have run."""

    refusal: Refusal
    pool: PoolId
    pool_name: str

    @property
    def level(self) -> Level:
        return self.refusal.table


class DispatchForecast(msgspec.Struct, frozen=True, kw_only=True):
    """How many frames would start, and with which word the next is refused; None if it is not."""

    starts: int = 0
    refused_by: Reason | None = None
    refused: tuple[PoolQuotaRefusal, ...] = ()
    """Limits that were met on the way, each once: shares of several pools, or what ended the search."""
    placed: bool = True
    """False: no worker had room to begin with, so that no limit was asked."""


def forecast_dispatch(look: PlacementLookup, frames: int, standings: LimitsSnapshot, ask: Ask) -> DispatchForecast:
    plan = look(frames)
    if not plan.portions:
        return DispatchForecast(refused_by=plan.refusal or Reason.NO_WORKERS, placed=False)
    if standings.undecided is not None:
        return DispatchForecast(refused_by=Reason.BOOKS_UNAVAILABLE)
    started: Counter[PoolId] = Counter()
    full: dict[PoolId, PoolQuotaRefusal] = {}
    while True:  # every pass closes a pool, or is the last
        standings, refused = _book_plan(plan, standings, ask, started)
        shares = {each.pool: each for each in refused if each.level is Level.SUBSCRIPTION}
        final = next((each for each in refused if each.level is not Level.SUBSCRIPTION), None)
        if final is not None:
            return _refused_forecast(started, Reason.of_level(final.level), [*full.values(), *shares.values(), final])
        full |= shares
        left = frames - started.total()
        if not shares or not left:
            break
        # A look does not know of frames that start here: it is asked for these once more, and they are passed over.
        again = sum(n for pool, n in started.items() if pool not in full)
        plan = look(left + again, without=full.keys())
    if not left:
        return DispatchForecast(starts=frames)
    nowhere = plan.refusal or Reason.NO_WORKERS
    if full and nowhere is Reason.NO_WORKERS:
        nowhere = Reason.QUOTA_SUBSCRIPTION
    return _refused_forecast(started, nowhere, [*full.values()])


def _book_plan(
    plan: PlacementPlan, standings: LimitsSnapshot, ask: Ask, started: Counter[PoolId]
) -> tuple[LimitsSnapshot, list[PoolQuotaRefusal]]:
    """Book what a plan has beyond what has started, which is counted in `started`; and who says no, in order."""
    passed = Counter(started)
    refused: list[PoolQuotaRefusal] = []
    for portion in plan.portions:
        pool = portion.pool_id
        old = min(passed[pool], portion.n)
        passed[pool] -= old
        fit = standings.fits(pool, ask, portion.n - old)
        standings = standings.with_booked(pool, ask, fit.count)
        started[pool] += fit.count
        if fit.refusal is not None:
            refused.append(PoolQuotaRefusal(fit.refusal, pool, portion.pool))
    return standings, refused


def _refused_forecast(started: Counter[PoolId], by: Reason, refused: list[PoolQuotaRefusal]) -> DispatchForecast:
    return DispatchForecast(starts=started.total(), refused_by=by, refused=tuple(refused))
