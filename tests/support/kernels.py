"""Policy kernels for tests: one that decides by topic from a table, one that never answers, and kernel errors."""

import asyncio

from rota.model.errors import BreakerOpen, Unavailable
from rota.model.policy.decision import ApprovalTerms, Constraints, PolicyBudgets, PolicyDecision, PolicyEffect

SNAPSHOT = "cafe01"


def decision(says, rule="", **more):
    return PolicyDecision(says=PolicyEffect(says), rule=rule or str(says).lower(), snapshot=SNAPSHOT, **more)


TABLE = {
    "allow": decision(PolicyEffect.ALLOW),
    "tight": decision(
        PolicyEffect.ALLOW_WITH_CONSTRAINTS,
        constraints=Constraints(budgets=PolicyBudgets(max_runtime_ms=60_000, max_retries=1)),
    ),
    "deny": decision(PolicyEffect.DENY, "rule7", reason="no"),
    "throttle": decision(PolicyEffect.THROTTLE, reason="slowly"),
    "later": decision(PolicyEffect.THROTTLE, "later", reason="slowly", delay_s=60.0),
    "approval": decision(PolicyEffect.REQUIRE_APPROVAL, reason="money moves"),
    "two": decision(PolicyEffect.REQUIRE_APPROVAL, "two", approval=ApprovalTerms(quorum=2)),
    "soon": decision(PolicyEffect.REQUIRE_APPROVAL, "soon", approval=ApprovalTerms(expires_s=3600.0)),
    "odd": PolicyDecision(says="PERHAPS", snapshot=SNAPSHOT),
}


class Table:
    """Decides by topic, ALLOW by default; records its requests."""

    def __init__(self, **decisions):
        self.decisions = {**TABLE, **decisions}
        self.questions = []
        self.pause = None
        self.fails = None
        self.miscounts = 0

    @property
    def asked(self):
        """Requested topics, one list per call."""
        return [[each.asked.topic for each in call] for call in self.questions]

    @property
    def jobs(self):
        return [job for call in self.questions for each in call for job in each.jobs]

    async def check(self, questions):
        self.questions.append(questions)
        if self.pause is not None:
            await self.pause()
        if self.fails is not None:
            raise self.fails
        topics = [each.asked.topic for each in questions]
        if "crash" in topics:
            raise ZeroDivisionError
        if "away" in topics:
            raise Unavailable("The kernel does not answer.")
        found = [self.decisions.get(topic, TABLE["allow"]) for topic in topics]
        return found[: len(found) - self.miscounts]


class Hanging:
    """Never answers."""

    def __init__(self):
        self.was_asked = asyncio.Event()

    async def check(self, _questions):
        self.was_asked.set()
        await asyncio.Event().wait()


AWAY = Unavailable("The kernel does not answer.")
OPEN = BreakerOpen("safety kernel circuit open")
