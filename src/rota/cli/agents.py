"""`rota agents`: each command is one change with its audit entry, or one read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from rota import runtime
from rota.agents import overview
from rota.agents.admin import Admin
from rota.cli import db
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page, Table
from rota.cli.form import Form
from rota.cli.local import local_url
from rota.infra import redis as redis_infra
from rota.infra.postgres import check_current
from rota.model.agent_views import AgentView, RunView
from rota.model.errors import InvalidInput
from rota.model.settings import Settings
from rota.model.units import span

NO_AGENTS = "There is no agent: `@app.agent(every=...)` declares one, and `rota worker APP` runs it."
CLOCKS_APART = timedelta(seconds=5)
"""What this machine calls now may lie in the future of Redis."""


def run(settings: Settings, work: Callable[[Admin], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        url = settings.redis.url or local_url(settings, "redis")
        redis = redis_infra.connect(runtime.redis_target(settings, url, "agents"))
        try:
            async with db.opened(settings) as database:
                await check_current(database)
                return await work(Admin(database, redis, settings.redis.scheduler.keys, actor()))
        finally:
            await redis.aclose()

    page = asyncio.run(done())
    print_page(page, form=form)
    if isinstance(page.data, dict) and page.data.get("health") == "DEGRADED":
        sys.exit(1)


async def listed(admin: Admin) -> Page:
    found = await admin.list()
    if not found:
        return Page([], [NO_AGENTS])
    columns = ("name", "state", "schedule", "due", "last", "took", "failures", "where")
    return Page([_data(each) for each in found], [Table(columns, [_row(each) for each in found], wide=("where",))])


async def shown(admin: Admin, name: str) -> Page:
    found = await admin.show(name)
    lines = [f"{found.name} is {found.state}: {_now(found)}.", f"It runs {found.schedule}; {_last(found)}."]
    if found.backfill and found.backfill_until:
        lines.append(f"A backfill goes on at {_moment(found.backfill)}, until {_moment(found.backfill_until)}.")
    if found.streak:
        lines.append(f"It has failed {found.streak} times in a row, the last as {found.failure}.")
    if found.error:
        lines.append(f"Last error: {found.error}")
    return Page(_data(found), lines)


async def paused(admin: Admin, name: str) -> Page:
    changed = await admin.pause(name)
    told = f"Agent {name} is paused." if changed else f"Nothing changed: agent {name} was paused before."
    return Page({"agent": name, "changed": changed}, [told])


async def resumed(admin: Admin, name: str) -> Page:
    changed = await admin.resume(name)
    told = f"Agent {name} runs again, next {_due(await admin.show(name))}." if changed else "Nothing changed: it runs."
    return Page({"agent": name, "changed": changed}, [told])


async def triggered(admin: Admin, name: str) -> Page:
    now = await admin.trigger(name)
    told = f"Agent {name} is due now." if now else f"Agent {name} runs; it will once more when that run has ended."
    return Page({"agent": name, "queued": not now}, [told])


async def backfilled(admin: Admin, name: str, since: str, until: str) -> Page:
    told = await admin.backfill(name, _given(since), _given(until) if until else datetime.now(UTC) - CLOCKS_APART)
    span_told = f"from {_moment(told.first)} to {_moment(told.last)}"
    data: dict[str, Any] = {"agent": name, **msgspec.to_builtins(told)}
    return Page(data, [f"Agent {name} runs {told.runs} times more, {span_told}, one by one."])


async def backfill_stopped(admin: Admin, name: str) -> Page:
    changed = await admin.stop_backfill(name)
    told = f"The backfill of agent {name} is over." if changed else f"Nothing changed: agent {name} has no backfill."
    return Page({"agent": name, "changed": changed}, [told])


async def removed(admin: Admin, name: str) -> Page:
    await admin.remove(name)
    return Page({"agent": name}, [f"Agent {name} and its history are gone."])


async def history(admin: Admin, name: str, most: int) -> Page:
    runs = await admin.history(name, most)
    if not runs:
        return Page([], [f"Agent {name} has not run yet."])
    columns = ("started", "outcome", "took", "late", "replica", "run", "error")
    rows = [_run_row(each) for each in runs]
    return Page([msgspec.to_builtins(each) for each in runs], [Table(columns, rows, wide=("run",))])


async def health(admin: Admin) -> Page:
    told = await overview.health(admin, datetime.now(UTC))
    counted = ", ".join(f"{count} {state}" for state, count in told.agents.items()) or "no agents"
    lines = [f"{told.health}: {counted}, run by {len(told.members)} replicas.", *(f"{each}." for each in told.reasons)]
    members = [Table(("replica",), [(name,) for name in told.members])] if told.members else []
    return Page(msgspec.to_builtins(told), [*lines, *members])


def _given(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is no moment: write one such as 2026-01-31T00:00Z.") from None
    return at if at.tzinfo else at.astimezone()


def _row(agent: AgentView) -> tuple[object, ...]:
    took = "" if agent.last_took_ms is None else span(agent.last_took_ms / 1000)
    where = agent.replica or ""
    last = agent.last_outcome or "never"
    due = f"runs {_since(agent.since)}" if agent.since is not None else _due(agent)
    return (agent.name, agent.state, agent.schedule, due, last, took, agent.streak, where)


def _run_row(run: RunView) -> tuple[object, ...]:
    late = span(max(0.0, (run.started - run.due).total_seconds()))
    error = (run.error or "").splitlines()[0][:80] if run.error else ""
    return (_moment(run.started), run.outcome, span(run.took_ms / 1000), late, run.replica, run.run, error)


def _now(agent: AgentView) -> str:
    if agent.replica is not None and agent.since is not None:
        return f"run {agent.run} on {agent.replica} since {_moment(agent.since)}"
    return "it is due " + _due(agent) if agent.due else "nothing is due"


def _last(agent: AgentView) -> str:
    if agent.last_started is None or agent.last_took_ms is None:
        return "it has not run yet"
    took = span(agent.last_took_ms / 1000)
    return f"its last of {agent.runs} runs {agent.last_outcome} at {_moment(agent.last_started)} after {took}"


def _due(agent: AgentView) -> str:
    if agent.due is None:
        return "never"
    left_s = (agent.due - datetime.now(UTC)).total_seconds()
    return f"in {span(left_s)}" if left_s > 0 else "now"


def _since(moment: datetime) -> str:
    return span(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _data(agent: AgentView) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(agent)
    return told
