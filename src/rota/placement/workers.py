"""One worker as this replica knows it: its heartbeat, its bookings and reservations, its free capacity. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from rota.model.errors import InvalidInput
from rota.model.heartbeats import HEARTBEAT_INTERVAL_S, silent_after_s
from rota.model.jobs.work import TASK_CAPABILITY_PREFIX
from rota.model.protocol import Heartbeat
from rota.model.settings.lifecycle import RoutingSettings
from rota.model.token_ranges import TokenRange, count_tokens, intersect_ranges, merge_ranges, subtract_ranges
from rota.placement.requirements import CONSTRAINT_PREFIX, PlacementRequirements, Resources, normalize_capabilities
from rota.placement.scoring import WorkerLoad, overload_reason
from rota.placement.worker_allocations import WorkerAllocations

UNLIMITED_FRAMES: Final = 1_000_000
"""The capacity of a worker without a slot limit, for frames that need no resources."""
TOKEN_END: Final = 2**53
LISTED_FRAMES_MAX: Final = 1_000_000
"""Maximum number of frames in one heartbeat."""


class BookedRange(NamedTuple):
    """Tokens that PostgreSQL has a booking for: with the need each, or in series."""

    tokens: TokenRange
    need: Resources
    series: bool = False


class WorkerInfo:
    """`shape` changes with every property that decides whether requirements match at all."""

    __slots__ = (
        "booked",
        "capabilities",
        "confirmed",
        "cores",
        "draining",
        "gpus",
        "heartbeat_s",
        "held",
        "id",
        "labels",
        "last_heartbeat_at",
        "load",
        "memory_load",
        "memory_mb",
        "name",
        "number",
        "overloaded",
        "owned",
        "peak_cores",
        "peak_gpus",
        "pool",
        "reported",
        "reserved_cores",
        "reserved_frames",
        "reserved_gpus",
        "reserved_memory_mb",
        "runs_series",
        "shape",
        "slots",
        "tie",
        "ttl_s",
        "unbooked",
        "unknown",
        "unsettled",
        "used",
    )

    def __init__(self, worker: UUID, name: str, pool: str, tie: float) -> None:
        self.id = worker
        self.name = name
        self.pool = pool
        self.tie = tie
        self.number = -1
        self.last_heartbeat_at = 0.0
        self.heartbeat_s = HEARTBEAT_INTERVAL_S
        self.ttl_s = 0.0
        """How long it is planned for and kept without a heartbeat."""
        self.confirmed = False
        self.runs_series = False
        self.owned = True
        self.draining = False
        self.slots = self.cores = self.gpus = self.memory_mb = 0
        self.labels: dict[str, str] = {}
        self.capabilities: frozenset[str] = frozenset()
        self.shape = 0
        self.used = 0
        self.load = WorkerLoad()
        self.memory_load = 0.0
        self.overloaded: str | None = None
        self.booked = WorkerAllocations()
        self.reserved_frames = self.reserved_cores = self.reserved_gpus = self.reserved_memory_mb = 0
        self.peak_cores = self.peak_gpus = 0
        self.held: list[TokenRange] = []
        """Token ranges of its last heartbeat, in order."""
        self.reported = 0
        """Position in its report stream of the last report before that heartbeat."""
        self.unknown: list[TokenRange] = []
        """Listed by the last heartbeat, and neither booked here nor known to be unbooked."""
        self.unbooked: list[TokenRange] = []
        """Listed, but PostgreSQL has no booking for them: they occupy a slot each."""
        self.unsettled = False
        """Whether its frames are so unclear that it gets no more until PostgreSQL was asked."""

    @property
    def silent_after_s(self) -> float:
        return silent_after_s(self.heartbeat_s)

    def is_expired(self, now: float) -> bool:
        return self.last_heartbeat_at < now - self.ttl_s

    @property
    def frames(self) -> int:
        """Slots that it uses or is about to."""
        return self.booked.slots + self.reserved_frames + count_tokens(self.unknown) + count_tokens(self.unbooked)

    @property
    def blocked(self) -> bool:
        """Whether it gets no frames, whatever is free."""
        return self.unsettled or self.overloaded is not None

    @property
    def score(self) -> float:
        return self.frames + self.load.score

    @property
    def part_in_use(self) -> float:
        """The part of its scarcest resource that is in use or reserved."""
        booked = self.booked
        return max(
            self.frames / self.slots if self.slots > 0 else self.frames / UNLIMITED_FRAMES,
            (booked.cores + self.reserved_cores) / self.cores if self.cores else 0.0,
            (booked.gpus + self.reserved_gpus) / self.gpus if self.gpus else 0.0,
            (booked.memory_mb + self.reserved_memory_mb) / self.memory_mb if self.memory_mb else 0.0,
        )

    def part_of_frame(self, need: Resources) -> float:
        """The part of its scarcest resource that one such frame takes."""
        return max(
            1 / self.slots if self.slots > 0 else 1 / UNLIMITED_FRAMES,
            need.cores / self.cores if self.cores else 0.0,
            need.gpus / self.gpus if self.gpus else 0.0,
            need.memory_mb / self.memory_mb if self.memory_mb else 0.0,
        )

    @property
    def ranked_by(self) -> tuple[object, ...]:
        """Everything that rankings depend on, besides its shape; load in steps of 5 %, because it fluctuates."""
        booked = self.booked
        return (
            self.confirmed,
            self.blocked,
            self.frames,
            round(self.load.score * 20),
            booked.cores + self.reserved_cores,
            booked.gpus + self.reserved_gpus,
            booked.memory_mb + self.reserved_memory_mb,
        )

    def fitting_frames(self, need: Resources) -> int:
        """How many more such frames fit, by its offer and its bookings."""
        booked = self.booked
        free = self.slots - self.frames if self.slots > 0 else UNLIMITED_FRAMES
        if need.cores:
            free = min(free, (self.cores - booked.cores - self.reserved_cores) // need.cores)
        if need.gpus:
            free = min(free, (self.gpus - booked.gpus - self.reserved_gpus) // need.gpus)
        if need.memory_mb:
            free = min(free, (self.memory_mb - booked.memory_mb - self.reserved_memory_mb) // need.memory_mb)
        return max(0, free)

    def free_resources(self) -> Resources:
        """Resources that are not booked; unknown frames are assumed to use their share of slots."""
        idle = max(0.0, 1 - self.frames / self.slots) if self.unknown and self.slots > 0 else 1.0
        return Resources(
            int(idle * max(0, self.cores - self.booked.cores)),
            int(idle * max(0, self.gpus - self.booked.gpus)),
            int(idle * max(0, self.memory_mb - self.booked.memory_mb)),
        )

    def capacity(self, need: Resources) -> int:
        """How many such frames it could have if it were empty."""
        free = self.slots if self.slots > 0 else UNLIMITED_FRAMES
        for needed, offered in (
            (need.cores, self.cores),
            (need.gpus, self.gpus),
            (need.memory_mb, self.memory_mb),
        ):
            free = min(free, offered // needed) if needed else free
        return max(0, free)

    def mismatch_reason(self, requirements: PlacementRequirements) -> str | None:
        """Why it can never run such frames in its current shape, as a sentence; None when it can."""
        if self.draining:
            return "it is draining and accepts no new frames"
        for key, value in requirements.labels:
            if self.labels.get(key) != value and not self._meets_constraint(key, value):
                if key.startswith(f"{CONSTRAINT_PREFIX}{TASK_CAPABILITY_PREFIX}"):
                    return f"it does not know the task {key.removeprefix(CONSTRAINT_PREFIX + TASK_CAPABILITY_PREFIX)}"
                actual = f"it is {self.labels[key]}" if key in self.labels else "it is not set"
                return f"its label {key} must be {value}, but {actual}"
        if not self.capacity(requirements.need):
            return "a frame needs more than its total capacity"
        return None

    def _meets_constraint(self, key: str, value: str) -> bool:
        name = key.removeprefix(CONSTRAINT_PREFIX)
        return name != key and value.lower() in ("true", "") and name.lower() in self.capabilities

    def reserve(self, need: Resources, n: int) -> None:
        self.reserved_frames += n
        self.reserved_cores += n * need.cores
        self.reserved_gpus += n * need.gpus
        self.reserved_memory_mb += n * need.memory_mb

    def add(self, ranges: Iterable[TokenRange], need: Resources, *, series: bool = False) -> None:
        """`series`: these frames run one after the other."""
        added = list(ranges)
        if series:
            self.booked.add_series(added, need, self.number)
        else:
            for first, n in added:
                self.booked.add(first, n, need, self.number)
        if self.unknown:
            self.unknown = subtract_ranges(self.unknown, merge_ranges(added))
        self.peak_cores = max(self.peak_cores, self.booked.cores)
        self.peak_gpus = max(self.peak_gpus, self.booked.gpus)

    def remove(self, ranges: Iterable[TokenRange]) -> int:
        ended = list(ranges)
        removed = sum(self.booked.remove(first, n) for first, n in ended)
        if self.unknown or self.unbooked:
            ended = merge_ranges(ended)
            self.unknown = subtract_ranges(self.unknown, ended)
            self.unbooked = subtract_ranges(self.unbooked, ended)
        return removed

    def apply_heartbeat(self, beat: Heartbeat, limits: RoutingSettings) -> bool:
        """Apply a heartbeat; returns whether the shape changed."""
        changed = self._update_description(beat)
        first = not self.confirmed
        self.confirmed = True
        self.heartbeat_s = beat.interval_s
        self.runs_series = beat.series
        self.held = merge_ranges(beat.held)
        self.reported = beat.reported
        self._reconcile_frames(self.held, beat.number, first=first)
        self.number = beat.number
        self._update_load(beat)
        self.overloaded = overload_reason(self.load, limits, accounted=self.cores > 0)
        return changed or first

    def resolve_unknown_frames(self, asked: Sequence[TokenRange], booked: Iterable[BookedRange]) -> None:
        """Apply a lookup of `asked`: tokens without a booking are unbooked. Frames that ended since stay ended."""
        for each in booked:
            self.add(intersect_ranges([each.tokens], self.unknown), each.need, series=each.series)
        self.unbooked = merge_ranges([*self.unbooked, *intersect_ranges(asked, self.unknown)])
        self.unknown = subtract_ranges(self.unknown, asked)
        self.unsettled = False
        # Measured while Rota's share of the load was unknown; the next heartbeat decides.
        self.overloaded = None

    def _update_description(self, beat: Heartbeat) -> bool:
        capabilities = frozenset(normalize_capabilities(beat.capabilities)) if beat.capabilities else frozenset()
        before = (self.pool, self.draining, self.slots, self.cores, self.gpus, self.memory_mb, self.capabilities)
        after = (beat.pool, beat.draining, beat.slots, beat.cores, beat.gpus, beat.memory_mb, capabilities)
        if before == after and self.labels == beat.labels:
            return False
        self.pool, self.draining, self.slots, self.cores, self.gpus, self.memory_mb, self.capabilities = after
        self.name = beat.name
        self.labels = beat.labels
        return True

    def _reconcile_frames(self, held: list[TokenRange], number: int, *, first: bool) -> None:
        """Compare with the listed frames. A frame freed just now may still be listed, so it takes two to be
        unsettled."""
        unknown = self.booked.reconcile(held, number)
        self.unbooked = intersect_ranges(self.unbooked, held) if self.unbooked and not first else []
        unknown = subtract_ranges(unknown, self.unbooked)
        self.unsettled = bool(unknown) and (first or bool(intersect_ranges(unknown, self.unknown)))
        self.unknown = unknown

    def _update_load(self, beat: Heartbeat) -> None:
        unclear = bool(self.unknown)
        self.load = WorkerLoad(
            cpu=clamp_percent(beat.cpu_load),
            gpu=clamp_percent(beat.gpu_utilization),
            booked_cpu=100.0 if unclear else _percent_of(self.peak_cores, self.cores),
            booked_gpu=100.0 if unclear else _percent_of(self.peak_gpus, self.gpus),
            strange_places=count_tokens(self.unbooked) / self.slots if self.slots > 0 else 0.0,
        )
        self.memory_load = clamp_percent(beat.memory_load)
        self.peak_cores = self.booked.cores
        self.peak_gpus = self.booked.gpus


def clamp_percent(value: float) -> float:
    return min(100.0, max(0.0, value)) if math.isfinite(value) else 0.0


def validate_heartbeat(beat: Heartbeat) -> Heartbeat:
    """Reject impossible values: everything else here trusts these numbers."""
    if min(beat.number, beat.slots, beat.cores, beat.gpus, beat.memory_mb) < 0:
        raise InvalidInput(f"The heartbeat of worker {beat.name[:64]!r} holds a negative number: update the worker.")
    if not 0 < beat.interval_s < math.inf:
        raise InvalidInput(f"The heartbeat of worker {beat.name[:64]!r} has no valid interval: update the worker.")
    invalid = any(n < 1 or not 0 <= first <= TOKEN_END - n for first, n in beat.held)
    if invalid or count_tokens(beat.held) > LISTED_FRAMES_MAX:
        raise InvalidInput(f"The heartbeat of worker {beat.name[:64]!r} lists impossible tokens: update the worker.")
    return beat


def _percent_of(booked: int, offered: int) -> float:
    return min(100.0, 100.0 * booked / offered) if offered > 0 else 0.0
