"""What dispatch would do with frames of a class now: the plan of placement, then the limits, in its order. Pure.

A batch is spread over workers, and the books are asked worker by worker in the order of the plan, so this asks them in
the same order. It is dispatch without its effects, and rests on the same functions: `Registry.look`, `quota.fits`.
"""

from __future__ import annotations

import msgspec

from rota.accounting.standings import Standings
from rota.model.quota import Ask, Refusal
from rota.model.reasons import Reason
from rota.placement import Plan, Portion


class Decision(msgspec.Struct, frozen=True):
    """How many frames would start, and the first that says no; None if nobody does."""

    starts: int
    refused_by: Reason | None = None
    refusal: Refusal | None = None
    portion: Portion | None = None
    """Where the frame would have run that the books refuse."""


def decide(plan: Plan, standings: Standings, ask: Ask) -> Decision:
    if not plan.portions:
        return Decision(0, plan.refusal or Reason.NO_WORKERS)
    if standings.undecided is not None:
        return Decision(0, Reason.BOOKS_UNAVAILABLE, None, plan.portions[0])
    starts, first = 0, None
    for portion in plan.portions:
        fit = standings.fits(portion.pool_id, ask, portion.n)
        starts += fit.count
        standings = standings.with_booked(portion.pool_id, ask, fit.count)
        if fit.refusal is not None and first is None:
            first = (fit.refusal, portion)
    if first is None:
        return Decision(starts, plan.refusal)
    return Decision(starts, Reason.of_level(first[0].table), *first)
