"""Agents, as returned by the API and shown by the CLI and the SDK. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import msgspec

from rota.model.agents import AgentSpec

HISTORY_MAX: Final = 50
"""Runs retained per agent."""


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """An agent with its current and last run."""

    name: str
    state: str
    """PAUSED, QUARANTINED, RUNNING, WAITING or DONE; the first that applies."""
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
    """The next slot of a backfill; None: no backfill."""
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
    """The scheduled time that it ran for."""
    due: datetime
    started: datetime


class Backfill(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a backfill."""

    runs: int
    first: datetime
    last: datetime


class AgentsHealth(msgspec.Struct, frozen=True, kw_only=True):
    health: Literal["HEALTHY", "DEGRADED"]
    reasons: list[str]
    agents: dict[str, int]
    """Number of agents by state."""
    members: list[str]
    """Replicas that run agents."""


class BackfillRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A half-open interval; both ends have a time zone."""

    since: datetime
    until: datetime


class TriggerResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queued: bool
    """It is running, and runs once more after that."""
