"""What is left of shares that have refused a booking, so that rounds ask for no more than a share can give. No I/O.

A share is a show's subscription of one pool. Its room is unknown, and not limited here, until it refuses: a refusal
says how much is in use. From then on the room is kept: rounds reserve it in scheduling order, bookings take from it,
releases add to it. So what is released goes to the first queue that it suffices for, however many rounds run at once,
and a queue for which it does not suffice costs no claim.

Accounting alone decides. The room may be wrong:
- too large (another replica booked): the next refusal corrects it;
- too small (a release is not known here yet, or was missed): after `PROBE_INTERVAL_S` the round of the first queue asks
  for one frame more; each time that accounting grants it, the next round asks for twice as many at once, until the room
  is forgotten. All queues of the show are held until then, not each for its own time: accounting may grant the frame,
  so it must be that of the first queue in order.

For the same reason no queue probes beside a round that is not booked yet: if the first queue has no more frames than
the room, the next one waits for the end of its round. In a busy show some round has always reserved room, so a queue
that has waited for its probe for `PROBE_INTERVAL_S` keeps further rounds from beginning until those under way have
ended. If the first queue then takes the room again, or a round is stuck, the probe goes beside it after `PROBE_WAIT_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from rota.model.ids import PoolId, ShowId
from rota.model.quota import RESOURCES, Ask, Refusal, Resource, Usage

PROBE_INTERVAL_S: Final = 1.0
PROBE_WAIT_S: Final = 0.25
"""A round that takes longer is held up by something else, such as a lock in its folder."""
PROBE_LATEST_S: Final = PROBE_INTERVAL_S + PROBE_WAIT_S
PROBE_FRAMES_MAX: Final = 512
"""A share that grants so many frames above its room is not full at all."""
RESET_PROBE_FRAMES: Final = 64

Amounts = dict[Resource, int]


class ShareRoom(msgspec.Struct):
    free: Amounts
    """By resource that has refused; others are not limited here."""
    probe_at_s: float
    probe_frames: int
    since: int
    """Number of the refusal that it follows from."""
    reserved: Amounts = {}
    """By rounds under way."""
    short_since_s: float | None = None
    """Since when a queue has waited for a probe that is due."""

    def frames_fitting(self, ask: Ask) -> int | None:
        """How many more such frames fit; None: any number."""
        fits = [
            (free - self.reserved.get(resource, 0)) // ask.of(resource)
            for resource, free in self.free.items()
            if ask.of(resource)
        ]
        return max(0, min(fits)) if fits else None

    @property
    def is_reserved(self) -> bool:
        return any(self.reserved.get(resource) for resource in self.free)

    def short_s(self, now_s: float) -> float:
        """How long a queue has waited for its probe. One that did not come for it has no frames any more."""
        waited_s = 0.0 if self.short_since_s is None else now_s - self.short_since_s
        return waited_s if waited_s < PROBE_LATEST_S + PROBE_INTERVAL_S else 0.0

    def set_probe(self, at_s: float) -> None:
        self.probe_at_s = at_s
        self.short_since_s = None

    def reserve(self, ask: Ask, frames: int) -> None:
        for resource in RESOURCES:
            self.reserved[resource] = self.reserved.get(resource, 0) + frames * ask.of(resource)


class ShareReservation:
    """Room that a round has reserved, by pool in the order of its plan, until `ShareRooms.shrink` to 0."""

    __slots__ = ("ask", "parts")

    def __init__(self, ask: Ask, parts: list[tuple[PoolId, ShareRoom | None, int]]) -> None:
        self.ask = ask
        self.parts = parts


class ShareMoment(NamedTuple):
    """What had been refused and released in a show when a booking was asked for."""

    refusals: int
    resets: int
    released: Mapping[PoolId, Usage]


class ShareRooms:
    def __init__(self) -> None:
        self._rooms: dict[ShowId, dict[PoolId, ShareRoom]] = {}
        self._released: dict[ShowId, dict[PoolId, Usage]] = {}
        """In total, so that a refusal can tell what was released after its booking was asked for."""
        self._refusals = 0
        self._resets = 0

    def frames_max(self, show: ShowId, ask: Ask, now_s: float) -> dict[PoolId, int]:
        """How many such frames each pool may be asked for; pools that are missing are not limited."""
        most: dict[PoolId, int] = {}
        for pool, room in self._rooms.get(show, {}).items():
            fitting = room.frames_fitting(ask)
            if fitting is not None:
                most[pool] = _with_probe(room, fitting, now_s)
        return most

    def hold_until_s(self, show: ShowId, ask: Ask, now_s: float) -> float | None:
        """Until when to hold a queue whose frames do not fit a share, unless a round ends before; None: all fit."""
        until: list[float] = []
        for room in self._rooms.get(show, {}).values():
            if room.frames_fitting(ask) == 0:
                until.append(room.probe_at_s)
                if now_s >= room.probe_at_s:
                    room.short_since_s = now_s - room.short_s(now_s)
                    until[-1] = room.short_since_s + PROBE_LATEST_S
        return min(until, default=None)

    def reserve(self, show: ShowId, ask: Ask, frames: Iterable[tuple[PoolId, int]], now_s: float) -> ShareReservation:
        """Reserve room for so many frames in each pool, in the order of a plan."""
        rooms = self._rooms.get(show, {})
        parts: list[tuple[PoolId, ShareRoom | None, int]] = []
        for pool, n in frames:
            room = rooms.get(pool)
            if room is not None:
                fitting = room.frames_fitting(ask)
                if fitting is not None and n > fitting:
                    room.set_probe(now_s + PROBE_INTERVAL_S)
                room.reserve(ask, n)
            parts.append((pool, room, n))
        return ShareReservation(ask, parts)

    def shrink(self, reservation: ShareReservation, frames: int) -> bool:
        """Keep the reservation for the first `frames` of the plan; returns whether room of a share became free."""
        kept: list[tuple[PoolId, ShareRoom | None, int]] = []
        freed = False
        for pool, room, n in reservation.parts:
            keep = min(n, frames)
            frames -= keep
            if room is not None and keep < n:
                room.reserve(reservation.ask, keep - n)
                freed = True
            if keep:
                kept.append((pool, room, keep))
        reservation.parts = kept
        return freed

    def attach(self, show: ShowId, reservation: ShareReservation) -> None:
        """Count a reservation in rooms that became known since it was made: what is released before its frames are back
        in their queue must not seem to be free for others."""
        rooms = self._rooms.get(show, {})
        attached: list[tuple[PoolId, ShareRoom | None, int]] = []
        for pool, before, n in reservation.parts:
            room = rooms.get(pool, before)
            if room is not None and room is not before:
                room.reserve(reservation.ask, n)
            attached.append((pool, room, n))
        reservation.parts = attached

    def moment(self, show: ShowId) -> ShareMoment:
        return ShareMoment(self._refusals, self._resets, dict(self._released.get(show, {})))

    def booked(self, show: ShowId, pool: PoolId, ask: Ask, frames: int, asked: ShareMoment) -> bool:
        """Accounting booked these frames, which had been asked for at that moment. Returns whether that was more than
        the room, so that there may be more."""
        room = self._rooms.get(show, {}).get(pool)
        if room is None or room.since > asked.refusals:
            return False  # a later refusal has counted them
        exceeded = False
        for resource, free in room.free.items():
            left = free - frames * ask.of(resource)
            room.free[resource] = max(0, left)
            exceeded |= left < 0
        if exceeded:
            room.probe_frames *= 2
            room.set_probe(0.0)
            if room.probe_frames > PROBE_FRAMES_MAX:
                del self._rooms[show][pool]
        return exceeded

    def refused(self, show: ShowId, pool: PoolId, refusal: Refusal, asked: ShareMoment, now_s: float) -> None:
        """The share refused a frame, after what this booking was granted. `limit` 0: there is no share."""
        if asked.resets != self._resets:
            return
        self._refusals += 1
        before, released = asked.released.get(pool, Usage()), self._released.get(show, {}).get(pool, Usage())
        rooms = self._rooms.setdefault(show, {})
        room = rooms.get(pool)
        if room is None:
            room = rooms[pool] = ShareRoom({}, now_s, 1, 0, {})
        resource = refusal.resource
        since = released.of(resource) - before.of(resource)
        room.free[resource] = max(0, refusal.limit - refusal.current) + since
        room.set_probe(now_s + PROBE_INTERVAL_S)
        room.probe_frames = 1
        room.since = self._refusals

    def released(self, show: ShowId, by_pool: Mapping[PoolId, Usage]) -> None:
        """Frames of the show have ended and released this."""
        totals = self._released.setdefault(show, {})
        rooms = self._rooms.get(show, {})
        for pool, usage in by_pool.items():
            before = totals.get(pool, Usage())
            totals[pool] = Usage(before.cores + usage.cores, before.gpus + usage.gpus)
            if pool in rooms:
                free = rooms[pool].free
                for resource in free:
                    free[resource] += usage.of(resource)

    def reset(self) -> None:
        """Limits have changed: ask every share at once for more than its room, and ignore refusals of bookings that are
        under way. The rooms are kept, or queues would ask at the same time and the last in order might be the first."""
        self._resets += 1
        for rooms in self._rooms.values():
            for room in rooms.values():
                room.set_probe(0.0)
                room.probe_frames = max(room.probe_frames, RESET_PROBE_FRAMES)


def _with_probe(room: ShareRoom, fitting: int, now_s: float) -> int:
    """How many frames to ask for, if this many fit the room: more when a probe is due, none while it waits for rounds
    under way."""
    if now_s < room.probe_at_s:
        return fitting
    short_s = room.short_s(now_s)
    if not room.is_reserved or (fitting == 0 and short_s >= PROBE_LATEST_S):
        return fitting + room.probe_frames
    return 0 if PROBE_INTERVAL_S <= short_s < PROBE_LATEST_S else fitting
