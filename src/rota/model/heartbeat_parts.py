"""Heartbeats in parts: a worker that holds many scattered frames lists them in several messages. No I/O.

NATS refuses a message above its `max_payload`, 1 MB by default, which some 90,000 scattered frames exceed. Each part
is a `Heartbeat` with its share of the frames. A server applies a heartbeat when it has all parts: one with a part
missing counts as lost, like any lost message, and is superseded by the next.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from msgspec.structs import replace

from rota.model.errors import InvalidInput
from rota.model.protocol import Heartbeat, encode

RANGE_BYTES_MAX: Final = 19
"""Of one encoded range: an array of two 64-bit integers."""
PART_BYTES: Final = 64
"""Reserve for what a part has in addition: its number, and the length of the list."""
LISTED_RANGES_MAX: Final = 1_000_000
"""Of all parts together: more frames than a worker may list."""
INCOMPLETE_MAX: Final = 10_000
"""Workers of which parts are kept."""


def encode_heartbeat(beat: Heartbeat, bytes_max: int) -> list[bytes]:
    """The messages of a heartbeat, each of at most `bytes_max`; usually one."""
    data = encode(beat)
    if len(data) <= bytes_max or not beat.held:
        return [data]
    free = bytes_max - len(encode(replace(beat, held=[]))) - PART_BYTES
    size = max(1, free // RANGE_BYTES_MAX)
    shares = [beat.held[at : at + size] for at in range(0, len(beat.held), size)]
    return [encode(replace(beat, held=share, part=part, parts=len(shares))) for part, share in enumerate(shares)]


class HeartbeatAssembler:
    """Joins parts. Keeps those of the latest heartbeat of each worker."""

    def __init__(self) -> None:
        self._incomplete: dict[UUID, dict[int, Heartbeat]] = {}

    def add(self, beat: Heartbeat) -> Heartbeat | None:
        """The whole heartbeat if this is its last missing part. Raises InvalidInput for impossible parts."""
        if beat.parts == 1:
            self._incomplete.pop(beat.worker, None)
            return beat
        if not 0 <= beat.part < beat.parts <= LISTED_RANGES_MAX:
            raise InvalidInput(f"The heartbeat of worker {beat.name[:64]!r} has impossible parts: update the worker.")
        parts = self._parts_of(beat)
        parts[beat.part] = beat
        if len(parts) < beat.parts:
            return None
        del self._incomplete[beat.worker]
        held = [token_range for part in range(beat.parts) for token_range in parts[part].held]
        return replace(beat, held=held, part=0, parts=1)

    def _parts_of(self, beat: Heartbeat) -> dict[int, Heartbeat]:
        """The other parts of the same heartbeat; those of another one are dropped."""
        parts = self._incomplete.pop(beat.worker, {})
        other = next(iter(parts.values()), beat)
        listed = sum(len(part.held) for part in parts.values())
        if (other.number, other.parts) != (beat.number, beat.parts) or listed > LISTED_RANGES_MAX:
            parts = {}
        # At the end: the first is the one that has been incomplete for the longest time.
        self._incomplete[beat.worker] = parts
        if len(self._incomplete) > INCOMPLETE_MAX:
            del self._incomplete[next(iter(self._incomplete))]
        return parts
