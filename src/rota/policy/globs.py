"""Name patterns of rules: literal, or with `*` for any text and `?` for one character.

A set is split once into literals, prefixes, suffixes and the rest, so that a match costs a lookup instead of one
comparison per pattern. No regular expressions: no pattern can be slow.
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
    """Raises InvalidInput with a phrase; the caller adds the line."""
    if found := _INVALID_GLOB.search(text):
        raise InvalidInput(
            f"{text[:60]!r} is not a valid glob because of {found[0]!r}: use * for any text and ? for one character"
        )
    if not text or len(text) > GLOB_MAX or text.count("*") > STARS_MAX:
        raise InvalidInput(
            f"{text[:60]!r} is not a valid glob: use 1 to {GLOB_MAX} characters with at most {STARS_MAX} *"
        )
    return text


class GlobSet:
    """Matches names against a list of globs."""

    __slots__ = ("_prefixes", "_rest", "_suffixes", "listed", "literals")

    def __init__(self, listed: Iterable[str]) -> None:
        self.listed = tuple(dict.fromkeys(listed))
        wild = [glob for glob in self.listed if _WILDCARD.search(glob)]
        self.literals = frozenset(self.listed).difference(wild)
        self._prefixes = tuple(glob[:-1] for glob in wild if not _WILDCARD.search(glob[:-1]) and glob[-1] == "*")
        self._suffixes = tuple(
            glob[1:] for glob in wild if not _WILDCARD.search(glob[1:]) and glob[0] == "*" and glob != "*"
        )
        simple = {f"{prefix}*" for prefix in self._prefixes} | {f"*{suffix}" for suffix in self._suffixes}
        self._rest = tuple(glob for glob in wild if glob not in simple)

    @property
    def is_literal(self) -> bool:
        """Whether every entry is a literal."""
        return len(self.literals) == len(self.listed)

    @property
    def prefixes(self) -> tuple[str, ...] | None:
        """The prefixes, if every entry is a pure prefix pattern such as `a.*`; else None."""
        return None if self._rest or self._suffixes or self.literals or "" in self._prefixes else self._prefixes

    def matches(self, name: str) -> bool:
        if name in self.literals or name.startswith(self._prefixes) or name.endswith(self._suffixes):
            return True
        return any(_glob_matches(glob, name) for glob in self._rest)

    def matches_any(self, names: Iterable[str]) -> bool:
        return any(self.matches(name) for name in names)


def _glob_matches(glob: str, name: str) -> bool:
    """Greedy match that backtracks to the last star only: O(len(glob) * len(name))."""
    at = start = 0
    star = -1
    star_start = 0
    while start < len(name):
        if at < len(glob) and glob[at] == "*":
            star, star_start = at, start
            at += 1
        elif at < len(glob) and glob[at] in ("?", name[start]):
            at += 1
            start += 1
        elif star >= 0:
            star_start += 1
            at, start = star + 1, star_start
        else:
            return False
    return all(char == "*" for char in glob[at:])
