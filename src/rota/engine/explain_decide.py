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

from rota.accounting.standings import Standings
from rota.model.ids import PoolId
from rota.model.quota import Ask, Level, Refusal
from rota.model.reasons import Reason
from rota.placement import Plan


class Look(Protocol):
    def __call__(self, n: int, *, without: Collection[PoolId] = ()) -> Plan: ...


class Refused(msgspec.Struct, frozen=True):
    """A limit that says no to a frame, and the pool in which it would have run."""

    refusal: Refusal
    pool: PoolId
    pool_name: str

    @property
    def level(self) -> Level:
        return self.refusal.table


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How many frames would start, and with which word the next is refused; None if it is not."""

    starts: int = 0
    refused_by: Reason | None = None
    refused: tuple[Refused, ...] = ()
    """Limits that were met on the way, each once: shares of several pools, or what ended the search."""
    placed: bool = True
    """False: no worker had room to begin with, so that no limit was asked."""


def decide(look: Look, frames: int, standings: Standings, ask: Ask) -> Decision:
    plan = look(frames)
    if not plan.portions:
        return Decision(refused_by=plan.refusal or Reason.NO_WORKERS, placed=False)
    if standings.undecided is not None:
        return Decision(refused_by=Reason.BOOKS_UNAVAILABLE)
    started: Counter[PoolId] = Counter()
    full: dict[PoolId, Refused] = {}
    while True:  # every pass closes a pool, or is the last
        standings, refused = _booked(plan, standings, ask, started)
        shares = {each.pool: each for each in refused if each.level is Level.SUBSCRIPTION}
        final = next((each for each in refused if each.level is not Level.SUBSCRIPTION), None)
        if final is not None:
            return _refused(started, Reason.of_level(final.level), [*full.values(), *shares.values(), final])
        full |= shares
        left = frames - started.total()
        if not shares or not left:
            break
        # A look does not know of frames that start here: it is asked for these once more, and they are passed over.
        again = sum(n for pool, n in started.items() if pool not in full)
        plan = look(left + again, without=full.keys())
    if not left:
        return Decision(starts=frames)
    nowhere = plan.refusal or Reason.NO_WORKERS
    if full and nowhere is Reason.NO_WORKERS:
        nowhere = Reason.QUOTA_SUBSCRIPTION
    return _refused(started, nowhere, [*full.values()])


def _booked(plan: Plan, standings: Standings, ask: Ask, started: Counter[PoolId]) -> tuple[Standings, list[Refused]]:
    """Book what a plan has beyond what has started, which is counted in `started`; and who says no, in order."""
    passed = Counter(started)
    refused: list[Refused] = []
    for portion in plan.portions:
        pool = portion.pool_id
        old = min(passed[pool], portion.n)
        passed[pool] -= old
        fit = standings.fits(pool, ask, portion.n - old)
        standings = standings.with_booked(pool, ask, fit.count)
        started[pool] += fit.count
        if fit.refusal is not None:
            refused.append(Refused(fit.refusal, pool, portion.pool))
    return standings, refused


def _refused(started: Counter[PoolId], by: Reason, refused: list[Refused]) -> Decision:
    return Decision(starts=started.total(), refused_by=by, refused=tuple(refused))
