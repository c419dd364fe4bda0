"""What operators ask of a policy about jobs that are stored: why one was decided so, and what another would change.

Reads only; no velocity limit counts what is asked here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from rota.engine.gate_asking import seen_in
from rota.engine.jobs import Spoken, spoken
from rota.infra.postgres import Database, Record, query
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import JobId
from rota.model.job import Submission
from rota.model.job_plan import plan
from rota.model.policy import ApprovalTerms, Asked, Says, Word
from rota.policy.asking import asked_of, seen_of
from rota.policy.evaluate import Finding, Policy
from rota.policy.kernel import Explained, LocalKernel, PolicyKernel
from rota.policy.snapshots import Snapshots

SEEN = query(__package__, "policy_seen")
SINCE = query(__package__, "policy_since")

HOURS: Final = 24.0
HOURS_MAX: Final = 24.0 * 31
JOBS: Final = 10_000
JOBS_MAX: Final = 100_000
PAGE: Final = 500
UNASKED: Final = "no policy"

_WORD = msgspec.msgpack.Decoder(Word).decode


class Stored(msgspec.Struct, frozen=True):
    """A job as the policy sees it, and what was said of it; None: nobody was asked."""

    job: JobId
    asked: Asked
    word: Word | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy says of a job now, of every rule what became of it, and what was said when it was decided."""

    job: JobId | None
    asked: Asked
    word: Spoken
    approval: ApprovalTerms | None = None
    delay_s: float = 0.0
    findings: list[Finding]
    was: Spoken | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of which another policy says something else."""

    show: str
    topic: str
    was: str
    would: Says
    rule: str
    jobs: int
    example: JobId


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    hours: float
    jobs: int
    changed: int
    is_all: bool
    """False: more jobs were submitted in that time than were looked at."""
    says: dict[str, int]
    """Of how many jobs the other policy says what."""
    changes: list[Changed]


class PolicyDesk:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def stored(self, jobs: Sequence[JobId]) -> list[Stored]:
        """Those that are kept, the newest first."""
        return [_stored(row) for row in await self._database.rows(SEEN, list(jobs))]

    async def explain(self, kernel: PolicyKernel, job: JobId, snapshot: str = "") -> Why:
        found = await self.stored([job])
        if not found:
            raise NotFound(f"There is no job {job}, or it is not kept any more.")
        return why(found[0].asked, await kernel.explain(found[0].asked, snapshot), job, found[0].word)

    async def simulate(self, text: str, hours: float = HOURS, most: int = JOBS, source: str = "policy") -> Simulated:
        """Raises InvalidInput for a text that is no policy."""
        if not 0 < hours <= HOURS_MAX or not 1 <= most <= JOBS_MAX:
            raise InvalidInput(f"Look back 0 to {HOURS_MAX:g} hours, at 1 to {JOBS_MAX} jobs.")
        policy = await asyncio.to_thread(Policy.of, text, source)
        tally = _Tally(policy)
        async for page in self._since(hours, most):
            tally.add(page)
        return Simulated(
            snapshot=policy.snapshot,
            hours=hours,
            jobs=tally.jobs,
            changed=sum(tally.changed.values()),
            is_all=tally.jobs < most,
            says={says.value: count for says, count in tally.says.most_common()},
            changes=tally.changes(),
        )

    async def _since(self, hours: float, most: int) -> AsyncIterator[list[Stored]]:
        before: JobId | None = None
        while most > 0:
            rows = await self._database.rows(SINCE, before, min(PAGE, most), hours * 3600)
            if not rows:
                return
            yield await self.stored([row["id"] for row in rows])
            before, most = rows[-1]["id"], most - len(rows)


class _Tally:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._examples: dict[tuple[str, str, str, Says, str], JobId] = {}
        self.jobs = 0
        self.says: Counter[Says] = Counter()
        self.changed: Counter[tuple[str, str, str, Says, str]] = Counter()

    def add(self, page: Sequence[Stored]) -> None:
        for each in page:
            word = self._policy.rule_on(each.asked).word
            self.jobs += 1
            self.says[word.says] += 1
            was = each.word.says if each.word else Says.ALLOW
            if was is not word.says:
                told = was.value if each.word else UNASKED
                change = (each.asked.show, each.asked.topic, told, word.says, word.rule)
                self.changed[change] += 1
                self._examples.setdefault(change, each.job)

    def changes(self) -> list[Changed]:
        return [
            Changed(
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


def why(asked: Asked, told: Explained, job: JobId | None = None, was: Word | None = None) -> Why:
    word = told.word
    return Why(
        job=job,
        asked=asked,
        word=spoken(word),
        approval=word.approval if word.says is Says.REQUIRE_APPROVAL else None,
        delay_s=word.delay_s,
        findings=told.findings,
        was=spoken(was) if was is not None else None,
    )


def asked_about(submission: Submission) -> Asked:
    """What rules would see of it."""
    return asked_of(seen_of(plan(submission, may_be_critical=True)))


def kernel_by(text: str, source: str = "policy") -> LocalKernel:
    """One that decides by this text and no file."""
    return LocalKernel(Snapshots(Policy.of(text, source)))


def _stored(row: Record) -> Stored:
    told = row["told"]
    return Stored(JobId(row["id"]), asked_of(seen_in(row)), _WORD(told) if told is not None else None)
