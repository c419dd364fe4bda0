"""Frame specs: "1-100", "1-100x2", "1,5,9-20". No I/O.

A spec denotes a set of frame numbers; they run in ascending order, regardless of order and repetition in the spec.

The queue stores only ranges of consecutive numbers, at a cost independent of their length. So a layer renumbers its
frames: with `step` as the greatest common divisor of all differences between its frames, frame number f has the queue
number `first + (f - first) / step`. Evenly spaced frames are one range, whatever their step; with step 1 queue numbers
equal frame numbers. The mapping is exact in both directions and is implemented by `FrameSet` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd
from typing import Final

import msgspec

from rota.model.errors import InvalidInput

FRAMES_MAX: Final = 10_000_000
RANGES_MAX: Final = 1_000
FRAME_NUMBER_MAX: Final = 2**31 - 2
SPEC_CHARS_MAX: Final = 10_000
MIXED_STEP_FRAMES_MAX: Final = 100_000
_RANGE: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10})(?:x(\d{1,10}))?)?", re.ASCII)


class FrameSet(msgspec.Struct, frozen=True):
    """The frames of a layer. `ranges` are (first, count) in queue numbers, ascending and disjoint."""

    first: int
    count: int
    step: int = 1
    ranges: tuple[tuple[int, int], ...] = ()
    """Empty if there is a single range: `count` frames from `first` on."""

    def queue_ranges(self) -> tuple[tuple[int, int], ...]:
        return self.ranges or ((self.first, self.count),)

    def queue_numbers(self) -> Iterator[int]:
        """Every queue number, ascending."""
        for first, count in self.queue_ranges():
            yield from range(first, first + count)

    def numbers(self) -> Iterator[int]:
        """Every frame number, ascending."""
        for place in self.queue_numbers():
            yield self.number(place)

    def number(self, place: int) -> int:
        """The frame number of queue number `place`."""
        return self.first + (place - self.first) * self.step

    def index(self, place: int) -> int:
        """How many frames of the layer precede queue number `place`."""
        return sum(min(max(place - first, 0), count) for first, count in self.queue_ranges())

    def queue_number(self, number: int) -> int | None:
        """The queue number of frame `number`, or None if the layer has no such frame."""
        steps, rest = divmod(number - self.first, self.step)
        place = self.first + steps
        known = not rest and any(first <= place < first + count for first, count in self.queue_ranges())
        return place if known else None


def frames_from_count(count: int) -> FrameSet:
    """Frames 0 to count - 1."""
    if not 1 <= count <= FRAMES_MAX:
        raise InvalidInput(f"{count} is not a valid number of frames: use 1 to {FRAMES_MAX}.")
    return FrameSet(0, count)


def parse_frames(spec: str) -> FrameSet:
    """Parse a frame spec; raises InvalidInput."""
    if len(spec) > SPEC_CHARS_MAX:
        raise InvalidInput(f"A frame spec of {len(spec)} characters is too long: use at most {SPEC_CHARS_MAX}.")
    parts = [_parse_range(text.strip(), spec) for text in spec.split(",")]
    if sum(map(len, parts)) > FRAMES_MAX:
        raise InvalidInput(f"The frame spec {_quote(spec)} names more than {FRAMES_MAX} frames: submit several jobs.")
    if len(parts) == 1:
        [only] = parts
        return FrameSet(only.start, len(only), only.step if len(only) > 1 else 1)
    return _union(parts, spec)


def format_frames(frames: FrameSet) -> str:
    """The shortest spec that denotes the same frames."""
    return ",".join(_format(frames.number(first), count, frames.step) for first, count in frames.queue_ranges())


def _format(first: int, count: int, step: int) -> str:
    last = first + (count - 1) * step
    if count == 1:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last}x{step}"


def _parse_range(text: str, spec: str) -> range:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"{_quote(spec)} is not a valid frame spec: use numbers and ranges such as 7, 1-100, 1-100x2 or 1,5,9-20."
        )
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if last < first:
        raise InvalidInput(f"The frame range {text} of {_quote(spec)} runs backwards: write {last}-{first}.")
    if last > FRAME_NUMBER_MAX:
        raise InvalidInput(
            f"Frame {last} of {_quote(spec)} is too high: frames are numbered from 0 to {FRAME_NUMBER_MAX}."
        )
    if step == 0:
        raise InvalidInput(f"The frame range {text} of {_quote(spec)} has a step of 0: use 1 or more.")
    return range(first, last + 1, step)


def _union(parts: list[range], spec: str) -> FrameSet:
    parts = _without_covered(parts)
    step = _common_step(parts)
    spans = _merged(parts, step)
    if spans is None:
        parts = _single_numbers(parts, spec)
        step = _common_step(parts)
        spans = _merged(parts, step) or []
    first = spans[0].start
    ranges = tuple((first + (span.start - first) // step, len(span)) for span in spans)
    if len(ranges) > RANGES_MAX:
        raise InvalidInput(
            f"The frame spec {_quote(spec)} has {len(ranges)} ranges, at most {RANGES_MAX} are allowed: submit it in"
            " parts, or as items of a map."
        )
    count = sum(length for _, length in ranges)
    return FrameSet(first, count, step, ranges if len(ranges) > 1 else ())


def _without_covered(parts: list[range]) -> list[range]:
    """Without ranges that another range covers, as in 1-100x10,1-100; skipped for long lists."""
    if len(parts) > 100:
        return parts
    distinct = sorted(set(parts), key=lambda part: (-len(part), part.start))
    return [part for at, part in enumerate(distinct) if not any(_covers(other, part) for other in distinct[:at])]


def _covers(other: range, part: range) -> bool:
    return part.start in other and part[-1] in other and (len(part) == 1 or part.step % other.step == 0)


def _single_numbers(parts: list[range], spec: str) -> list[range]:
    """Ranges with different steps as single numbers, which can then be merged."""
    if sum(map(len, parts)) > MIXED_STEP_FRAMES_MAX:
        raise InvalidInput(
            f"The frame spec {_quote(spec)} mixes steps over more than {MIXED_STEP_FRAMES_MAX} frames: use a layer for"
            " each step."
        )
    return [range(number, number + 1) for number in sorted({number for part in parts for number in part})]


def _common_step(parts: list[range]) -> int:
    """The largest step that leads from the first number to every other; 1 for a single number."""
    first = parts[0].start
    steps = [part.step for part in parts if len(part) > 1]
    return gcd(*steps, *(part.start - first for part in parts)) or 1


def _merged(parts: list[range], step: int) -> list[range] | None:
    """The parts as ascending, disjoint ranges of `step`; None if a part omits numbers that `step` would include."""
    if any(len(part) > 1 and part.step != step for part in parts):
        return None
    spans: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        last = part[-1]
        if spans and part.start <= spans[-1][-1] + step:
            spans[-1] = range(spans[-1].start, max(spans[-1][-1], last) + 1, step)
        else:
            spans.append(range(part.start, last + 1, step))
    return spans


def _quote(spec: str) -> str:
    return repr(spec if len(spec) <= 40 else f"{spec[:37]}...")
