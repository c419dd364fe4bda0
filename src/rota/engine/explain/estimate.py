"""Estimated start of the next frame, with its basis, or the reason why there is no estimate. Pure.

The best basis is the rate at which frames of the layer ended since its job began; otherwise the rate at which frames,
or jobs, of the show ended within the last hour. The estimate assumes that the rate stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from rota.api.explanation import Cause, StartEstimate, WaitingLayerView
from rota.api.jobs import JobView, Layer
from rota.model.job_states import JobState
from rota.model.reasons import Reason, Tier
from rota.model.units import humanize_duration

ENDS_MIN: Final = 3
"""Fewer ends than this give no rate."""
ESTIMATE_MAX_S: Final = 30 * 86_400.0
_TRANSIENT_TIERS: Final = frozenset({Tier.QUOTA, Tier.CAPACITY, Tier.ORDER})
_STARTED_STATES: Final = (JobState.DISPATCHED, JobState.RUNNING)
_UNPREDICTABLE: Final = frozenset({Reason.NO_WORKERS})


class RecentThroughput(msgspec.Struct, frozen=True):
    """Jobs and frames of a show that ended within the last hour, and the age of the first of them."""

    jobs: int = 0
    frames: int = 0
    span_s: float = 0.0


def estimate_start(
    job: JobView,
    layer: Layer,
    view: WaitingLayerView,
    job_causes: Sequence[Cause],
    recent: RecentThroughput,
    now: datetime,
) -> StartEstimate:
    causes = (*job_causes, *view.reasons)
    times = [each.next_at for each in causes if each.next_at is not None]
    others = [each for each in causes if each.next_at is None]
    blocker = next((each for each in others if each.tier not in _TRANSIENT_TIERS or each.code in _UNPREDICTABLE), None)
    if blocker is not None:
        return StartEstimate(None, f"the duration of {blocker.code} is not known")
    if times and view.deferred >= view.waiting:
        return StartEstimate(max(0.0, (min(times) - now).total_seconds()), "its scheduled time")
    if view.starts and not others:
        return StartEstimate(0.0, "nothing blocks it")
    ahead = view.position.ahead or 0
    if any(each.code is Reason.TENANT_LIMIT for each in causes):
        return _from_rate(1, recent.jobs, recent.span_s, f"{recent.jobs} jobs of the show ended")
    ended = sum(n for state, n in layer.counts.items() if state.terminal)
    started_at = next((moment.at for moment in job.history if moment.state in _STARTED_STATES), None)
    if ended >= ENDS_MIN and started_at is not None:
        return _from_rate(ahead + 1, ended, (now - started_at).total_seconds(), f"{ended} frames of it ended")
    return _from_rate(ahead + 1, recent.frames, recent.span_s, f"{recent.frames} frames of the show ended")


def _from_rate(needed: int, ended: int, span_s: float, what: str) -> StartEstimate:
    if ended < ENDS_MIN or span_s <= 0:
        return StartEstimate(None, "too little work of the show ended within the last hour")
    return _bounded(needed * span_s / ended, f"{what} within the last {humanize_duration(span_s)}")


def _bounded(in_s: float, basis: str) -> StartEstimate:
    return StartEstimate(in_s, basis) if in_s <= ESTIMATE_MAX_S else StartEstimate(None, f"it is too far away: {basis}")
