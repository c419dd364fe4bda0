"""The safety kernel: what the policy in force says of jobs.

It is asked in the same process, or over gRPC (`rota.policy.grpc.service`); both are this. A batch is decided by one policy,
that which was in force when it came, and every word names it: reading a policy anew in between changes nothing of it.

What is not counted needs nobody else. Velocity limits need Redis; while that does not answer, those that would have
been counted are throttled, and all others get their word.
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
CHECKS = metrics.counter("rota_policy_checks", "Jobs that a policy was asked about here.", labels=("says",))
UNCOUNTED_REASON: Final = "velocity limits cannot be counted while Redis is away"


class PolicyExplanation(msgspec.Struct, frozen=True):
    """What would be said of a job, and of every rule what became of it."""

    word: PolicyDecision
    findings: list[RuleResult]


@runtime_checkable
class PolicyKernel(Kernel, Protocol):
    """What operators ask besides, of a kernel here or elsewhere. Raises Unavailable when it does not answer."""

    @property
    def fail_mode(self) -> str | None:
        """What the policy file says of silence, as far as it is known here; None: nothing."""
        ...

    async def explain(self, asked: PolicyRequest, snapshot: str = "") -> PolicyExplanation:
        """By the policy in force, or by one of the last ten. Counts nothing."""
        ...

    async def simulate(self, text: str, asked: Sequence[PolicyRequest]) -> list[PolicyDecision]:
        """What another policy would say; InvalidInput when it is none."""
        ...

    async def list_snapshots(self) -> list[PolicySnapshot]:
        """The last ten policies, the one in force first."""
        ...

    async def reload(self) -> bool:
        """Look at the file now; whether it is another policy. InvalidInput when it is wrong."""
        ...

    def services(self, database: Database | None = None) -> list[Service]:
        """What is to be supervised where it is used; with a database it hears of who wants the file looked at."""
        ...

    async def close(self) -> None: ...


class LimitCounter(Protocol):
    async def find_exceeded(self, wanted: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]: ...


class UnavailableCounter:
    """Where no Redis is named."""

    async def find_exceeded(self, wanted: Sequence[VelocityCheck]) -> list[list[VelocityLimit | None]]:
        raise Unavailable(f"No Redis is named to count {len(wanted)} velocity limits in: set redis.url.")


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
        """By a file, as it is from time to time."""
        return cls(watch.snapshots, counter, watch)

    @property
    def fail_mode(self) -> str | None:
        return self.snapshots.current.written.fail_mode

    async def check(self, questions: Sequence[PolicyRequestGroup]) -> list[PolicyDecision]:
        """Never waits unless a velocity limit is to be counted."""
        policy = self.snapshots.current
        rulings = [policy.evaluate(question.asked) for question in questions]
        words = [ruling.word for ruling in rulings]
        limited = [at for at, ruling in enumerate(rulings) if ruling.limits]
        if limited:
            for at, word in zip(limited, await self._apply_limits(policy, questions, rulings, limited), strict=True):
                words[at] = word
        _count_checks(questions, words)
        return words

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
        looking = [Service("policy", watch.run)]
        return looking if database is None else [*looking, Service("policy_nudges", partial(watch.listen, database))]

    async def close(self) -> None:
        return None

    async def _apply_limits(
        self,
        policy: CompiledPolicy,
        questions: Sequence[PolicyRequestGroup],
        rulings: list[PolicyEvaluation],
        limited: list[int],
    ) -> list[PolicyDecision]:
        assert all(questions[at].jobs for at in limited), "who counts jobs must know which"
        wanted = [VelocityCheck(rulings[at].limits, questions[at].jobs) for at in limited]
        try:
            over = await self._counter.find_exceeded(wanted)
        except Unavailable as away:
            log.warning("velocity_not_counted", questions=len(limited), reason=away.sentence)
            return [
                PolicyDecision(says=PolicyEffect.THROTTLE, reason=UNCOUNTED_REASON, snapshot=policy.snapshot)
            ] * len(limited)
        return [
            _split_by_limit(rulings[at].word, questions[at].jobs, found)
            for at, found in zip(limited, over, strict=True)
        ]


def _split_by_limit(
    word: PolicyDecision, jobs: Sequence[JobId], over: Sequence[VelocityLimit | None]
) -> PolicyDecision:
    """One word where all jobs fare alike; else that of the first limit without a place, and the others apart."""
    groups: dict[str, list[JobId]] = defaultdict(list)
    words: dict[str, PolicyDecision] = {}
    for job, limit in zip(jobs, over, strict=True):
        name = limit.rule if limit else ""
        groups[name].append(job)
        words[name] = limit.over if limit else word
    # Whoever overlooks that jobs fare differently must err towards not letting them run.
    strict = next((name for name in groups if name), "")
    apart = tuple(DecisionOverride(frozenset(group), words[name]) for name, group in groups.items() if name != strict)
    return msgspec.structs.replace(words.get(strict, word), apart=apart) if apart else words.get(strict, word)


def _count_checks(questions: Sequence[PolicyRequestGroup], words: Sequence[PolicyDecision]) -> None:
    jobs: dict[PolicyEffect, int] = defaultdict(int)
    for question, word in zip(questions, words, strict=True):
        jobs[word.says] += len(question.jobs) or 1
        for each in word.apart:
            jobs[word.says] -= len(each.jobs)
            jobs[each.word.says] += len(each.jobs)
    for says, count in jobs.items():
        CHECKS.labels(says.value).inc(count)
