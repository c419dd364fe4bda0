"""Agents that submit a job. The submission is stored with the agent, so any server runs them without the app's code.

One due time, one job: the slot is the idempotency key, and a lost or stopped run is repeated for the same slot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentRepository
from rota.agents.running import AgentBody, AgentRun
from rota.engine.submission.submitter import Submitter
from rota.model.agents import AgentSpec
from rota.model.jobs.submission import Submission

AGENT_LABEL = "agent"


def submitting_body(submitter: Submitter, spec: AgentSpec) -> AgentBody:
    """The body of an agent that submits a job."""
    assert spec.job is not None, "a job agent has a submission"
    job = spec.job

    async def body(run: AgentRun) -> None:
        await submitter.submit([submission_of_run(job, run)], own=frozenset({AGENT_LABEL}))

    return body


def submission_of_run(job: Submission, run: AgentRun) -> Submission:
    """The submission of one run. It has no principal: nothing proves whom the code that declared the agent named."""
    slot_ms = run.acquired_ms if run.slot_ms is None else run.slot_ms
    key = job.idempotency_key or f"agent:{run.name}"
    return msgspec.structs.replace(
        job, principal="", idempotency_key=f"{key}:{slot_ms}", labels={**job.labels, AGENT_LABEL: run.name}
    )


def job_agents_loader(
    repository: AgentRepository, submitter: Submitter
) -> Callable[[], Awaitable[Iterable[DeclaredAgent]]]:
    """Loads the agents that a server declares: all agents in PostgreSQL that submit a job."""

    async def declared() -> list[DeclaredAgent]:
        return [DeclaredAgent(spec, submitting_body(submitter, spec)) for spec in await repository.job_agents()]

    return declared
