"""Minimums of folders and departments, and what lacks of them. Pure.

A minimum refuses nothing. Within its show, work of a folder or department that uses less than its minimum is served
before all other work; among itself in order of priority. It does not count against other shows, which are ordered by
size, or a show could take from others with the minimums that it sets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from rota.model.ids import DeptId, FolderId, ShowId
from rota.model.quota import RESOURCES, Ask, Resource, Usage

MinimumKey = tuple[ShowId, UUID]
"""A folder, or a department, in a show."""


def minimum_keys(show: ShowId, folder: FolderId, dept: DeptId) -> tuple[MinimumKey, MinimumKey]:
    return (show, folder), (show, dept)


class Minimums:
    def __init__(self) -> None:
        self._least: Mapping[MinimumKey, Usage] = {}
        self._used: Counter[tuple[MinimumKey, Resource]] = Counter()
        self._reserved: Counter[tuple[MinimumKey, Resource]] = Counter()
        """By rounds under way."""

    def __bool__(self) -> bool:
        return bool(self._least)

    def set(self, least: Mapping[MinimumKey, Usage], used: Mapping[MinimumKey, Usage]) -> None:
        """The minimums above zero, and the use of each, as PostgreSQL has them."""
        self._least = least
        self._used = Counter({(key, resource): used[key].of(resource) for key in least for resource in RESOURCES})

    def frames_lacking(self, keys: Sequence[MinimumKey], ask: Ask) -> int:
        """How many such frames bring the folder and the department to their minimum; 0: none is below it."""
        return max((self._lacking(key, ask) for key in keys if key in self._least), default=0)

    def add(self, keys: Sequence[MinimumKey], ask: Ask, frames: int) -> None:
        """So many frames were booked, or released if negative."""
        _count(self._used, keys, ask, frames)

    def reserve(self, keys: Sequence[MinimumKey], ask: Ask, frames: int) -> None:
        """A round for so many frames is under way, or has ended if negative."""
        _count(self._reserved, keys, ask, frames)

    def _lacking(self, key: MinimumKey, ask: Ask) -> int:
        lacking = 0
        for resource in RESOURCES:
            if each := ask.of(resource):
                in_use = self._used[key, resource] + self._reserved[key, resource]
                lacking = max(lacking, math.ceil((self._least[key].of(resource) - in_use) / each))
        return lacking


def _count(counter: Counter[tuple[MinimumKey, Resource]], keys: Sequence[MinimumKey], ask: Ask, frames: int) -> None:
    for key in keys:
        for resource in RESOURCES:
            counter[key, resource] += frames * ask.of(resource)
