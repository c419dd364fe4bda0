"""How agents are as a whole, from what PostgreSQL knows. Each replica tells about itself in its log and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

from rota.agents.admin import Admin
from rota.model.agent_views import AgentsHealth, AgentView
from rota.model.schedule import Every

LATE_S: Final = 60.0


async def health(admin: Admin, now: datetime) -> AgentsHealth:
    found, members = await admin.list(), await admin.members()
    late = [each.name for each in found if _is_late(each, now)]
    stuck = [each.name for each in found if each.state == "QUARANTINED"]
    reasons = [*_late(late), *_stuck(stuck), *([] if members else ["no replica runs agents"])]
    counts = dict(sorted(Counter(each.state for each in found).items()))
    told: Literal["HEALTHY", "DEGRADED"] = "DEGRADED" if reasons else "HEALTHY"
    return AgentsHealth(health=told, reasons=reasons, agents=counts, members=list(members))


def _late(late: Sequence[str]) -> list[str]:
    return [f"{len(late)} agents are overdue, first {late[0]}"] if late else []


def _stuck(stuck: Sequence[str]) -> list[str]:
    return [f"{', '.join(stuck)} cannot be stopped"] if stuck else []


def _is_late(agent: AgentView, now: datetime) -> bool:
    """By more than its interval, and a minute."""
    schedule = agent.spec.schedule
    patience_s = max(schedule.interval_ms / 1000 if isinstance(schedule, Every) else 0.0, LATE_S)
    return agent.state == "WAITING" and agent.due is not None and now - agent.due > timedelta(seconds=patience_s)
