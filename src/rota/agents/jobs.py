"""Agents that submit a job. The submission is kept with the agent, so any server runs them, without the app's code.

One due time, one job: the slot is its idempotency key, and a run that was lost or stopped is repeated for the same one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from rota.agents.records import Records
from rota.agents.registry import Declared
from rota.agents.runs import AgentRun, Body
from rota.engine.submit import Submitter
from rota.model.agent import AgentSpec
from rota.model.job import Submission

LABEL = "agent"


def submitting(submitter: Submitter, spec: AgentSpec) -> Body:
    """The body of an agent that submits a job."""
    assert spec.job is not None, "an agent of this kind has a job"
    job = spec.job

    async def body(run: AgentRun) -> None:
        await submitter.submit([submission(job, run)], own=frozenset({LABEL}))

    return body


def submission(job: Submission, run: AgentRun) -> Submission:
    """What one run submits."""
    slot_ms = run.acquired_ms if run.slot_ms is None else run.slot_ms
    key = job.idempotency_key or f"agent:{run.name}"
    return msgspec.structs.replace(job, idempotency_key=f"{key}:{slot_ms}", labels={**job.labels, LABEL: run.name})


def of_servers(records: Records, submitter: Submitter) -> Callable[[], Awaitable[Iterable[Declared]]]:
    """What a server declares: every agent that submits a job, as PostgreSQL has them now."""

    async def declared() -> list[Declared]:
        return [Declared(spec, submitting(submitter, spec)) for spec in await records.jobs()]

    return declared
