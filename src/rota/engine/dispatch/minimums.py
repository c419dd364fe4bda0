"""Minimums of folders and departments, and what lacks of them. Pure.

A minimum refuses nothing. Within its show, frames of a folder or department that uses less than its minimum are served
before all other frames; among themselves in order of priority. A minimum does not count against other shows: shows are
ordered by size, or a show could take from others with the minimums that it sets.

Bookings of this server, and ends that it has recorded, count at once; those of other servers with the next read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from rota.model.ids import DeptId, FolderId, ShowId
from rota.model.quota import RESOURCES, Ask, Resource, Usage

MinimumKey = tuple[ShowId, UUID]
"""A folder, or a department, in a show."""
_Counter = Counter[tuple[MinimumKey, Resource]]


def minimum_keys(show: ShowId, folder: FolderId, dept: DeptId) -> tuple[MinimumKey, MinimumKey]:
    return (show, folder), (show, dept)


class Minimums:
    """Its changes return whether a folder or department got above or below its minimum."""

    def __init__(self) -> None:
        self._least: Mapping[MinimumKey, Usage] = {}
        self._used: _Counter = Counter()
        self._reserved: _Counter = Counter()
        """By rounds under way."""

    def __bool__(self) -> bool:
        return bool(self._least)

    def replace(self, least: Mapping[MinimumKey, Usage], used: Mapping[MinimumKey, Usage]) -> bool:
        """The minimums above zero, and the use of each, as PostgreSQL has them."""
        before = self._below(self._least)
        self._least = least
        self._reserved = Counter({at: amount for at, amount in self._reserved.items() if at[0] in least})
        self._used = Counter({(key, resource): used[key].of(resource) for key in least for resource in RESOURCES})
        return before != self._below(least)

    def frames_lacking(self, keys: Sequence[MinimumKey], ask: Ask) -> int:
        """How many such frames bring the folder and the department to their minimum; 0: none is below it."""
        lacking = (
            math.ceil(self._lacking(key, resource) / ask.of(resource))
            for key in keys
            for resource in RESOURCES
            if ask.of(resource)
        )
        return max(0, *lacking)

    def add(self, keys: Sequence[MinimumKey], ask: Ask, frames: int) -> bool:
        """So many frames were booked, or released if negative."""
        return self._count(self._used, keys, ask, frames)

    def reserve(self, keys: Sequence[MinimumKey], ask: Ask, frames: int) -> bool:
        """A round for so many frames is under way, or has ended if negative."""
        return self._count(self._reserved, keys, ask, frames)

    def _count(self, counter: _Counter, keys: Sequence[MinimumKey], ask: Ask, frames: int) -> bool:
        keys = [key for key in keys if key in self._least]
        if not keys or not frames:
            return False
        before = self._below(keys)
        for key in keys:
            for resource in RESOURCES:
                # Not below zero: a round may end whose beginning did not count, as there was no minimum yet.
                counter[key, resource] = max(0, counter[key, resource] + frames * ask.of(resource))
        return before != self._below(keys)

    def _below(self, keys: Iterable[MinimumKey]) -> set[tuple[MinimumKey, Resource]]:
        return {(key, resource) for key in keys for resource in RESOURCES if self._lacking(key, resource) > 0}

    def _lacking(self, key: MinimumKey, resource: Resource) -> int:
        least = self._least.get(key)
        return (
            least.of(resource) - self._used[key, resource] - self._reserved[key, resource] if least is not None else 0
        )
