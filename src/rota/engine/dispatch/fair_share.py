"""Fair share and ageing: which pending queue is served first, and how many frames it may take in a round. Pure.

Order: the show furthest below its size in the pools that may run the frames, then priority with ageing, then age. While
several shows wait, a round takes a part of what is free, so that the order is evaluated again before one of them has
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

AGEING_S: Final = 300.0
"""Waiting this long counts as one priority level."""
AGEING_LEVELS_MAX: Final = 2.0
"""More than this many levels are not gained: a long job of low priority stays behind urgent ones."""

ShareUsage = tuple[int, float]
"""0 if the show has a size, else 1; then the fraction of the size (or the amount) in use."""


def share_usage(shares: Iterable[tuple[int, int]]) -> ShareUsage:
    """How much of these shares, each a size and its use, a show uses."""
    size = used = 0
    for each_size, each_used in shares:
        size += each_size
        used += each_used
    return (0, used / size) if size else (1, float(used))


def scheduling_key(usage: ShareUsage, priority: int, age_s: float) -> tuple[int, float, float, float]:
    """Sort key of a queue whose first frame has waited for `age_s`: the smallest is served first."""
    return (*usage, -(priority + min(age_s / AGEING_S, AGEING_LEVELS_MAX)), -age_s)


def fair_frames_max(room: int, shows: int) -> int:
    """Frames for a round while so many shows wait and so many frames fit: what is free is not for the first one alone.

    The order is evaluated again after each round, so the show that is furthest below its size soon has its next turn.
    With room for all of them a round is as large as without competition.
    """
    return max(1, -(-room // max(1, shows)))
