"""Agents in PostgreSQL: specs, due times, runs and their outcomes.

Every write of a member for a run carries its lease and fence; PostgreSQL refuses a member whose lease has expired
(`StaleFence`). After a lost reply, `begin` and `end` can be retried with the same run numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

import asyncpg
import msgspec

from rota.infra import failpoints
from rota.infra.lease import Lease
from rota.infra.postgres import Database, query
from rota.model.agents import AgentOutcome, AgentSpec, NextRun, due_after_change_ms, plan_first_run
from rota.model.errors import StaleFence
from rota.model.failure_classes import FailureClass

BEGIN = query(__package__, "begin")
END = query(__package__, "end")
SEIZE = query(__package__, "seize")
NEXT_RUN_BLOCK = query(__package__, "block")
DECLARE = query(__package__, "declare")
IDLE = query(__package__, "idle")
RUN_STATUS = query(__package__, "standing")
MEMBERS = query(__package__, "members")
JOBS = query(__package__, "jobs")
GROUPS = query(__package__, "groups")
FENCE = query(__package__, "fence")
QUARANTINE = query(__package__, "quarantine")
WAKE = query(__package__, "wake")

RUNS_PER_BLOCK: Final = 1024
ERROR_MAX: Final = 2000
STALE_FENCE_SQLSTATE: Final = "RT001"
MEMBER_LEASE_PREFIX: Final = "agents:member:"
_SPEC_DECODER = msgspec.json.Decoder(AgentSpec)


class AgentBeginStatus(StrEnum):
    BEGUN = "begun"
    EARLY = "early"
    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"


class AgentBeginRequest(msgspec.Struct, frozen=True):
    name: str
    run: int
    timeout_ms: int


class AgentBeginResult(msgspec.Struct, frozen=True):
    """The verdict for one agent. `due_ms` is its due time in PostgreSQL, whatever Redis had."""

    name: str
    run: int
    verdict: AgentBeginStatus
    due_ms: int | None
    slot_ms: int | None
    streak: int
    backfill: bool = False
    token: int = 0


class AgentRunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended, and the next one."""

    name: str
    run: int
    outcome: AgentOutcome
    took_ms: int
    plan: NextRun
    failure: FailureClass | None = None
    error: str = ""


class RescheduledAgent(msgspec.Struct, frozen=True):
    """A run that PostgreSQL has ended; its agent is due at `due_ms`, or not again."""

    name: str
    run: int
    due_ms: int | None
    group: str = ""


class AgentRunStatus(msgspec.Struct, frozen=True):
    run: int | None
    due_ms: int | None


class AgentRepository:
    def __init__(self, database: Database, replica: str) -> None:
        self.database = database
        self.replica = replica
        self._numbers: Iterator[int] = iter(())

    async def allocate_run_numbers(self, count: int) -> list[int]:
        """Run numbers that were never used before."""
        numbers: list[int] = []
        while len(numbers) < count:
            numbers.extend(number for number, _ in zip(self._numbers, range(count - len(numbers)), strict=False))
            if len(numbers) < count:
                block = int(await self.database.value(NEXT_RUN_BLOCK))
                self._numbers = iter(range(block * RUNS_PER_BLOCK, (block + 1) * RUNS_PER_BLOCK))
        return numbers

    async def declare(self, specs: Sequence[AgentSpec], now_ms: int, spread_ms: Sequence[int]) -> int:
        """Declare agents; returns how many are new or changed. `spread_ms` delays the first run of each."""
        plans = [plan_first_run(spec, now_ms, spread) for spec, spread in zip(specs, spread_ms, strict=True)]
        return await self.database.run(
            DECLARE,
            [spec.name for spec in specs],
            [spec.group for spec in specs],
            [msgspec.json.encode(spec).decode() for spec in specs],
            [plan.due_ms for plan in plans],
            [plan.slot_ms for plan in plans],
            [due_after_change_ms(spec, now_ms) for spec in specs],
        )

    async def groups_of(self, names: Sequence[str]) -> dict[str, str]:
        return {row["name"]: row["shard_group"] for row in await self.database.rows(GROUPS, names)}

    async def begin(self, lease: Lease, at_ms: int, requests: Sequence[AgentBeginRequest]) -> list[AgentBeginResult]:
        """Begin runs where allowed, in the order of `requests`, acquired at `at_ms` on the clock of Redis."""
        columns = [each.name for each in requests], [each.run for each in requests]
        failpoints.hit("agents.before_begin")
        with _fenced(lease):
            rows = await self.database.rows(
                BEGIN, lease.name, lease.fence, self.replica, *columns, at_ms, [each.timeout_ms for each in requests]
            )
        failpoints.after_send("agents.begin")
        found = {row["name"]: row for row in rows}  # the order of the rows is undefined
        return [
            AgentBeginResult(
                each.name,
                each.run,
                AgentBeginStatus(row["verdict"]),
                row["due_ms"],
                row["slot_ms"],
                row["streak"],
                row["backfill"],
                row["token"],
            )
            for each in requests
            if (row := found.get(each.name)) is not None
        ]

    async def end(self, lease: Lease, ended: Sequence[AgentRunEnd]) -> list[RescheduledAgent]:
        """Returns the runs that were ours until now. A missing run was taken over, or had ended before."""
        failpoints.hit("agents.before_end")
        payload = msgspec.json.encode([_end_row(each) for each in ended]).decode()
        with _fenced(lease):
            rows = await self.database.rows(END, lease.name, lease.fence, payload)
        failpoints.after_send("agents.end")
        return [RescheduledAgent(row["name"], row["run"], row["due_ms"]) for row in rows]

    async def seize(self, leader: Lease, grace_s: float, most: int) -> list[RescheduledAgent]:
        """End runs of dead members as LOST; their agents are due again."""
        with _fenced(leader):
            rows = await self.database.rows(SEIZE, leader.name, leader.fence, grace_s, most)
        failpoints.hit("agents.after_seize")
        return [RescheduledAgent(row["name"], row["run"], row["due_ms"], row["shard_group"]) for row in rows]

    async def assert_fence(self, lease: Lease) -> None:
        """Raise StaleFence if this lease has expired."""
        with _fenced(lease):
            await self.database.run(FENCE, lease.name, lease.fence)

    async def idle(self, names: Sequence[str]) -> list[tuple[str, int]]:
        """Agents that wait and have no run, with their due times in ms."""
        return [(row["name"], row["due_ms"]) for row in await self.database.rows(IDLE, names)]

    async def run_status(self, names: Iterable[str]) -> dict[str, AgentRunStatus]:
        """The status of those names that are agents."""
        rows = await self.database.rows(RUN_STATUS, [name for name in names if name == storable_text(name)])
        return {row["name"]: AgentRunStatus(row["run"], row["due_ms"]) for row in rows}

    async def members(self, crowd: str = "") -> dict[str, int]:
        """Lease names and fences of live members, of all or of one crowd."""
        rows = await self.database.rows(MEMBERS, f"{MEMBER_LEASE_PREFIX}{crowd}")
        return {row["name"]: row["fence"] for row in rows}

    async def job_agents(self) -> list[AgentSpec]:
        return [_SPEC_DECODER.decode(row["spec"]) for row in await self.database.rows(JOBS)]

    async def wake(self, name: str = "") -> None:
        """Wake all schedulers."""
        await self.database.run(WAKE, name)

    async def quarantine(self, name: str, run: int, *, stuck: bool) -> None:
        await self.database.run(QUARANTINE, name, run, stuck)


def storable_text(text: str) -> str:
    """An error text for a column: without characters that PostgreSQL refuses, and truncated."""
    shown = text.encode("utf-8", "replace").decode().replace("\x00", "")
    return shown if len(shown) <= ERROR_MAX else f"{shown[: ERROR_MAX - 3]}..."


def _end_row(end: AgentRunEnd) -> dict[str, object]:
    return {
        "name": end.name,
        "run": end.run,
        "outcome": end.outcome,
        "failure": end.failure,
        "error": storable_text(end.error) or None,
        "took_ms": end.took_ms,
        "streak": end.plan.streak,
        "due_ms": end.plan.due_ms,
        "slot_ms": end.plan.slot_ms,
    }


@contextmanager
def _fenced(lease: Lease) -> Iterator[None]:
    try:
        yield
    except asyncpg.PostgresError as error:
        if error.sqlstate != STALE_FENCE_SQLSTATE:
            raise
        raise StaleFence(
            f"The lease {lease.name} expired or has another holder, so this write was refused: other members run its"
            " agents from now on.",
            leases=[lease.name],
            fences=[lease.fence],
        ) from error
