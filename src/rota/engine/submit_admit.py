"""What becomes of jobs that a gate has decided about: queued, held, or ended.

Every step asks the job's row for the state it starts from, under its lock, so a decision that comes twice or too late
changes nothing: of two who admit, one queues the frames. All of it happens in the caller's transaction; if we die
before its commit the jobs are PENDING as before, and whoever replays them asks the gate again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from rota.engine.gate import Decision, Verdict, wake
from rota.infra import faults, outbox
from rota.infra.postgres import Transaction, query
from rota.model import lifecycle
from rota.model.ids import JobId
from rota.model.lifecycle import JobState

ADMIT = query(__package__, "submit_admit")
HOLD = query(__package__, "submit_hold")


class Finish(Protocol):
    """The one way in which jobs end."""

    async def __call__(self, on: Transaction, jobs: Mapping[JobId, str], state: JobState) -> object:
        """End these jobs, each for its reason; those that have ended before are left as they are."""
        ...


async def settle(on: Transaction, decisions: Mapping[JobId, Decision], finish: Finish) -> list[JobId]:
    """Do what was decided about jobs that are PENDING; returns those that are SCHEDULED by this call."""
    by_verdict: dict[Verdict, dict[JobId, str]] = defaultdict(dict)
    for job, decision in decisions.items():
        by_verdict[decision.verdict][job] = decision.reason
    admitted = await admit(on, list(by_verdict[Verdict.ALLOW]))
    for verdict, then in ((Verdict.REQUIRE_APPROVAL, JobState.APPROVAL_REQUIRED), (Verdict.WAIT, JobState.PENDING)):
        for reason in sorted(set(by_verdict[verdict].values())):
            jobs = [job for job, why in by_verdict[verdict].items() if why == reason]
            await hold(on, jobs, JobState.PENDING, then, reason)
    if by_verdict[Verdict.DENY]:
        await finish(on, by_verdict[Verdict.DENY], JobState.DENIED)
    return admitted


async def admit(on: Transaction, jobs: Sequence[JobId]) -> list[JobId]:
    """PENDING to SCHEDULED, with their frames queued; returns those that this call admitted."""
    if not jobs:
        return []
    faults.at("submit.before_admit")
    rows = await on.rows(ADMIT, list(jobs))
    faults.reply("submit.admit")
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
