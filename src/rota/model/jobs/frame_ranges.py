"""Frame specs: "1-100", "1-100x2", "1,5,9-20". No I/O.

A spec names a set of frame numbers; they run in ascending order, whatever the order and however often it names one.

The queue knows ranges of consecutive frames only, and a range costs the same whatever its length. So a layer numbers
its frames for the queue one by one: with `step` the largest number that divides every difference between its frames,
frame number f is `first + (f - first) / step` in the queue. What is evenly spaced is one range, whatever its step; with
step 1 the queue's numbers are the frames' own. Both ways are exact, and `Frames` is the only place that knows them.
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
    """The frames of a layer. `ranges` are first and count in the queue's numbers, ascending and apart."""

    first: int
    count: int
    step: int = 1
    ranges: tuple[tuple[int, int], ...] = ()
    """Empty when there is one: `count` frames from `first` on."""

    def queue_ranges(self) -> tuple[tuple[int, int], ...]:
        return self.ranges or ((self.first, self.count),)

    def queue_numbers(self) -> Iterator[int]:
        """Every frame as the queue numbers it, ascending."""
        for first, count in self.queue_ranges():
            yield from range(first, first + count)

    def numbers(self) -> Iterator[int]:
        """Every frame number, ascending."""
        for place in self.queue_numbers():
            yield self.number(place)

    def number(self, place: int) -> int:
        """The number of the frame that the queue calls `place`."""
        return self.first + (place - self.first) * self.step

    def index(self, place: int) -> int:
        """How many frames of the layer come before the one that the queue calls `place`."""
        return sum(min(max(place - first, 0), count) for first, count in self.queue_ranges())

    def queue_number(self, number: int) -> int | None:
        """What the queue calls frame `number`, or None when the layer has no such frame."""
        steps, rest = divmod(number - self.first, self.step)
        place = self.first + steps
        known = not rest and any(first <= place < first + count for first, count in self.queue_ranges())
        return place if known else None


def frames_from_count(count: int) -> FrameSet:
    """Frames 0 to count - 1."""
    if not 1 <= count <= FRAMES_MAX:
        raise InvalidInput(f"{count} is no number of frames: give 1 to {FRAMES_MAX}.")
    return FrameSet(0, count)


def parse_frames(spec: str) -> FrameSet:
    """The frames that a spec names, or a sentence that says what one looks like."""
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
    """The shortest spec of ours that names the same frames."""
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
            f"{_quote(spec)} is no frame spec: write numbers and ranges such as 7, 1-100, 1-100x2 or 1,5,9-20."
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
            f"The frame spec {_quote(spec)} falls into {len(ranges)} ranges, at most {RANGES_MAX} are allowed: submit"
            " it in parts, or as items of a map."
        )
    count = sum(length for _, length in ranges)
    return FrameSet(first, count, step, ranges if len(ranges) > 1 else ())


def _without_covered(parts: list[range]) -> list[range]:
    """Without those that lie in another one, as in 1-100x10,1-100; not looked for in long lists."""
    if len(parts) > 100:
        return parts
    distinct = sorted(set(parts), key=lambda part: (-len(part), part.start))
    return [part for at, part in enumerate(distinct) if not any(_covers(other, part) for other in distinct[:at])]


def _covers(other: range, part: range) -> bool:
    return part.start in other and part[-1] in other and (len(part) == 1 or part.step % other.step == 0)


def _single_numbers(parts: list[range], spec: str) -> list[range]:
    """Steps that differ: only the numbers themselves tell what is there."""
    if sum(map(len, parts)) > MIXED_STEP_FRAMES_MAX:
        raise InvalidInput(
            f"The frame spec {_quote(spec)} mixes steps over more than {MIXED_STEP_FRAMES_MAX} frames: use a layer for each step."
        )
    return [range(number, number + 1) for number in sorted({number for part in parts for number in part})]


def _common_step(parts: list[range]) -> int:
    """The largest step that leads from the first number to every other one; 1 when there is one number."""
    first = parts[0].start
    steps = [part.step for part in parts if len(part) > 1]
    return gcd(*steps, *(part.start - first for part in parts)) or 1


def _merged(parts: list[range], step: int) -> list[range] | None:
    """The parts as ranges of that step, ascending and apart; None if some part leaves out what `step` would name."""
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
