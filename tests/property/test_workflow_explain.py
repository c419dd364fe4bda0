"""Random runs on a real server: a run waits for exactly the causes that explain names, and each of them advances it."""

import random
from collections import Counter
from uuid import UUID

import pytest

from rota.model.ids import RunId
from rota.model.jobs.submission import Compensation
from rota.model.workflows.approval_steps import ApprovalSpec
from rota.model.workflows.spec import ParallelSpec, StepSpec
from tests.integration.engine.admission.approvals_support import BOB
from tests.integration.workflow.test_explain import Explaining
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import end_job

PASS = sql("""
UPDATE rota.workflow_timer SET ts_due = clock_timestamp() WHERE pk_run = $1::uuid AND ts_due = $2::timestamptz""")
FENCES = sql("SELECT sum(fence) FROM rota.workflow_run")
SEEN: Counter[str] = Counter()


def flow(chance, *names):
    """Steps of every waiting type, each after some of those before it; some of them in a parallel."""
    steps = []
    for at in range(chance.randint(2, 6)):
        kinds = {
            "job": {"task": "noop", "compensate": Compensation(topic="undo", task="noop")},
            "delay": {"type": "delay", "delay_sec": 3600 + at},
            "approval": {"type": "approval", "approval": ApprovalSpec(text="Go on?")},
            "workflow": {"type": "workflow", "workflow": "inner"},
        }
        before = [step.id for step in steps]
        after = tuple(chance.sample(before, chance.randint(0, min(2, len(before)))))
        steps.append(StepSpec(id=f"s{at}", depends_on=after, **kinds[chance.choice(names)]))
    free = [step.id for step in steps if not step.depends_on]
    if len(free) > 1 and chance.random() < 0.5:
        need = chance.choice(["all", "any"])
        steps.append(StepSpec(id="p", type="parallel", parallel=ParallelSpec(steps=tuple(free), need=need)))
    return steps


class RandomRun(Explaining):
    def __init__(self, database, chance):
        super().__init__(database)
        self.chance = chance

    async def resolve(self, cause):
        """Makes the named cause happen."""
        SEEN[cause.code.value] += 1
        match cause.code.value:
            case "deferred":
                assert await self.database.run(PASS, cause.run, cause.next_at) == 1
            case "approval_required":
                decide = self.people.approve if self.chance.random() < 0.8 else self.people.reject
                await decide(f"{cause.run}:{cause.step}", BOB)
            case "run_paused":
                await self.commands.resume(RunId(cause.run), "eve")
            case "waiting_on_job" | "ending" | "compensating":
                await self.end_random_job(cause.waits_for)
            case other:
                raise AssertionError(f"cause {other} has no resolution")

    async def end_random_job(self, job: UUID):
        state = self.chance.choice(["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "FAILED"])
        failed = {"code": "exception", "error": "no luck"} if state == "FAILED" else {}
        await end_job(self.database, job, state, **failed)


@pytest.mark.parametrize("seed", range(15))
async def test_run_waits_for_exactly_its_explained_causes(database, seed):
    chance = random.Random(seed)
    await a_show(database)
    random_run = RandomRun(database, chance)
    await random_run.declare(*flow(chance, "job", "delay", "approval"), name="inner")
    await random_run.start(*flow(chance, "job", "delay", "approval", "workflow"), rollback_on=["failed", "denied"])
    for _ in range(80):
        explanation = await random_run.explained()
        if explanation.state.ended:
            break
        if explanation.state in ("RUNNING", "WAITING") and chance.random() < 0.1:
            await random_run.commands.pause(random_run.run, "eve")
            continue
        causes = [each for each in explanation.reasons if each.code not in ("no_server", "waiting_on_run")]
        if any(each.code == "news_waiting" for each in causes):
            assert await random_run.advance() > 0, explanation
            continue
        before = await database.value(FENCES)
        assert await random_run.advance() == 0, f"the run advanced without {explanation.sentence}"
        assert await database.value(FENCES) == before
        assert causes, f"the run waits for nothing: {explanation}"
        chosen = chance.choice(causes)
        await random_run.resolve(chosen)
        if chosen.code != "run_paused":
            assert any(each.code == "news_waiting" for each in (await random_run.explained()).reasons), chosen
            assert await random_run.advance() > 0
        assert chosen not in (await random_run.explained()).reasons
    assert explanation.state.ended, explanation
    assert explanation.reasons == ()
