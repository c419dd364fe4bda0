"""Policy queries on stored jobs: why a job was decided as it was, and what another policy would change.

Read only; nothing here counts towards a velocity limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import msgspec

from rota.api.jobs import PolicyDecisionView
from rota.api.policy import SIMULATED_HOURS_DEFAULT, SIMULATED_JOBS_DEFAULT
from rota.engine.admission.controller import FAIL_OPEN_DECISION, UNAVAILABLE
from rota.engine.admission.decision import (
    ALLOWED,
    DEFERRED,
    AdmissionDecision,
    PolicyPreview,
    admission_decision_from,
)
from rota.engine.admission.policy_call import KERNEL_TIMEOUT_S, policy_input_from_row
from rota.engine.queries.jobs import policy_decision_view
from rota.infra.postgres import Database, Record, query
from rota.model.errors import InvalidInput, NotFound, Unavailable
from rota.model.ids import JobId
from rota.model.jobs.submission import Submission
from rota.model.jobs.validation import ValidatedSubmission, validate_submission
from rota.model.policy.decision import ApprovalTerms, Kernel, PolicyDecision, PolicyEffect, PolicyRequest
from rota.model.settings import Settings
from rota.policy import factory
from rota.policy.evaluate import CompiledPolicy, RuleResult, RuleStatus
from rota.policy.kernel import LocalKernel, PolicyExplanation, PolicyKernel
from rota.policy.request_builder import input_of_submission, request_of_input
from rota.policy.snapshots import PolicySnapshots

POLICY_INPUTS = query(__package__, "policy_seen")
JOBS_SINCE = query(__package__, "policy_since")

HOURS_MAX: Final = 24.0 * 31
JOBS_MAX: Final = 100_000
PAGE_SIZE: Final = 500
NO_POLICY: Final = "no policy"

_DECODE_DECISION = msgspec.msgpack.Decoder(PolicyDecision).decode


class JobDecisionRecord(msgspec.Struct, frozen=True):
    """A job as the policy sees it, and its decision; None: the policy was not queried."""

    job: JobId
    asked: PolicyRequest
    word: PolicyDecision | None


class JobPolicyExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's current decision on a job, the result of every rule, and the decision made at admission."""

    job: JobId | None
    asked: PolicyRequest
    word: PolicyDecisionView
    approval: ApprovalTerms | None = None
    delay_s: float = 0.0
    findings: list[RuleResult]
    was: PolicyDecisionView | None = None


class PolicySimulationChange(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs on which another policy decides differently."""

    show: str
    topic: str
    was: str
    would: PolicyEffect
    rule: str
    jobs: int
    example: JobId


class PolicySimulation(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    hours: float
    jobs: int
    changed: int
    is_all: bool
    """False: more jobs were submitted in that time than were evaluated."""
    says: dict[str, int]
    """Number of jobs by the other policy's effect."""
    changes: list[PolicySimulationChange]


class PolicyQueries:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def decision_records(self, jobs: Sequence[JobId]) -> list[JobDecisionRecord]:
        """Those jobs that exist, newest first."""
        return [_decision_record(row) for row in await self._database.rows(POLICY_INPUTS, list(jobs))]

    async def explain(self, kernel: PolicyKernel, job: JobId, snapshot: str = "") -> JobPolicyExplanation:
        found = await self.decision_records([job])
        if not found:
            raise NotFound(f"There is no job {job}, or it is not kept any more.")
        return job_policy_explanation(
            found[0].asked, await kernel.explain(found[0].asked, snapshot), job, found[0].word
        )

    async def simulate(
        self,
        text: str,
        hours: float = SIMULATED_HOURS_DEFAULT,
        most: int = SIMULATED_JOBS_DEFAULT,
        source: str = "policy",
    ) -> PolicySimulation:
        """Raises InvalidInput if the text is not a valid policy."""
        if not 0 < hours <= HOURS_MAX or not 1 <= most <= JOBS_MAX:
            raise InvalidInput(
                f"{hours:g} hours or {most} jobs is out of range: use at most {HOURS_MAX:g} hours and {JOBS_MAX} jobs."
            )
        policy = await asyncio.to_thread(CompiledPolicy.of, text, source)
        tally = _SimulationTally(policy)
        async for page in self._records_since(hours, most):
            tally.add(page)
        return PolicySimulation(
            snapshot=policy.snapshot,
            hours=hours,
            jobs=tally.jobs,
            changed=sum(tally.changed.values()),
            is_all=tally.jobs < most,
            says={effect.value: count for effect, count in tally.effects.most_common()},
            changes=tally.changes(),
        )

    async def _records_since(self, hours: float, most: int) -> AsyncIterator[list[JobDecisionRecord]]:
        before: JobId | None = None
        while most > 0:
            rows = await self._database.rows(JOBS_SINCE, before, min(PAGE_SIZE, most), hours * 3600)
            if not rows:
                return
            yield await self.decision_records([row["id"] for row in rows])
            before, most = rows[-1]["id"], most - len(rows)


class _SimulationTally:
    def __init__(self, policy: CompiledPolicy) -> None:
        self._policy = policy
        self._examples: dict[tuple[str, str, str, PolicyEffect, str], JobId] = {}
        self.jobs = 0
        self.effects: Counter[PolicyEffect] = Counter()
        self.changed: Counter[tuple[str, str, str, PolicyEffect, str]] = Counter()

    def add(self, page: Sequence[JobDecisionRecord]) -> None:
        for each in page:
            decision = self._policy.evaluate(each.asked).word
            self.jobs += 1
            self.effects[decision.says] += 1
            was = each.word.says if each.word else PolicyEffect.ALLOW
            if was is not decision.says:
                before = was.value if each.word else NO_POLICY
                change = (each.asked.show, each.asked.topic, before, decision.says, decision.rule)
                self.changed[change] += 1
                self._examples.setdefault(change, each.job)

    def changes(self) -> list[PolicySimulationChange]:
        return [
            PolicySimulationChange(
                show=change[0],
                topic=change[1],
                was=change[2],
                would=change[3],
                rule=change[4],
                jobs=jobs,
                example=self._examples[change],
            )
            for change, jobs in self.changed.most_common()
        ]


def job_policy_explanation(
    asked: PolicyRequest, explanation: PolicyExplanation, job: JobId | None = None, was: PolicyDecision | None = None
) -> JobPolicyExplanation:
    decision = explanation.word
    return JobPolicyExplanation(
        job=job,
        asked=asked,
        word=policy_decision_view(decision),
        approval=decision.approval if decision.says is PolicyEffect.REQUIRE_APPROVAL else None,
        delay_s=decision.delay_s,
        findings=explanation.findings,
        was=policy_decision_view(was) if was is not None else None,
    )


def policy_preview(settings: Settings, kernel: Kernel | None, *, asks: bool) -> PolicyPreview:
    """`preview_decision` with the settings of this process.

    Without a policy that can be previewed, jobs are allowed, or wait for the decision of the servers if these have one
    (`asks`).
    """
    if not isinstance(kernel, PolicyKernel):
        return partial(_preview_without_kernel, DEFERRED if asks else ALLOWED)
    fail_open = factory.effective_fail_mode(settings, kernel) == "open"
    throttle_s = settings.scheduler.safety_throttle_delay
    return partial(preview_decision, kernel, throttle_s=throttle_s, fail_open=fail_open)


async def preview_decision(
    kernel: PolicyKernel, plan: ValidatedSubmission, *, throttle_s: float, fail_open: bool
) -> AdmissionDecision:
    """What admission would decide about this submission now; velocity limits are named, not counted."""
    request = request_of_input(input_of_submission(plan))
    try:
        async with asyncio.timeout(KERNEL_TIMEOUT_S):
            explanation = await kernel.explain(request)
    except TimeoutError:
        return _without_policy(f"The policy did not answer within {KERNEL_TIMEOUT_S:g} s.", fail_open=fail_open)
    except Unavailable as error:
        return _without_policy(error.sentence, fail_open=fail_open)
    decision = admission_decision_from(explanation.word, throttle_s)
    limits = ", ".join(each.rule for each in explanation.findings if each.fate is RuleStatus.COUNTS)
    if not limits:
        return decision
    parts = [decision.because, f"unless the velocity limit {limits} is reached"]
    return msgspec.structs.replace(decision, because=", ".join(part for part in parts if part))


async def _preview_without_kernel(decision: AdmissionDecision, _plan: ValidatedSubmission) -> AdmissionDecision:
    return decision


def _without_policy(why: str, *, fail_open: bool) -> AdmissionDecision:
    return FAIL_OPEN_DECISION if fail_open else msgspec.structs.replace(UNAVAILABLE, because=why)


def submission_policy_request(submission: Submission) -> PolicyRequest:
    """The request that rules would see for it."""
    return request_of_input(input_of_submission(validate_submission(submission, may_be_critical=True)))


def kernel_from_text(text: str, source: str = "policy") -> LocalKernel:
    """A policy engine for this text, without a file."""
    return LocalKernel(PolicySnapshots(CompiledPolicy.of(text, source)))


def _decision_record(row: Record) -> JobDecisionRecord:
    encoded = row["told"]
    return JobDecisionRecord(
        JobId(row["id"]),
        request_of_input(policy_input_from_row(row)),
        _DECODE_DECISION(encoded) if encoded is not None else None,
    )
