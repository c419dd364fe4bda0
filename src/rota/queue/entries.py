"""Queue entries: one frame of a layer, or a range of them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.ids import JobId, LayerId

BATCH, INTERACTIVE, CRITICAL = 1, 5, 9
"""The three named priorities; a larger number is claimed first."""
ENTRIES_MAX: Final = 10_000
FRAMES_MAX: Final = 10_000_000
PAYLOAD_BYTES_MAX: Final = 65_536
"""Store larger payloads elsewhere and queue a pointer: every claim reads the payload."""
QUEUE_CHARS_MAX: Final = 200
_FRAME_END: Final = 2**31 - 1
_ATTEMPT_END: Final = 2**15


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`frames` frames of one layer, numbered from `frame` on; each waits, is counted and may be claimed separately.

    `key`: entries of a queue with the same key are claimed in order, with any number of shards; not if that number
    changes meanwhile, nor after a delay or a retry. Jobs of such a queue do not take turns.
    `run_at`: the earliest time, by the clock of PostgreSQL.
    """

    queue: str
    job: JobId
    layer: LayerId
    frame: int = 0
    frames: int = 1
    priority: int = INTERACTIVE
    attempt: int = 1
    payload: bytes | None = None
    key: str | None = None
    run_at: datetime | None = None


class LanePosition(msgspec.Struct, frozen=True):
    """Where the entries of one queue, priority and key begin; they follow each other in the given order."""

    queue: str
    priority: int
    key: str | None
    lane: int
    first_seq: int


EntryColumns = tuple[list[UUID], list[UUID], list[int], list[int], list[int], list[bytes | None]]


class LaneBatches(msgspec.Struct, frozen=True):
    """Entries by lane, as columns."""

    keys: list[tuple[str, int, str | None]]
    sizes: list[int]
    entries: list[QueueEntry]

    @classmethod
    def of(cls, entries: Iterable[QueueEntry]) -> LaneBatches:
        """Ordered by queue and priority: one lock order, so concurrent producers cannot deadlock."""
        by_lane: dict[tuple[str, int, str | None], list[QueueEntry]] = {}
        for entry in entries:
            by_lane.setdefault((entry.queue, entry.priority, entry.key), []).append(entry)
        keys = sorted(by_lane, key=lambda key: (key[0], key[1], key[2] or ""))
        return cls(keys, [len(by_lane[key]) for key in keys], [entry for key in keys for entry in by_lane[key]])

    def arguments(self, *, notify: bool) -> tuple[object, ...]:
        queues, priorities, keys = (list(column) for column in zip(*self.keys, strict=True))
        return (queues, priorities, keys, self.sizes, *entry_columns(self.entries), notify)

    def positions(self, rows: Iterable[tuple[int, int]]) -> list[LanePosition]:
        return [LanePosition(*key, *row) for key, row in zip(self.keys, rows, strict=True)]


def entry_columns(entries: Sequence[QueueEntry]) -> EntryColumns:
    return (
        [entry.job for entry in entries],
        [entry.layer for entry in entries],
        [entry.frame for entry in entries],
        [entry.frames for entry in entries],
        [entry.attempt for entry in entries],
        [entry.payload for entry in entries],
    )


def check_entries(entries: Sequence[QueueEntry]) -> None:
    """Reject malformed entries before anything is sent."""
    if len(entries) > ENTRIES_MAX:
        raise InvalidInput(
            f"{len(entries)} entries are too many for one call: enqueue at most {ENTRIES_MAX} at a time."
        )
    for queue in {entry.queue for entry in entries}:
        check_queue_name(queue)
    for entry in entries:
        if (fault := _fault(entry)) is not None:
            raise InvalidInput(f"Frames of job {entry.job} cannot be queued: {fault}.", job=str(entry.job))


def check_queue_name(queue: str) -> None:
    if not 0 < len(queue) <= QUEUE_CHARS_MAX or not queue.isprintable():
        shown = repr(queue if len(queue) <= 40 else f"{queue[:37]}...")
        raise InvalidInput(f"{shown} is not a valid queue name: use 1 to {QUEUE_CHARS_MAX} printable characters.")


def check_count(what: str, number: int, most: int) -> None:
    if type(number) is not int or not 1 <= number <= most:
        raise InvalidInput(f"{str(number)[:40]} is not a valid number of {what}: give a whole number from 1 to {most}.")


def _fault(entry: QueueEntry) -> str | None:
    if not BATCH <= entry.priority <= CRITICAL:
        return f"its priority is {entry.priority}, and must be between {BATCH} and {CRITICAL}"
    if not 1 <= entry.frames <= FRAMES_MAX:
        return f"{entry.frames} is not a valid number of frames: give 1 to {FRAMES_MAX}"
    if entry.frame < 0 or entry.frame + entry.frames > _FRAME_END:
        return f"frames are numbered from 0 to {_FRAME_END - 1}"
    if not 1 <= entry.attempt < _ATTEMPT_END:
        return f"attempts are counted from 1 to {_ATTEMPT_END - 1}"
    if entry.payload is not None and len(entry.payload) > PAYLOAD_BYTES_MAX:
        return (
            f"its payload has {len(entry.payload)} bytes, at most {PAYLOAD_BYTES_MAX} fit: store it and queue a pointer"
        )
    if entry.run_at is not None and entry.run_at.tzinfo is None:
        return "its run_at has no time zone: add one, such as UTC"
    return None
