"""When the next frame starts, guessed from what ended lately and with its grounds, or that nobody knows. Pure.

How fast frames of the layer ended since its job began tells best; otherwise how fast frames, or jobs, of the show ended
within the last hour. That assumes that things go on as they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from rota.engine.explain_told import Cause, Estimate, LayerTold
from rota.engine.jobs import Job, Layer
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason, Tier
from rota.model.units import span

ENDS_LEAST: Final = 3
"""Ends that say nothing yet about a pace."""
FAR_S: Final = 30 * 86_400.0
_PASSING: Final = frozenset({Tier.QUOTA, Tier.CAPACITY, Tier.ORDER})
_BEGUN: Final = (JobState.DISPATCHED, JobState.RUNNING)
_UNKNOWABLE: Final = frozenset({Reason.NO_WORKERS})


class Lately(msgspec.Struct, frozen=True):
    """Ends of a show within the last hour, and how long ago the first of them was."""

    jobs: int = 0
    frames: int = 0
    span_s: float = 0.0


def estimate(
    job: Job, layer: Layer, told: LayerTold, of_job: Sequence[Cause], lately: Lately, now: datetime
) -> Estimate:
    causes = (*of_job, *told.reasons)
    times = [each.next_at for each in causes if each.next_at is not None]
    others = [each for each in causes if each.next_at is None]
    stuck = next((each for each in others if each.tier not in _PASSING or each.code in _UNKNOWABLE), None)
    if stuck is not None:
        return Estimate(None, f"nobody can tell how long {stuck.code} lasts")
    if times and told.deferred >= told.waiting:
        return Estimate(max(0.0, (min(times) - now).total_seconds()), "its time comes then")
    if told.starts and not others:
        return Estimate(0.0, "nothing holds it back")
    ahead = told.position.ahead or 0
    if any(each.code is Reason.TENANT_LIMIT for each in causes):
        return _by(1, lately.jobs, lately.span_s, f"{lately.jobs} jobs of the show ended")
    ended = sum(n for state, n in layer.counts.items() if state.terminal)
    begun = next((moment.at for moment in job.history if moment.state in _BEGUN), None)
    if ended >= ENDS_LEAST and begun is not None:
        return _by(ahead + 1, ended, (now - begun).total_seconds(), f"{ended} frames of it ended")
    return _by(ahead + 1, lately.frames, lately.span_s, f"{lately.frames} frames of the show ended")


def _by(needed: int, ended: int, span_s: float, what: str) -> Estimate:
    if ended < ENDS_LEAST or span_s <= 0:
        return Estimate(None, "too little of the show ended within the last hour")
    return _bounded(needed * span_s / ended, f"{what} within the last {span(span_s)}")


def _bounded(in_s: float, basis: str) -> Estimate:
    return Estimate(in_s, basis) if in_s <= FAR_S else Estimate(None, f"it is too far away: {basis}")
