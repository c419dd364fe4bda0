"""Random runs on a real server: what a run is said to wait for is all that it waits for, and each of it moves it on."""

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
    """Steps of every kind that waits, each behind some of those before it; some of them in a parallel."""
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


class World(Explaining):
    def __init__(self, database, chance):
        super().__init__(database)
        self.chance = chance

    async def let_happen(self, cause):
        """What the run is said to wait for."""
        SEEN[cause.code.value] += 1
        match cause.code.value:
            case "deferred":
                assert await self.database.run(PASS, cause.run, cause.next_at) == 1
            case "approval_required":
                decide = self.people.approve if self.chance.random() < 0.8 else self.people.reject
                await decide(f"{cause.run}:{cause.step}", BOB)
            case "run_paused":
                await self.desk.resume(RunId(cause.run), "eve")
            case "waiting_on_job" | "ending" | "compensating":
                await self.end_one(cause.waits_for)
            case other:
                raise AssertionError(f"nobody knows how to let {other} happen")

    async def end_one(self, job: UUID):
        state = self.chance.choice(["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "FAILED"])
        failed = {"code": "boom", "error": "no luck"} if state == "FAILED" else {}
        await end_job(self.database, job, state, **failed)


@pytest.mark.parametrize("seed", range(15))
async def test_a_run_waits_for_what_it_says_and_for_nothing_else(database, seed):
    chance = random.Random(seed)
    await a_show(database)
    world = World(database, chance)
    await world.declare(*flow(chance, "job", "delay", "approval"), name="inner")
    await world.start(*flow(chance, "job", "delay", "approval", "workflow"), rollback_on=["failed", "denied"])
    for _ in range(80):
        told = await world.explained()
        if told.state.ended:
            break
        if told.state in ("RUNNING", "WAITING") and chance.random() < 0.1:
            await world.desk.pause(world.run, "eve")
            continue
        causes = [each for each in told.reasons if each.code not in ("no_server", "waiting_on_run")]
        if any(each.code == "news_waiting" for each in causes):
            assert await world.advance() > 0, told
            continue
        before = await database.value(FENCES)
        assert await world.advance() == 0, f"it went on without {told.sentence}"
        assert await database.value(FENCES) == before
        assert causes, f"it waits for nothing: {told}"
        chosen = chance.choice(causes)
        await world.let_happen(chosen)
        if chosen.code != "run_paused":
            assert any(each.code == "news_waiting" for each in (await world.explained()).reasons), chosen
            assert await world.advance() > 0
        assert chosen not in (await world.explained()).reasons
    assert told.state.ended, told
    assert told.reasons == ()
