"""Agents as people see them: what the command line shows, and what HTTP and the SDK answer with."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import msgspec

from rota.model.agents import AgentSpec

HISTORY_MAX: Final = 50
"""Runs that are kept of each."""


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as people see it."""

    name: str
    state: str
    """PAUSED, QUARANTINED, RUNNING, WAITING or DONE; of several, the first."""
    schedule: str
    group: str
    due: datetime | None
    run: int | None
    replica: str | None
    since: datetime | None
    deadline: datetime | None
    streak: int
    failure: str | None
    error: str | None
    runs: int
    last_outcome: str | None
    last_took_ms: int | None
    last_started: datetime | None
    backfill: datetime | None
    """The slot that a backfill comes to next; None: there is none."""
    backfill_until: datetime | None
    spec: AgentSpec


class AgentRunView(msgspec.Struct, frozen=True, kw_only=True):
    run: int
    replica: str
    outcome: str
    failure: str | None
    error: str | None
    took_ms: int
    backfill: bool
    slot: datetime | None
    """The moment of its schedule that it was for."""
    due: datetime
    started: datetime


class Backfill(msgspec.Struct, frozen=True, kw_only=True):
    """What a backfill will run."""

    runs: int
    first: datetime
    last: datetime


class AgentsHealth(msgspec.Struct, frozen=True, kw_only=True):
    health: Literal["HEALTHY", "DEGRADED"]
    reasons: list[str]
    agents: dict[str, int]
    """How many are in which state."""
    members: list[str]
    """Replicas that run agents."""


class BackfillRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From one moment until before another, both with their time zone."""

    since: datetime
    until: datetime


class TriggerResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queued: bool
    """It runs, and will once more when that run has ended."""
