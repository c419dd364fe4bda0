"""The safety kernel: what the policy in force says of jobs.

It is asked in the same process, or over gRPC (`rota.policy.service`); both are this. A batch is decided by one policy,
that which was in force when it came, and every word names it: reading a policy anew in between changes nothing of it.

What is not counted needs nobody else. Velocity limits need Redis; while that does not answer, those that would have
been counted are throttled, and all others get their word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import structlog

from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.policy import Apart, Asked, Question, Says, Word
from rota.policy.evaluate import Finding, Limit, Policy, Ruling
from rota.policy.snapshots import Snapshots
from rota.policy.velocity import Wanted

log = structlog.get_logger(__name__)
CHECKS = metrics.counter("rota_policy_checks", "Jobs that a policy was asked about here.", labels=("says",))
UNCOUNTED: Final = "velocity limits cannot be counted while Redis is away"


class Counter(Protocol):
    async def over(self, wanted: Sequence[Wanted]) -> list[list[Limit | None]]: ...


class Nowhere:
    """Where no Redis is named."""

    async def over(self, wanted: Sequence[Wanted]) -> list[list[Limit | None]]:
        raise Unavailable(f"No Redis is named to count {len(wanted)} velocity limits in: set redis.url.")


class LocalKernel:
    """`rota.model.policy.Kernel` in this process."""

    def __init__(self, snapshots: Snapshots, counter: Counter | None = None) -> None:
        self.snapshots = snapshots
        self._counter = counter or Nowhere()

    @property
    def fail_mode(self) -> str | None:
        """As the policy file says; None when it does not."""
        return self.snapshots.current.written.fail_mode

    async def check(self, questions: Sequence[Question]) -> list[Word]:
        """Never waits unless a velocity limit is to be counted."""
        return await self.decide(self.snapshots.current, questions)

    async def decide(self, policy: Policy, questions: Sequence[Question]) -> list[Word]:
        rulings = [policy.rule_on(question.asked) for question in questions]
        words = [ruling.word for ruling in rulings]
        limited = [at for at, ruling in enumerate(rulings) if ruling.limits]
        if limited:
            for at, word in zip(limited, await self._counted(policy, questions, rulings, limited), strict=True):
                words[at] = word
        _count(questions, words)
        return words

    def evaluate(self, asked: Asked, snapshot: str = "") -> tuple[Word, list[Finding]]:
        """What would be said, and of every rule what became of it; counts nothing."""
        policy = self.snapshots.get(snapshot) if snapshot else self.snapshots.current
        return policy.rule_on(asked).word, policy.explain(asked)

    async def _counted(
        self, policy: Policy, questions: Sequence[Question], rulings: list[Ruling], limited: list[int]
    ) -> list[Word]:
        assert all(questions[at].jobs for at in limited), "who counts jobs must know which"
        wanted = [Wanted(rulings[at].limits, questions[at].jobs) for at in limited]
        try:
            over = await self._counter.over(wanted)
        except Unavailable as away:
            log.warning("velocity_not_counted", questions=len(limited), reason=away.sentence)
            return [Word(says=Says.THROTTLE, reason=UNCOUNTED, snapshot=policy.snapshot)] * len(limited)
        return [_split(rulings[at].word, questions[at].jobs, found) for at, found in zip(limited, over, strict=True)]


def _split(word: Word, jobs: Sequence[JobId], over: Sequence[Limit | None]) -> Word:
    """One word where all jobs fare alike; else that of the first limit without a place, and the others apart."""
    groups: dict[str, list[JobId]] = defaultdict(list)
    words: dict[str, Word] = {}
    for job, limit in zip(jobs, over, strict=True):
        name = limit.rule if limit else ""
        groups[name].append(job)
        words[name] = limit.over if limit else word
    # Whoever overlooks that jobs fare differently must err towards not letting them run.
    strict = next((name for name in groups if name), "")
    apart = tuple(Apart(frozenset(group), words[name]) for name, group in groups.items() if name != strict)
    return msgspec.structs.replace(words.get(strict, word), apart=apart) if apart else words.get(strict, word)


def _count(questions: Sequence[Question], words: Sequence[Word]) -> None:
    for question, word in zip(questions, words, strict=True):
        CHECKS.labels(word.says.value).inc(len(question.jobs) or 1)
