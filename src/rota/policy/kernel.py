"""The policy engine ("safety kernel"): decides about jobs by the policy in force.

It is called in the same process or over gRPC (`rota.policy.grpc.service`). One policy decides a whole batch, the one in
force when the batch arrived, and every decision names it; a reload meanwhile does not affect the batch.

Only velocity limits need Redis. While Redis is unavailable, jobs that would be counted are throttled, and all others
get their decision.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol, runtime_checkable

import msgspec
import structlog

from rota.infra.postgres import Database
from rota.infra.service import Service
from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.policy.decision import (
    DecisionOverride,
    Kernel,
    PolicyDecision,
    PolicyEffect,
    PolicyRequest,
    PolicyRequestGroup,
)
from rota.policy.evaluate import CompiledPolicy, PolicyEvaluation, RuleResult, VelocityLimit
from rota.policy.file_watch import PolicyWatch
from rota.policy.rate_limits import VelocityCheck
from rota.policy.snapshots import PolicySnapshot, PolicySnapshots

log = structlog.get_logger(__name__)
CHECKS = metrics.counter("rota_policy_checks", "Jobs that a policy decided about here.", labels=("says",))
UNCOUNTED_REASON: Final = "velocity limits cannot be counted while Redis is unavailable"


class PolicyExplanation(msgspec.Struct, frozen=True):
    """The decision for a job, and the status of every rule."""

    word: PolicyDecision
    findings: list[RuleResult]


@runtime_checkable
class PolicyKernel(Kernel, Protocol):
    """A local or remote kernel with the calls for operators. Raises Unavailable if it does not answer."""

    @property
    def fail_mode(self) -> str | None:
        """The fail mode of the policy file, as far as known; None: not set."""
        ...

    async def explain(self, asked: PolicyRequest, snapshot: str = "") -> PolicyExplanation:
        """Explain by the policy in force or one of the last ten. Counts against no limit."""
        ...

    async def simulate(self, text: str, asked: Sequence[PolicyRequest]) -> list[PolicyDecision]:
        """The decisions of another policy; InvalidInput if it is invalid."""
        ...

    async def list_snapshots(self) -> list[PolicySnapshot]:
        """The last ten policies, the current one first."""
        ...

    async def reload(self) -> bool:
        """Reload the file now; whether the policy changed. InvalidInput if the file is invalid."""
        ...

    def services(self, database: Database | None = None) -> list[Service]:
        """The services to supervise; with a database also the listener for reload requests."""
        ...

    async def close(self) -> None: ...


class LimitCounter(Protocol):
    async def find_exceeded(self, checks: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]: ...


class UnavailableCounter:
    """The counter if no Redis is configured."""

    async def find_exceeded(self, checks: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]:
        raise Unavailable(f"No Redis is configured to count {len(checks)} velocity limits: set redis.url.")


class LocalKernel:
    """A `PolicyKernel` in this process."""

    def __init__(
        self, snapshots: PolicySnapshots, counter: LimitCounter | None = None, watch: PolicyWatch | None = None
    ) -> None:
        self.snapshots = snapshots
        self._counter = counter or UnavailableCounter()
        self._watch = watch

    @classmethod
    def from_watch(cls, watch: PolicyWatch, counter: LimitCounter | None = None) -> LocalKernel:
        """A kernel that follows a policy file."""
        return cls(watch.snapshots, counter, watch)

    @property
    def fail_mode(self) -> str | None:
        return self.snapshots.current.written.fail_mode

    async def check(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        """Does no I/O unless a velocity limit must be counted."""
        policy = self.snapshots.current
        evaluations = [policy.evaluate(question.asked) for question in questions]
        decisions = [evaluation.word for evaluation in evaluations]
        limited_indexes = [index for index, evaluation in enumerate(evaluations) if evaluation.limits]
        if limited_indexes:
            for index, decision in zip(
                limited_indexes, await self._apply_limits(policy, questions, evaluations, limited_indexes), strict=True
            ):
                decisions[index] = decision
        _count_checks(questions, decisions)
        return decisions

    async def explain(self, asked: PolicyRequest, snapshot: str = "") -> PolicyExplanation:
        policy = self.snapshots.get(snapshot) if snapshot else self.snapshots.current
        return PolicyExplanation(policy.evaluate(asked).word, policy.explain(asked))

    async def simulate(self, text: str, asked: Sequence[PolicyRequest]) -> list[PolicyDecision]:
        policy = await asyncio.to_thread(CompiledPolicy.of, text)
        return [policy.evaluate(each).word for each in asked]

    async def list_snapshots(self) -> list[PolicySnapshot]:
        return self.snapshots.list_snapshots()

    async def reload(self) -> bool:
        return await self._watch.reload() if self._watch else False

    def services(self, database: Database | None = None) -> list[Service]:
        if (watch := self._watch) is None:
            return []
        services = [Service("policy", watch.run)]
        return services if database is None else [*services, Service("policy_nudges", partial(watch.listen, database))]

    async def close(self) -> None:
        return None

    async def _apply_limits(
        self,
        policy: CompiledPolicy,
        questions: Sequence[PolicyRequestGroup],
        evaluations: list[PolicyEvaluation],
        limited_indexes: list[int],
    ) -> list[PolicyDecision]:
        assert all(questions[index].jobs for index in limited_indexes), "velocity limits need job ids"
        checks = [VelocityCheck(evaluations[index].limits, questions[index].jobs) for index in limited_indexes]
        try:
            exceeded = await self._counter.find_exceeded(checks)
        except Unavailable as error:
            log.warning("velocity_count_failed", questions=len(limited_indexes), reason=error.sentence)
            return [
                PolicyDecision(says=PolicyEffect.THROTTLE, reason=UNCOUNTED_REASON, snapshot=policy.snapshot)
            ] * len(limited_indexes)
        return [
            _split_by_limit(evaluations[index].word, questions[index].jobs, exceeded_by_job)
            for index, exceeded_by_job in zip(limited_indexes, exceeded, strict=True)
        ]


def _split_by_limit(
    decision: PolicyDecision, jobs: Sequence[JobId], exceeded: Sequence[VelocityLimit | None]
) -> PolicyDecision:
    """One decision if all jobs share it; else that of the first exceeded limit, with overrides for the rest."""
    groups: dict[str, list[JobId]] = defaultdict(list)
    decisions: dict[str, PolicyDecision] = {}
    for job, limit in zip(jobs, exceeded, strict=True):
        name = limit.rule if limit else ""
        groups[name].append(job)
        decisions[name] = limit.over if limit else decision
    # A client that ignores the overrides must err on the side of not running jobs.
    strictest = next((name for name in groups if name), "")
    apart = tuple(
        DecisionOverride(frozenset(group), decisions[name]) for name, group in groups.items() if name != strictest
    )
    return (
        msgspec.structs.replace(decisions.get(strictest, decision), apart=apart)
        if apart
        else decisions.get(strictest, decision)
    )


def _count_checks(questions: Sequence[PolicyRequestGroup], decisions: Sequence[PolicyDecision]) -> None:
    jobs: dict[PolicyEffect, int] = defaultdict(int)
    for question, decision in zip(questions, decisions, strict=True):
        jobs[decision.says] += len(question.jobs) or 1
        for each in decision.apart:
            jobs[decision.says] -= len(each.jobs)
            jobs[each.word.says] += len(each.jobs)
    for says, count in jobs.items():
        CHECKS.labels(says.value).inc(count)
