"""`rota agents`: each command is one read, or one change with its audit entry."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from rota import runtime
from rota.agents import health_summary
from rota.agents.admin import AgentAdmin
from rota.api.agents import AgentRunView, AgentView
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.local.up import local_url
from rota.cli.quota.actions import current_actor, print_page
from rota.infra import redis as redis_infra
from rota.infra.postgres import check_current
from rota.model.errors import InvalidInput
from rota.model.settings import Settings
from rota.model.units import humanize_duration

NO_AGENTS = "There is no agent: `@app.agent(every=...)` declares one, and `rota worker APP` runs it."
CLOCK_SKEW_MAX = timedelta(seconds=5)
"""Tolerance for a local clock that is ahead of Redis."""


def run(settings: Settings, work: Callable[[AgentAdmin], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        url = settings.redis.url or local_url(settings, "redis")
        redis = redis_infra.connect(runtime.redis_target(settings, url, "agents"))
        try:
            async with db_commands.open_database(settings) as database:
                await check_current(database)
                return await work(AgentAdmin(database, redis, settings.redis.scheduler.keys, current_actor()))
        finally:
            await redis.aclose()

    page = asyncio.run(done())
    print_page(page, form=form)
    if isinstance(page.data, dict) and page.data.get("health") == "DEGRADED":
        sys.exit(1)


async def list_agents(admin: AgentAdmin) -> CliPage:
    found = await admin.list()
    if not found:
        return CliPage([], [NO_AGENTS])
    columns = ("name", "state", "schedule", "due", "last", "took", "failures", "where")
    return CliPage([_data(each) for each in found], [Table(columns, [_row(each) for each in found], wide=("where",))])


async def show_agent(admin: AgentAdmin, name: str) -> CliPage:
    found = await admin.show(name)
    lines = [
        f"{found.name} is {found.state}: {_current_text(found)}.",
        f"It runs {found.schedule}; {_last_run_text(found)}.",
    ]
    if found.backfill and found.backfill_until:
        lines.append(
            f"A backfill is in progress at {_format_time(found.backfill)}, until {_format_time(found.backfill_until)}."
        )
    if found.streak:
        lines.append(f"It has failed {found.streak} times in a row, the last as {found.failure}.")
    if found.error:
        lines.append(f"Last error: {found.error}")
    return CliPage(_data(found), lines)


async def pause_agent(admin: AgentAdmin, name: str) -> CliPage:
    changed = await admin.pause(name)
    text = f"Agent {name} is paused." if changed else f"Nothing changed: agent {name} is already paused."
    return CliPage({"agent": name, "changed": changed}, [text])


async def resume_agent(admin: AgentAdmin, name: str) -> CliPage:
    changed = await admin.resume(name)
    text = (
        f"Agent {name} is resumed; its next run is {_due_text(await admin.show(name))}."
        if changed
        else "Nothing changed: it is not paused."
    )
    return CliPage({"agent": name, "changed": changed}, [text])


async def trigger_agent(admin: AgentAdmin, name: str) -> CliPage:
    now = await admin.trigger(name)
    text = f"Agent {name} is due now." if now else f"Agent {name} is running; it runs once more after this run."
    return CliPage({"agent": name, "queued": not now}, [text])


async def backfill_agent(admin: AgentAdmin, name: str, since: str, until: str) -> CliPage:
    backfill = await admin.backfill(
        name, _parse_time(since), _parse_time(until) if until else datetime.now(UTC) - CLOCK_SKEW_MAX
    )
    span = f"from {_format_time(backfill.first)} to {_format_time(backfill.last)}"
    data: dict[str, Any] = {"agent": name, **msgspec.to_builtins(backfill)}
    return CliPage(data, [f"Agent {name} runs {backfill.runs} more times, {span}, one after the other."])


async def stop_backfill(admin: AgentAdmin, name: str) -> CliPage:
    changed = await admin.stop_backfill(name)
    text = f"The backfill of agent {name} is stopped." if changed else f"Nothing changed: agent {name} has no backfill."
    return CliPage({"agent": name, "changed": changed}, [text])


async def remove_agent(admin: AgentAdmin, name: str) -> CliPage:
    await admin.remove(name)
    return CliPage({"agent": name}, [f"Agent {name} and its history are deleted."])


async def agent_history(admin: AgentAdmin, name: str, most: int) -> CliPage:
    runs = await admin.history(name, most)
    if not runs:
        return CliPage([], [f"Agent {name} has not run yet."])
    columns = ("started", "outcome", "took", "late", "replica", "run", "error")
    rows = [_run_row(each) for each in runs]
    return CliPage([msgspec.to_builtins(each) for each in runs], [Table(columns, rows, wide=("run",))])


async def agents_health(admin: AgentAdmin) -> CliPage:
    health = await health_summary.summarize_health(admin, datetime.now(UTC))
    counts = ", ".join(f"{count} {state}" for state, count in health.agents.items()) or "no agents"
    lines = [f"{health.health}: {counts}, run by {len(health.members)} replicas."]
    lines += [f"{each}." for each in health.reasons]
    members = [Table(("replica",), [(name,) for name in health.members])] if health.members else []
    return CliPage(msgspec.to_builtins(health), [*lines, *members])


def _parse_time(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is not a valid time: use a form such as 2026-01-31T00:00Z.") from None
    return at if at.tzinfo else at.astimezone()


def _row(agent: AgentView) -> tuple[object, ...]:
    took = "" if agent.last_took_ms is None else humanize_duration(agent.last_took_ms / 1000)
    where = agent.replica or ""
    last = agent.last_outcome or "never"
    due = f"runs {_elapsed_text(agent.since)}" if agent.since is not None else _due_text(agent)
    return (agent.name, agent.state, agent.schedule, due, last, took, agent.streak, where)


def _run_row(run: AgentRunView) -> tuple[object, ...]:
    late = humanize_duration(max(0.0, (run.started - run.due).total_seconds()))
    error = (run.error or "").splitlines()[0][:80] if run.error else ""
    return (
        _format_time(run.started),
        run.outcome,
        humanize_duration(run.took_ms / 1000),
        late,
        run.replica,
        run.run,
        error,
    )


def _current_text(agent: AgentView) -> str:
    if agent.replica is not None and agent.since is not None:
        return f"run {agent.run} on {agent.replica} since {_format_time(agent.since)}"
    return "it is due " + _due_text(agent) if agent.due else "nothing is due"


def _last_run_text(agent: AgentView) -> str:
    if agent.last_started is None or agent.last_took_ms is None:
        return "it has not run yet"
    took = humanize_duration(agent.last_took_ms / 1000)
    return f"its last of {agent.runs} runs {agent.last_outcome} at {_format_time(agent.last_started)} after {took}"


def _due_text(agent: AgentView) -> str:
    if agent.due is None:
        return "never"
    left_s = (agent.due - datetime.now(UTC)).total_seconds()
    return f"in {humanize_duration(left_s)}" if left_s > 0 else "now"


def _elapsed_text(started: datetime) -> str:
    return humanize_duration(max(0.0, (datetime.now(UTC) - started).total_seconds()))


def _format_time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _data(agent: AgentView) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(agent)
    return data
