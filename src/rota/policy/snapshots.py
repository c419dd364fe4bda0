"""The policies of this process: the one in force and the last ten, each identified by the hash of its content."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

import msgspec

from rota.model.errors import NotFound
from rota.policy.evaluate import CompiledPolicy

SNAPSHOTS_MAX: Final = 10


class PolicySnapshot(msgspec.Struct, frozen=True):
    """The hash of a policy, when it took effect here, and its number of rules."""

    id: str
    loaded_ms: int
    rules: int
    source: str


class PolicySnapshots:
    """Activates a policy by one assignment; a caller that took the previous one continues with it."""

    def __init__(self, first: CompiledPolicy) -> None:
        self.current = first
        self._snapshots: OrderedDict[str, tuple[CompiledPolicy, PolicySnapshot]] = OrderedDict()
        self.activate(first)

    def activate(self, policy: CompiledPolicy) -> None:
        snapshot = PolicySnapshot(policy.snapshot, time.time_ns() // 1_000_000, policy.size, policy.written.source)
        self._snapshots.pop(policy.snapshot, None)
        self._snapshots[policy.snapshot] = (policy, snapshot)
        while len(self._snapshots) > SNAPSHOTS_MAX:
            self._snapshots.popitem(last=False)
        self.current = policy

    def list_snapshots(self) -> list[PolicySnapshot]:
        """Newest first; the first is in force."""
        return [snapshot for _, snapshot in reversed(self._snapshots.values())]

    def get(self, snapshot: str) -> CompiledPolicy:
        """Look it up by id or a prefix of it."""
        found = [policy for snapshot_id, (policy, _) in self._snapshots.items() if snapshot_id.startswith(snapshot)]
        if len(found) != 1:
            raise NotFound(
                f"No unique policy snapshot starts with {snapshot[:40]!r}: use an id of the last {SNAPSHOTS_MAX}."
            )
        return found[0]
