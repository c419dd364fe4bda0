"""Frames in series: which frames share a slot, and how many (ADR 23). No I/O.

With few slots the rate of short frames is one dispatch round trip per frame, unless each slot gets several of them.
With many slots a booking per frame is what costs most. How many frames share a slot is decided by how long frames of
the same work have taken:

- a series is expected to end within `SERIES_S`, and frames that wait for a slot are divided so;
- frames that are expected to end within `PACKED_S` share a slot even while others are free: that is over before another
  slot could be booked.

New work is unknown, so its frames begin alone, and a series is never longer than the number of frames seen.

The durations come from the workers' reports and are kept in memory: they are advice. When they are wrong, frames wait
in a series until their worker hands them back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rota.model.ids import LayerId
from rota.queue.claims import ClaimedRange
from rota.queue.tokens import no_claim_between

SERIES_S: Final = 0.1
"""Expected time from the first start to the last end in a series."""
PACKED_S: Final = 0.002
SERIES_FRAMES_MAX: Final = 256
SERIES_FRAMES_MIN: Final = 4
"""If a round could not give so many frames to each slot, frames run alone, or packed: shorter series cost PostgreSQL
more than they save."""
ROUND_FRAMES_MAX: Final = 1024
"""Frames in one round with series."""
SERIES_BYTES_MAX: Final = 64 * 1024
"""Of the works and inputs of one series, which is sent in one message."""
WINDOW_FRAMES: Final = 64
"""Frames that the mean durations reach back, if they are reported one by one."""
WORKS_MAX: Final = 10_000


class SeriesLength(NamedTuple):
    """How many frames of a work share a slot."""

    frames_max: int = 1
    """1: they run alone."""
    packed: int = 1
    """While slots are free."""

    def shortest(self, other: SeriesLength) -> SeriesLength:
        return SeriesLength(min(self.frames_max, other.frames_max), min(self.packed, other.packed))

    def at_most(self, frames: int) -> SeriesLength:
        return self if frames >= self.frames_max else self.shortest(SeriesLength(max(1, frames), max(1, frames)))


ALONE: Final = SeriesLength()


class _MeanDurations(NamedTuple):
    seen: int = 0
    run_s: float = 0.0
    """From the start of a frame to its end."""
    slot_s: float = 0.0
    """How long it kept its slot: waiting for its turn on the worker counts."""


class WorkDurations:
    """Mean durations of frames by timing key."""

    def __init__(self) -> None:
        self._known: dict[int, _MeanDurations] = {}

    def record(self, timing_key: int, frames: int, run_s: float, slot_s: float) -> None:
        """So many frames took this long in total."""
        mean = self._known.pop(timing_key, _MeanDurations())
        weight = frames / (frames + min(mean.seen, WINDOW_FRAMES))
        self._known[timing_key] = _MeanDurations(
            mean.seen + frames,
            mean.run_s + (run_s / frames - mean.run_s) * weight,
            mean.slot_s + (slot_s / frames - mean.slot_s) * weight,
        )
        if len(self._known) > WORKS_MAX:
            del self._known[next(iter(self._known))]

    def series_length(self, timing_key: int) -> SeriesLength:
        """How many frames of this work share a slot."""
        mean = self._known.get(timing_key)
        if mean is None:
            return ALONE
        most = min(mean.seen, SERIES_FRAMES_MAX)
        frames_max = _quotient(SERIES_S, mean.slot_s, most)
        return SeriesLength(frames_max, _quotient(PACKED_S, mean.run_s, frames_max))


def _quotient(limit_s: float, mean_s: float, most: int) -> int:
    return max(1, int(min(limit_s / mean_s, most) if mean_s > 0 else most))


def timing_key_of(work: bytes) -> int:
    """The same on all servers, so that any of them may get the report of a frame."""
    return int.from_bytes(hashlib.blake2b(work, digest_size=6).digest()) or 1


def frames_to_claim(slots: int, length: SeriesLength, waiting: int | None, frames_max: int = ROUND_FRAMES_MAX) -> int:
    """How many frames to claim for so many slots, `frames_max` at most unless all run alone; `waiting`: as far as they
    are counted.

    Towards the end of a queue series become shorter, so that all slots end at about the same time.
    """
    each = min(length.frames_max, frames_max // slots)
    if frames_max // slots < SERIES_FRAMES_MIN:
        each = 1
    elif waiting is not None:
        each = min(each, math.ceil(waiting / (2 * slots)))
    packed = slots * length.packed if waiting is None else min(slots * length.packed, waiting)
    return max(slots, slots * each, min(packed, frames_max))


def slots_to_use(slots: int, frames: Iterable[tuple[int, SeriesLength]]) -> int:
    """How many of the slots claimed frames are divided between: so many frames of such a length, by work."""
    return max(1, min(slots, math.ceil(sum(n / length.packed for n, length in frames))))


class SeriesLimit(NamedTuple):
    """How frames of a claimed range may be in series."""

    frames_max: int
    """Frames of this kind in one series."""
    group: LayerId | None
    """None: with any others that have none."""
    work: bytes
    input_bytes: int


class SeriesSegment(NamedTuple):
    """Consecutive frames of one claimed range."""

    claimed: ClaimedRange
    tokens: range


def split_into_series(
    claimed: Sequence[ClaimedRange], slots: int, limits: Iterable[SeriesLimit]
) -> Iterator[list[SeriesSegment]]:
    """Divide claimed frames, in order, between so many slots: a series each. No others' tokens are in between.

    More series than slots are yielded if frames are left over. Series are about equally long, as far as their limits
    allow.
    """
    remaining = sum(len(each.tokens) for each in claimed)
    series: list[SeriesSegment] = []
    group: LayerId | None = None
    work = b""
    used = frames = size = most = 0.0
    for each, limit in zip(claimed, limits, strict=True):
        first, end = each.tokens.start, each.tokens.stop
        while first < end:
            joins = bool(series) and group == limit.group and no_claim_between(series[-1].tokens[-1], first)
            room = math.floor((1 - used) * limit.frames_max + 1e-9) if joins else 0
            room = min(room, int(most - frames))
            more = limit.input_bytes + (0 if limit.work == work else len(limit.work))
            if size + more > SERIES_BYTES_MAX:
                room = 0
            if room < 1:
                if series:
                    yield series
                    slots -= 1
                series, group = [], limit.group
                used = frames = size = 0.0
                more = limit.input_bytes + len(limit.work)
                most = max(1, math.ceil(remaining / max(1, slots)))
                room = min(limit.frames_max, int(most))
            n = min(room, end - first)
            series.append(SeriesSegment(each, range(first, first + n)))
            used += n / limit.frames_max
            size += more
            work = limit.work
            frames += n
            remaining -= n
            first += n
    if series:
        yield series
