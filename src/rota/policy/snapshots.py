"""Policies of this process: the one in force, and the last ten, each known by the hash of its content."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

import msgspec

from rota.model.errors import NotFound
from rota.policy.evaluate import CompiledPolicy

SNAPSHOTS_MAX: Final = 10


class PolicySnapshot(msgspec.Struct, frozen=True):
    """What is told of a policy: its hash, when it came into force here, and how many rules it has."""

    id: str
    loaded_ms: int
    rules: int
    source: str


class PolicySnapshots:
    """Changing what is in force is one assignment: whoever has taken a policy goes on with it to the end."""

    def __init__(self, first: CompiledPolicy) -> None:
        self.current = first
        self._kept: OrderedDict[str, tuple[CompiledPolicy, PolicySnapshot]] = OrderedDict()
        self.activate(first)

    def activate(self, policy: CompiledPolicy) -> None:
        told = PolicySnapshot(policy.snapshot, time.time_ns() // 1_000_000, policy.size, policy.written.source)
        self._kept.pop(policy.snapshot, None)
        self._kept[policy.snapshot] = (policy, told)
        while len(self._kept) > SNAPSHOTS_MAX:
            self._kept.popitem(last=False)
        self.current = policy

    def list_snapshots(self) -> list[PolicySnapshot]:
        """The newest first, which is the one in force."""
        return [told for _, told in reversed(self._kept.values())]

    def get(self, snapshot: str) -> CompiledPolicy:
        """By its id or the beginning of it."""
        found = [policy for known, (policy, _) in self._kept.items() if known.startswith(snapshot)]
        if len(found) != 1:
            raise NotFound(
                f"No snapshot of the policy begins with {snapshot[:40]!r} here; the last {SNAPSHOTS_MAX} are kept."
            )
        return found[0]
