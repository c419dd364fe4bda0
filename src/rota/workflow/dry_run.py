"""Dry run of a workflow: asks the policy about the jobs of its steps. Starts, writes and counts nothing.

The policy decides again when a step begins: by then its rules, and the results that the step reads, may be others. Jobs
of child runs and compensations are not asked about.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rota.engine.admission.decision import AdmissionDecision, PolicyPreview
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.workflows.compiler import CompiledWorkflow
from rota.model.workflows.dry_run import StepGate, StepJob, WorkflowDryRun, dry_run_workflow, step_jobs
from rota.policy.request_builder import PolicyInput, input_of_submission

MAX_CONCURRENT_PREVIEWS: Final = 16


async def dry_run(
    flow: CompiledWorkflow, values: dict[str, Any], preview: PolicyPreview, *, actor: str, show: str
) -> WorkflowDryRun:
    """Raises InvalidInput if a run could not be started with this input."""
    jobs = step_jobs(flow, values, actor, show)
    decisions = await _decide([job.submission for job in jobs.values()], preview)
    gates = {place: _gate(job, decision) for (place, job), decision in zip(jobs.items(), decisions, strict=True)}
    return dry_run_workflow(flow, values, gates)


async def _decide(jobs: list[ValidatedSubmission], preview: PolicyPreview) -> list[AdmissionDecision]:
    """One decision per job, in order; jobs that look the same to the policy share one question."""
    asked: dict[PolicyInput, asyncio.Task[AdmissionDecision]] = {}
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_PREVIEWS)

    async def decide(job: ValidatedSubmission) -> AdmissionDecision:
        async with semaphore:
            return await preview(job)

    inputs = [input_of_submission(job) for job in jobs]
    async with asyncio.TaskGroup() as tasks:
        for job, seen in zip(jobs, inputs, strict=True):
            if seen not in asked:
                asked[seen] = tasks.create_task(decide(job))
    return [asked[seen].result() for seen in inputs]


def _gate(job: StepJob, decision: AdmissionDecision) -> StepGate:
    return StepGate(decision.verdict.value, decision.reason or None, decision.because or None, complete=job.complete)
