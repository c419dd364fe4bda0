"""When the next frame starts, guessed from what ended lately and with its grounds, or that nobody knows. Pure.

How fast frames of the layer ended since its job began tells best; otherwise how fast frames, or jobs, of the show ended
within the last hour. That assumes that things go on as they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from rota.api.explanation import Cause, StartEstimate, WaitingLayerView
from rota.engine.queries.jobs import JobView, Layer
from rota.model.job_states import JobState
from rota.model.reasons import Reason, Tier
from rota.model.units import humanize_duration

ENDS_MIN: Final = 3
"""Ends that say nothing yet about a pace."""
ESTIMATE_MAX_S: Final = 30 * 86_400.0
_TRANSIENT_TIERS: Final = frozenset({Tier.QUOTA, Tier.CAPACITY, Tier.ORDER})
_STARTED_STATES: Final = (JobState.DISPATCHED, JobState.RUNNING)
_UNPREDICTABLE: Final = frozenset({Reason.NO_WORKERS})


class RecentThroughput(msgspec.Struct, frozen=True):
    """Ends of a show within the last hour, and how long ago the first of them was."""

    jobs: int = 0
    frames: int = 0
    span_s: float = 0.0


def estimate_start(
    job: JobView, layer: Layer, told: WaitingLayerView, of_job: Sequence[Cause], lately: RecentThroughput, now: datetime
) -> StartEstimate:
    causes = (*of_job, *told.reasons)
    times = [each.next_at for each in causes if each.next_at is not None]
    others = [each for each in causes if each.next_at is None]
    stuck = next((each for each in others if each.tier not in _TRANSIENT_TIERS or each.code in _UNPREDICTABLE), None)
    if stuck is not None:
        return StartEstimate(None, f"nobody can tell how long {stuck.code} lasts")
    if times and told.deferred >= told.waiting:
        return StartEstimate(max(0.0, (min(times) - now).total_seconds()), "its time comes then")
    if told.starts and not others:
        return StartEstimate(0.0, "nothing holds it back")
    ahead = told.position.ahead or 0
    if any(each.code is Reason.TENANT_LIMIT for each in causes):
        return _from_rate(1, lately.jobs, lately.span_s, f"{lately.jobs} jobs of the show ended")
    ended = sum(n for state, n in layer.counts.items() if state.terminal)
    begun = next((moment.at for moment in job.history if moment.state in _STARTED_STATES), None)
    if ended >= ENDS_MIN and begun is not None:
        return _from_rate(ahead + 1, ended, (now - begun).total_seconds(), f"{ended} frames of it ended")
    return _from_rate(ahead + 1, lately.frames, lately.span_s, f"{lately.frames} frames of the show ended")


def _from_rate(needed: int, ended: int, span_s: float, what: str) -> StartEstimate:
    if ended < ENDS_MIN or span_s <= 0:
        return StartEstimate(None, "too little of the show ended within the last hour")
    return _bounded(needed * span_s / ended, f"{what} within the last {humanize_duration(span_s)}")


def _bounded(in_s: float, basis: str) -> StartEstimate:
    return StartEstimate(in_s, basis) if in_s <= ESTIMATE_MAX_S else StartEstimate(None, f"it is too far away: {basis}")
