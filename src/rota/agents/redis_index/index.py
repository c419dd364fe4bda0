"""Sorted sets of agents in Redis: waiting and working, and the run stamp of each working agent.

Every transition is one script for at most `BATCH_MAX` agents: longer batches would block other clients for
milliseconds. Times in scripts are microseconds on the server's clock; the last three digits of a due time order agents
with equal milliseconds. After a lost reply, `acquire` and `finish` can be retried with the same runs, the other
scripts at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from redis.asyncio import Redis

from rota.infra import failpoints
from rota.infra.redis import AgentRedisKeys, Script, script
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError, ScriptFailed

BATCH_MAX: Final = 200
T = TypeVar("T")


class ReadyReply(msgspec.Struct, frozen=True, tag="ready"):
    now_us: int
    names: tuple[bytes, ...]
    dues_us: tuple[int, ...]
    count: int
    next_us: int


class AcquireReply(msgspec.Struct, frozen=True, tag="acquired"):
    now_ms: int
    places: list[int]


class FinishReply(msgspec.Struct, frozen=True, tag="finished"):
    moved: int
    added: int
    stale: int


class RepopulateReply(msgspec.Struct, frozen=True, tag="repopulated"):
    added: int
    lowered: int


class ForgetReply(msgspec.Struct, frozen=True, tag="forgotten"):
    count: int


class RunningReply(msgspec.Struct, frozen=True, tag="running"):
    now_us: int
    names: tuple[bytes, ...]
    deadlines_us: tuple[int, ...]
    runs: tuple[int, ...]
    owners: tuple[int, ...]


class OverlapReply(msgspec.Struct, frozen=True, tag="sampled"):
    """A random sample of `waiting`, and how many of it are also in `working`."""

    count: int
    overlaps: int


LATENCY = metrics.histogram(
    "rota_agents_scripts_latency_seconds", "Duration of successful script calls.", labels=("script",)
)
ERRORS = metrics.counter("rota_agents_scripts_errors", "Failed script calls.", labels=("script", "reason"))
READY = script(__package__, "ready", replies=ReadyReply)
ACQUIRE = script(__package__, "acquire", replies=AcquireReply)
FINISH = script(__package__, "finish", replies=FinishReply)
REPOPULATE = script(__package__, "repopulate", replies=RepopulateReply)
FORGET = script(__package__, "forget", replies=ForgetReply)
RUNNING = script(__package__, "running", replies=RunningReply)
OVERLAP = script(__package__, "overlap", replies=OverlapReply)
SCRIPTS: Final = (READY, ACQUIRE, FINISH, REPOPULATE, FORGET, RUNNING, OVERLAP)


class DueAgent(msgspec.Struct, frozen=True):
    """An agent that is due, and the score it was read with."""

    name: str
    due_us: int


class DueAgentPage(msgspec.Struct, frozen=True):
    """The reply of `ready`. `count` is the number of due agents; `next_ms` is 0 if no agent waits for later."""

    now_ms: int
    candidates: list[DueAgent]
    count: int
    next_ms: int


class WorkingEntry(msgspec.Struct, frozen=True):
    """A running agent, as Redis has it; run and owner are 0 without a stamp."""

    name: str
    deadline_ms: int
    run: int
    owner: int


class AgentClaim(msgspec.Struct, frozen=True):
    """A due agent to acquire, with our run number."""

    candidate: DueAgent
    run: int
    timeout_ms: int


class FinishedRun(msgspec.Struct, frozen=True):
    """A run that has ended in PostgreSQL. `due_ms` None: its agent is not due again."""

    name: str
    run: int
    due_ms: int | None
    add: bool = False
    """Whether to add the agent to `waiting` even if it is in neither set."""


class AgentIndex:
    """The sets of one shard group."""

    def __init__(self, client: Redis, keys: AgentRedisKeys) -> None:
        self.client = client
        self.keys = keys

    async def ready(self, limit: int, offset: int = 0, since_us: int = 0) -> DueAgentPage:
        with self._measured(READY):
            found = await READY(
                self.client, waiting=self.keys.waiting, since=since_us, offset=offset, limit=min(limit, BATCH_MAX)
            )
        pairs = zip(found.names, found.dues_us, strict=True)
        candidates = [DueAgent(decode_name(name), due_us) for name, due_us in pairs]
        # Rounded down: a scheduler that wakes at this time is never late, and polls again if it was early.
        return DueAgentPage(found.now_us // 1000, candidates, found.count, found.next_us // 1000)

    async def acquire(self, owner: int, claims: Sequence[AgentClaim]) -> tuple[int, list[AgentClaim]]:
        """The server's time in ms, and the claims that succeeded."""
        assert len(claims) <= BATCH_MAX, "batch too long"
        requests = [(each.candidate.name, each.candidate.due_us, each.run, each.timeout_ms) for each in claims]
        with self._measured(ACQUIRE):
            found = await ACQUIRE(self.client, **self._set_keys(), runs=self.keys.runs, owner=owner, asked=requests)
        failpoints.after_send("agents.acquire")
        return found.now_ms, [claims[place - 1] for place in found.places]

    async def finish(self, runs: Iterable[FinishedRun]) -> FinishReply:
        moved = added = stale = 0
        for part in batched(runs):
            rows = [(each.name, each.run, (each.due_ms or 0) * 1000, each.add) for each in part]
            with self._measured(FINISH):
                found = await FINISH(self.client, **self._set_keys(), runs=self.keys.runs, over=rows)
            failpoints.after_send("agents.finish")
            moved, added, stale = moved + found.moved, added + found.added, stale + found.stale
        return FinishReply(moved, added, stale)

    async def repopulate(self, idle: Iterable[tuple[str, int]]) -> RepopulateReply:
        """Add agents without a run to `waiting`, with their due times (ms)."""
        added = lowered = 0
        for part in batched(idle):
            rows = [(name, due_ms * 1000) for name, due_ms in part]
            with self._measured(REPOPULATE):
                found = await REPOPULATE(self.client, **self._set_keys(), idle=rows)
            added, lowered = added + found.added, lowered + found.lowered
        return RepopulateReply(added, lowered)

    async def forget(self, names: Iterable[str], *, everywhere: bool = False) -> int:
        """Remove agents from `waiting`, or from both sets even if they are running."""
        arguments = {**self._set_keys(), "runs": self.keys.runs, "everywhere": everywhere}
        batches = batched(name.encode(errors="surrogateescape") for name in names)
        with self._measured(FORGET):
            return sum([(await FORGET(self.client, **arguments, name=batch)).count for batch in batches])

    async def running(self, offset: int = 0, limit: int = BATCH_MAX) -> tuple[int, list[WorkingEntry]]:
        """The server's time in ms, and the running agents by deadline."""
        keys = self.keys
        with self._measured(RUNNING):
            found = await RUNNING(self.client, working=keys.working, runs=keys.runs, offset=offset, limit=limit)
        columns = zip(found.names, found.deadlines_us, found.runs, found.owners, strict=True)
        entries = [
            WorkingEntry(decode_name(name), deadline // 1000, run, owner) for name, deadline, run, owner in columns
        ]
        return found.now_us // 1000, entries

    async def sample(self, limit: int) -> OverlapReply:
        with self._measured(OVERLAP):
            return await OVERLAP(self.client, **self._set_keys(), limit=limit)

    @contextmanager
    def _measured(self, called: Script[Any]) -> Iterator[None]:
        """Measure calls; name the keys in an error about a wrong type."""
        began_at = time.perf_counter()
        try:
            yield
        except Exception as error:
            ERRORS.labels(called.name, _reason(error)).inc()
            if not isinstance(error, ScriptFailed) or error.facts.get("word") != "WRONGTYPE":
                raise
            keys = self.keys
            raise ScriptFailed(
                f"One of the Redis keys {keys.waiting}, {keys.working} and {keys.runs} has a wrong type:"
                " remove it, or choose other names with redis.scheduler.keys.",
                **error.facts,
            ) from error
        LATENCY.labels(called.name).observe(time.perf_counter() - began_at)

    def _set_keys(self) -> dict[str, str]:
        return {"waiting": self.keys.waiting, "working": self.keys.working}


def _reason(error: Exception) -> str:
    return error.code if isinstance(error, RotaError) else type(error).__name__


def decode_name(name: bytes) -> str:
    """A member as text. Foreign writers may add anything to our sets; such members can be removed."""
    return name.decode(errors="surrogateescape")


def batched(items: Iterable[T], most: int = BATCH_MAX) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, most)):
        yield part
