"""What becomes of jobs that a gate has decided about: queued, held, or ended.

Every step asks the job's row for the state it starts from, under its lock, so a decision that comes twice or too late
changes nothing: of two who admit, one queues the frames. All of it happens in the caller's transaction; if we die
before its commit the jobs are PENDING as before, and whoever replays them asks the gate again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from rota.engine.gate import Decision, Verdict, wake
from rota.infra import faults, outbox
from rota.infra.postgres import Transaction, query
from rota.model import lifecycle
from rota.model.ids import JobId
from rota.model.lifecycle import JobState
from rota.policy.words import keep

ADMIT = query(__package__, "submit_admit")
HOLD = query(__package__, "submit_hold")
WAIT = query(__package__, "gate_wait")
LOCK = query(__package__, "gate_lock")


class Finish(Protocol):
    """The one way in which jobs end."""

    async def __call__(self, on: Transaction, jobs: Mapping[JobId, Decision], state: JobState) -> object:
        """End these jobs, each for its reason; those that have ended before are left as they are."""
        ...


class Settled(msgspec.Struct, frozen=True):
    """What became of PENDING jobs by this call; those that had moved on are in neither."""

    admitted: list[JobId]
    held: list[JobId]
    """Until somebody approves them."""


async def settle(
    on: Transaction, decisions: Mapping[JobId, Decision], finish: Finish, *, until: datetime | None = None
) -> Settled:
    """Do what was decided about jobs that are PENDING; after `until` nothing is queued by it."""
    by_verdict: dict[Verdict, dict[JobId, Decision]] = defaultdict(dict)
    for job, decision in decisions.items():
        by_verdict[decision.verdict][job] = decision
    if len(by_verdict) > 1:
        # Each verdict locks its own: two who heard different words about the same jobs would wait in a circle.
        await on.rows(LOCK, sorted(decisions))
    await keep(on, [decision.said for decision in decisions.values() if decision.said is not None])
    admitted = await admit(on, by_verdict[Verdict.ALLOW], until=until)
    held = await wait(on, by_verdict[Verdict.REQUIRE_APPROVAL])
    await wait(on, by_verdict[Verdict.WAIT])
    if by_verdict[Verdict.DENY]:
        await finish(on, by_verdict[Verdict.DENY], JobState.DENIED)
    return Settled(admitted, held)


async def admit(
    on: Transaction, jobs: Mapping[JobId, Decision] | Sequence[JobId], *, until: datetime | None = None
) -> list[JobId]:
    """PENDING to SCHEDULED, with their frames queued; returns those that this call admitted."""
    if not jobs:
        return []
    said = [each.said for each in jobs.values()] if isinstance(jobs, Mapping) else []
    digests = [each.digest if each is not None else None for each in said]
    faults.at("submit.before_admit")
    rows = await on.rows(ADMIT, list(jobs), digests or None, until)
    faults.reply("submit.admit")
    return [JobId(row["id"]) for row in rows]


async def wait(on: Transaction, jobs: Mapping[JobId, Decision]) -> list[JobId]:
    """Jobs that stay PENDING until they are asked about again, or wait for an approval; returns those that did."""
    if not jobs:
        return []
    decisions = list(jobs.values())
    rows = await on.rows(
        WAIT,
        list(jobs),
        [each.state.value for each in decisions],
        [each.reason for each in decisions],
        [each.said.digest if each.said is not None else None for each in decisions],
        [each.wait_s for each in decisions],
    )
    return [JobId(row["id"]) for row in rows]


async def approve(on: Transaction, jobs: Sequence[JobId], reason: str = "approved") -> list[JobId]:
    """APPROVAL_REQUIRED to PENDING; the gatekeeper is told, once that is committed."""
    held = await hold(on, jobs, JobState.APPROVAL_REQUIRED, JobState.PENDING, reason)
    if held:
        await outbox.add(on, [wake(held)])
    return held


async def hold(
    on: Transaction, jobs: Sequence[JobId], state: JobState, then: JobState, reason: str | None
) -> list[JobId]:
    """From one state that is not queued to another, or to the same one for another reason; returns those it was."""
    if then is not state:
        lifecycle.check(state, then)
    assert not then.terminal, "jobs end through the one finish path"
    assert then is not JobState.SCHEDULED, "jobs are queued by admit"
    if not jobs:
        return []
    rows = await on.rows(HOLD, list(jobs), state.value, then.value, reason)
    return [JobId(row["id"]) for row in rows]
