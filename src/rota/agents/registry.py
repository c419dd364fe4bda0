"""Which agents this replica may run, and which of them it acquires first. No I/O.

Patterns are strict: an excluded agent never runs here. Sharding is a preference: members that can run the same agents
(one *crowd*) share them by jump hash, and for `grace_ms` after its due time only the owner acquires an agent. After
that any member does, so a busy, slow or dead owner delays an agent by at most the grace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from rota.agents.running import AgentBody, PreparedBody
from rota.model.agents import AgentSpec
from rota.model.errors import InvalidSetting
from rota.model.settings.agents import AgentSettings

_MULTIPLIER: Final = 2862933555777941757
_MASK: Final = 2**64 - 1


class DeclaredAgent(msgspec.Struct, frozen=True):
    """An agent and its body."""

    spec: AgentSpec
    body: AgentBody | PreparedBody


class AgentRegistry:
    def __init__(self, settings: AgentSettings, declared: Iterable[DeclaredAgent], grace_ms: int) -> None:
        self._enabled = compile_pattern("enabled_pattern", settings.enabled_pattern)
        self._disabled = (
            compile_pattern("disabled_pattern", settings.disabled_pattern) if settings.disabled_pattern else None
        )
        self._grace_ms = grace_ms
        self.agents: dict[str, DeclaredAgent] = {}
        self.groups: list[str] = []
        self.crowd = ""
        self._members: Sequence[str] = ()
        self._own_name = ""
        self.replace(declared)

    def replace(self, declared: Iterable[DeclaredAgent]) -> None:
        """Replace all agents, filtered by the patterns."""
        self.agents = {each.spec.name: each for each in declared if self.allows(each.spec.name)}
        self.groups = sorted({each.spec.group for each in self.agents.values()})
        names = "\0".join(sorted(self.agents))
        self.crowd = hashlib.blake2b(names.encode(), digest_size=6).hexdigest()

    def set_members(self, members: Sequence[str], me: str) -> None:
        """The live members, in the same order everywhere."""
        self._members = sorted(members)
        self._own_name = me

    def allows(self, name: str) -> bool:
        if not self._enabled.fullmatch(name):
            return False
        return self._disabled is None or not self._disabled.fullmatch(name)

    def owns(self, name: str) -> bool:
        """Whether this member acquires it first, and maintains its entries."""
        if self._own_name not in self._members or len(self._members) < 2:
            return True
        return self._members[jump_hash(name, len(self._members))] == self._own_name

    def may_take(self, name: str, overdue_ms: int) -> bool:
        return name in self.agents and (overdue_ms >= self._grace_ms or self.owns(name))


def compile_pattern(setting: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidSetting(
            f"redis.agent.{setting} is not a valid regular expression ({error}): correct it, or leave it out."
        ) from None


def jump_hash(name: str, buckets: int) -> int:
    """The bucket of a name; adding a bucket moves one name in `buckets + 1` (Lamping and Veach)."""
    key = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    bucket, jump = -1, 0
    while jump < buckets:
        bucket = jump
        key = (key * _MULTIPLIER + 1) & _MASK
        jump = int((bucket + 1) * (2**31 / ((key >> 33) + 1)))
    return bucket
