"""Names that a rule asks for: as they are, or with `*` for any text and `?` for one mark.

A list of them is sorted once into what is looked up, what begins or ends so, and the rest, so that asking costs a
look-up and not one comparison for each. Nothing here is a regular expression: no pattern can take long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rota.model.errors import InvalidInput

GLOB_MAX: Final = 200
STARS_MAX: Final = 4
_WILDCARD: Final = re.compile(r"[*?]")
_INVALID_GLOB: Final = re.compile(r"[\[\]{}\\\x00-\x1f\x7f]|\*\*")


def validate_glob(text: str) -> str:
    """Raises InvalidInput with half a sentence, which whoever knows the line completes."""
    if found := _INVALID_GLOB.search(text):
        raise InvalidInput(f"{text[:60]!r} is no glob because of {found[0]!r}: * is any text and ? one mark, no more")
    if not text or len(text) > GLOB_MAX or text.count("*") > STARS_MAX:
        raise InvalidInput(f"{text[:60]!r} is no glob: write up to {GLOB_MAX} marks with {STARS_MAX} * at most")
    return text


class GlobSet:
    """Whether a name is among those that were listed."""

    __slots__ = ("_begins", "_ends", "_rest", "listed", "literals")

    def __init__(self, listed: Iterable[str]) -> None:
        self.listed = tuple(dict.fromkeys(listed))
        wild = [glob for glob in self.listed if _WILDCARD.search(glob)]
        self.literals = frozenset(self.listed).difference(wild)
        self._begins = tuple(glob[:-1] for glob in wild if not _WILDCARD.search(glob[:-1]) and glob[-1] == "*")
        self._ends = tuple(
            glob[1:] for glob in wild if not _WILDCARD.search(glob[1:]) and glob[0] == "*" and glob != "*"
        )
        simple = {f"{begin}*" for begin in self._begins} | {f"*{end}" for end in self._ends}
        self._rest = tuple(glob for glob in wild if glob not in simple)

    @property
    def is_literal(self) -> bool:
        """Whether nothing that is listed is a glob."""
        return len(self.literals) == len(self.listed)

    @property
    def prefixes(self) -> tuple[str, ...] | None:
        """What a name must begin with, when all that is listed says no more and no less than that; else None."""
        return None if self._rest or self._ends or self.literals or "" in self._begins else self._begins

    def matches(self, name: str) -> bool:
        if name in self.literals or name.startswith(self._begins) or name.endswith(self._ends):
            return True
        return any(_glob_matches(glob, name) for glob in self._rest)

    def matches_any(self, names: Iterable[str]) -> bool:
        return any(self.matches(name) for name in names)


def _glob_matches(glob: str, name: str) -> bool:
    """Greedy with one way back, to the last star: linear in both for each star there is."""
    at = start = 0
    star = -1
    place = 0
    while start < len(name):
        if at < len(glob) and glob[at] == "*":
            star, place = at, start
            at += 1
        elif at < len(glob) and glob[at] in ("?", name[start]):
            at += 1
            start += 1
        elif star >= 0:
            place += 1
            at, start = star + 1, place
        else:
            return False
    return all(mark == "*" for mark in glob[at:])
