"""Overall health of agents, from PostgreSQL. Each replica also reports its own in its log and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

from rota.agents.admin import AgentAdmin
from rota.api.agents import AgentsHealth, AgentView
from rota.model.schedules import IntervalSchedule

LATE_AFTER_MIN_S: Final = 60.0


async def summarize_health(admin: AgentAdmin, now: datetime) -> AgentsHealth:
    found, members = await admin.list(), await admin.members()
    late = [each.name for each in found if _is_late(each, now)]
    stuck = [each.name for each in found if each.state == "QUARANTINED"]
    reasons = [*_late_reasons(late), *_stuck_reasons(stuck), *([] if members else ["no replica runs agents"])]
    counts = dict(sorted(Counter(each.state for each in found).items()))
    health: Literal["HEALTHY", "DEGRADED"] = "DEGRADED" if reasons else "HEALTHY"
    return AgentsHealth(health=health, reasons=reasons, agents=counts, members=list(members))


def _late_reasons(late: Sequence[str]) -> list[str]:
    return [f"{len(late)} agents are overdue, first {late[0]}"] if late else []


def _stuck_reasons(stuck: Sequence[str]) -> list[str]:
    return [f"{', '.join(stuck)} cannot be stopped"] if stuck else []


def _is_late(agent: AgentView, now: datetime) -> bool:
    """Overdue by more than its interval, and by at least a minute."""
    schedule = agent.spec.schedule
    tolerance_s = max(schedule.interval_ms / 1000 if isinstance(schedule, IntervalSchedule) else 0.0, LATE_AFTER_MIN_S)
    return agent.state == "WAITING" and agent.due is not None and now - agent.due > timedelta(seconds=tolerance_s)
