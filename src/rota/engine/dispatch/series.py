"""Frames in series: which frames share a slot, and how many (ADR 23). No I/O.

With few slots the rate of short frames is one dispatch round trip per frame, unless each slot gets several of them. How
many is decided by how long frames of the same work have taken: a series is expected to end within `SERIES_S`. New work
is unknown, so its frames begin alone, and a series is never longer than the number of frames seen.

The durations come from the workers' reports and are kept in memory: they are advice. When they are wrong, frames wait
in a series until their worker hands them back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rota.model.ids import LayerId
from rota.queue.claims import ClaimedRange
from rota.queue.tokens import CLAIM_MAX

SERIES_S: Final = 0.1
"""Expected time from the first start to the last end in a series."""
SERIES_FRAMES_MAX: Final = 256
ROUND_FRAMES_MAX: Final = 1024
"""Frames in one round with series."""
SERIES_INPUT_BYTES_MAX: Final = 64 * 1024
"""Of the inputs of one series, which is sent in one message."""
WINDOW_FRAMES: Final = 64
"""Frames that the mean duration reaches back, if they are reported one by one."""
WORKS_MAX: Final = 10_000


class WorkDurations:
    """Mean duration of frames by timing key, and how many were seen."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}

    def record(self, timing_key: int, frames: int, total_s: float) -> None:
        seen, mean_s = self._known.pop(timing_key, (0, 0.0))
        weight = frames / (frames + min(seen, WINDOW_FRAMES))
        self._known[timing_key] = (seen + frames, mean_s + (total_s / frames - mean_s) * weight)
        if len(self._known) > WORKS_MAX:
            del self._known[next(iter(self._known))]

    def frames_max(self, timing_key: int) -> int:
        """Frames of this work in one series; 1: they run alone."""
        seen, mean_s = self._known.get(timing_key, (0, 0.0))
        expected = SERIES_S / mean_s if mean_s > 0 else math.inf
        return max(1, int(min(expected, seen, SERIES_FRAMES_MAX)))


def _is_next_claimed(before: range, token: int) -> bool:
    """Whether no token in between can belong to a claim of others: claims have ids of their own, used once."""
    claim, other = token // CLAIM_MAX, before[-1] // CLAIM_MAX
    return before[-1] < token and claim - other <= 1


def timing_key_of(work: bytes) -> int:
    """The same on all servers, so that any of them may get the report of a frame."""
    return int.from_bytes(hashlib.blake2b(work, digest_size=6).digest()) or 1


def frames_to_claim(slots: int, length: int, waiting: int | None) -> int:
    """How many frames to claim for so many slots; `waiting`: as far as they are counted.

    Towards the end of a queue series become shorter, so that all slots end at about the same time.
    """
    if length <= 1:
        return slots
    most = min(length, ROUND_FRAMES_MAX // slots)
    if waiting is not None:
        most = min(most, math.ceil(waiting / (2 * slots)))
    return slots * max(1, most)


class SeriesLimit(NamedTuple):
    """How frames of a claimed range may be in series."""

    frames_max: int
    """Frames of this kind in one series."""
    group: LayerId | None
    """None: with any others that have none. A layer with caps is charged for its own frames only."""
    input_bytes: int


class SeriesSegment(NamedTuple):
    """Consecutive frames of one claimed range."""

    claimed: ClaimedRange
    tokens: range


def split_into_series(
    claimed: Sequence[ClaimedRange], slots: int, limit_of: Callable[[ClaimedRange], SeriesLimit]
) -> Iterator[list[SeriesSegment]]:
    """Divide claimed frames, in order, between so many slots: a series each. No others' tokens are in between.

    More series than slots are yielded if frames are left over. Series are about equally long, as far as their limits
    allow.
    """
    remaining = sum(len(each.tokens) for each in claimed)
    series: list[SeriesSegment] = []
    group: LayerId | None = None
    used = frames = size = most = 0.0
    for each in claimed:
        limit = limit_of(each)
        first, end = each.tokens.start, each.tokens.stop
        while first < end:
            joins = bool(series) and group == limit.group and _is_next_claimed(series[-1].tokens, first)
            room = math.floor((1 - used) * limit.frames_max + 1e-9) if joins else 0
            room = min(room, int(most - frames))
            if size + limit.input_bytes > SERIES_INPUT_BYTES_MAX:
                room = 0
            if room < 1:
                if series:
                    yield series
                    slots -= 1
                series, group = [], limit.group
                used = frames = size = 0.0
                most = max(1, math.ceil(remaining / max(1, slots)))
                room = min(limit.frames_max, int(most))
            n = min(room, end - first)
            series.append(SeriesSegment(each, range(first, first + n)))
            used += n / limit.frames_max
            size += limit.input_bytes
            frames += n
            remaining -= n
            first += n
    if series:
        yield series
