"""Fair share and ageing: which pending queue is served first, and how many frames it may take in a round. Pure.

Order: the show furthest below its size, then priority with ageing, then age. While several shows wait, a round takes
a part of what is free, so that the order is evaluated again before one of them has everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rota.model.ids import PoolId, ShowId

AGEING_S: Final = 300.0
"""Waiting this long counts as one priority level."""
AGEING_LEVELS_MAX: Final = 2.0
"""More than this many levels are not gained: a long job of low priority stays behind urgent ones."""

Shares = Mapping[tuple[ShowId, PoolId], tuple[int, int]]
"""Size and use of each subscription, in centicores."""
ShareUsage = tuple[int, float]
"""0 if the show has a size, else 1; then the fraction of the size (or the amount) in use."""
NO_SHARE: Final[ShareUsage] = (1, 0.0)


def share_usage(shares: Shares) -> dict[ShowId, ShareUsage]:
    """Usage by show, over all its pools."""
    sums: dict[ShowId, tuple[int, int]] = {}
    for (show, _), (size, used) in shares.items():
        before = sums.get(show, (0, 0))
        sums[show] = (before[0] + size, before[1] + used)
    return {show: (0, used / size) if size else (1, float(used)) for show, (size, used) in sums.items()}


def scheduling_key(usage: ShareUsage, priority: int, age_s: float) -> tuple[int, float, float, float]:
    """Sort key of a queue whose first frame has waited for `age_s`: the smallest is served first."""
    return (*usage, -(priority + min(age_s / AGEING_S, AGEING_LEVELS_MAX)), -age_s)


def fair_frames_max(room: int, shows: int) -> int:
    """Frames for a round while so many shows wait and so many frames fit: what is free is not for the first one alone.

    The order is evaluated again after each round, so the show that is furthest below its size soon has its next turn.
    With room for all of them a round is as large as without competition.
    """
    return max(1, -(-room // max(1, shows)))
