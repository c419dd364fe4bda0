"""Step failures through real jobs and their effects: what is compensated, and which items are stopped."""

import msgspec
import pytest

from rota import runtime
from rota.model.jobs.submission import Compensation, LayerSpec, RetrySpec, Submission
from rota.model.policy.outputs import OutputEffect
from rota.model.workflows.spec import ParallelSpec, StepSpec, WorkflowSpec
from rota.policy.output.rules import OutputMatch, OutputRule
from rota.workflow.run_queries import RunQueries
from tests.support.kernels import Table
from tests.support.outputs import SECRET, OutputPolicyFarm
from tests.support.queue import sql
from tests.support.replica_and_worker import gates, hanging, seen
from tests.support.waiting import until

SAGA = sql("SELECT state FROM rota.saga WHERE workflow_id = $1::text")
NO_SECRETS = OutputRule(
    id="secrets",
    decision=OutputEffect.QUARANTINE,
    match=OutputMatch(scanners=("secret",)),
    reason="No.",
    severity="high",
)


def undo(name):
    return Compensation(topic="undo", task="square", context={"value": name})


class WorkflowClient:
    """The workflow commands and queries of a replica."""

    def __init__(self, farm):
        self.farm = farm
        self.commands = farm.replica.workflows
        self.queries = RunQueries(farm.database)

    async def start(self, *steps, given=None, **more):
        await self.commands.declare(WorkflowSpec(name="flow", show="film", steps=steps, **more), "ann")
        return (await self.commands.start("film", "flow", given, actor="ann")).run

    async def ended(self, run):
        async def ended_run():
            found = await self.queries.get(run)
            return found if found.state.ended else None

        return await until(ended_run, within_s=20, what=f"the end of run {run}")

    async def run(self, *steps, given=None, **more):
        return await self.ended(await self.start(*steps, given=given, **more))

    async def undone(self):
        """Arguments of the compensations that ran, in order."""
        return seen.get("square", [])


@pytest.fixture
async def workflows(monkeypatch, database_url, redis_url, nats_url, bus_prefix):
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: Table())
    async with OutputPolicyFarm(database_url, redis_url, nats_url, bus_prefix, rules=(NO_SECRETS,)) as farm:
        await farm.show()
        await farm.worker()
        yield WorkflowClient(farm)
        await farm.quiet()


def states(run):
    return {step.id: step.state.value for step in run.steps}


FIRST = StepSpec(id="first", task="noop", compensate=undo(3))
TRIGGERS = {
    "fatal": ({"task": "fatal"}, "FAILED"),
    "failed": ({"task": "flaky", "args": (9,), "retry": RetrySpec(most=1, first_s=0.01)}, "FAILED"),
    "timeout": ({"task": "hang", "args": ("slow",), "timeout_s": 0.3}, "TIMEOUT"),
    "quarantined": ({"task": "echo", "args": (SECRET,), "compensate": undo(5)}, "FAILED"),
    "denied": ({"task": "noop", "topic": "deny"}, "DENIED"),
}


@pytest.mark.parametrize("trigger", TRIGGERS)
async def test_each_failure_kind_compensates_only_when_configured(workflows, trigger):
    hanging("slow")
    what, state = TRIGGERS[trigger]
    last = StepSpec(id="last", depends_on=("first",), **what)
    run = await workflows.run(FIRST, last, rollback_on=frozenset({trigger}))
    assert (run.state, states(run)["last"]) == (state, state)
    assert await workflows.undone() == ([5, 3] if trigger == "quarantined" else [3])
    seen.clear()
    others = frozenset(TRIGGERS) - {trigger, *({"failed"} if trigger == "fatal" else ())}
    assert (await workflows.run(FIRST, last, rollback_on=others)).state == state
    assert await workflows.undone() == []


async def test_first_failed_item_ends_the_step_and_stops_its_siblings(workflows):
    for name in ("a", "b", "c", "d"):
        hanging(name)
    run = await workflows.start(
        StepSpec(id="each", task="hang", args=("${item}",), for_each=["a", "b", "nobody", "c", "d"], max_parallel=3),
    )
    found = await workflows.ended(run)
    assert found.state == "FAILED"
    assert found.error == "Step each: Item 2: KeyError: 'nobody'"
    began = seen["began"]
    assert began.count("nobody") == 1
    assert "d" not in began, "no item starts after the failure"
    await until(
        lambda: sorted(seen.get("stopped", [])) == sorted(set(began) - {"nobody"}), what="the stop of the siblings"
    )


async def test_concurrent_items_never_exceed_max_parallel(workflows):
    names = [f"n{number}" for number in range(6)]
    for name in names:
        hanging(name)
    run = await workflows.start(
        StepSpec(id="each", task="hang", args=("${item}",), for_each="${input.names}", max_parallel=2),
        given={"names": names},
    )
    for done in range(len(names)):
        await until(lambda done=done: len(seen.get("began", [])) >= min(done + 2, len(names)), what="a full window")
        assert len(seen["began"]) - done <= 2
        gates[seen["began"][done]].set()
    found = await workflows.ended(run)
    assert (found.state, found.steps[0].output) == ("SUCCEEDED", names)


async def test_single_item_and_none_results_are_still_lists(workflows):
    run = await workflows.run(
        StepSpec(id="one", task="square", args=("${item}",), for_each=[3]),
        StepSpec(id="none", task="noop", for_each=[1, 2, 3]),
        StepSpec(id="bad", task="boom", for_each=[1], depends_on=("one", "none")),
    )
    assert [step.output for step in run.steps] == [[9], [None, None, None], None]
    assert run.error == "Step bad: Item 0: ValueError: no luck"


async def test_items_completed_before_a_failure_are_compensated(workflows):
    each = StepSpec(
        id="each",
        task="flaky",
        args=("${item}",),
        for_each=[0, 9],
        max_parallel=1,
        compensate=Compensation(topic="undo", task="echo", context={"value": "${steps.each.output}"}),
    )
    run = await workflows.run(each, rollback_on=frozenset({"failed"}))
    assert run.state == "FAILED"
    saga = await workflows.queries.saga(run.show_id, str(run.id))
    assert (saga.state, [(entry.step, entry.state) for entry in saga.entries]) == ("rolled_back", [("each", "done")])
    [(*_, value)] = await workflows.farm.ends(saga.entries[0].undo)
    assert msgspec.msgpack.decode(value) == [1, None]


async def test_fatal_failure_in_parallel_is_fatal_for_the_run(workflows):
    run = await workflows.run(
        FIRST,
        StepSpec(id="both", type="parallel", depends_on=("first",), parallel=ParallelSpec(steps=("good", "bad"))),
        StepSpec(id="good", task="noop"),
        StepSpec(id="bad", task="fatal"),
    )
    assert (run.state, await workflows.undone()) == ("FAILED", [3])


async def test_fatal_failure_with_failed_handler_is_fatal_for_the_run(workflows):
    run = await workflows.run(
        FIRST,
        StepSpec(id="bad", task="fatal", depends_on=("first",), on_error="mend"),
        StepSpec(id="mend", task="boom"),
    )
    assert (run.state, await workflows.undone()) == ("FAILED", [3])


async def test_unresolvable_run_output_fails_and_compensates_the_run(workflows):
    run = await workflows.run(FIRST, output={"x": "${input.x}"}, rollback_on=frozenset({"failed"}))
    assert (run.state, await workflows.undone()) == ("FAILED", [3])
    assert "no value" in run.error


async def test_jobs_outside_workflows_are_compensated_only_on_fatal_failure(workflows):
    async def submit(task, *args, **more):
        layer = LayerSpec(task=task, input={"args": list(args), "kwargs": {}})
        [submitted] = await workflows.farm.submitter.submit(
            [Submission(show="film", workflow_id="trip", layers=(layer,), **more)]
        )
        return await workflows.farm.ended(submitted.job)

    for value in (3, 4):
        by = Compensation(topic="undo", task="square", context={"args": [value], "kwargs": {}})
        assert await submit("noop", compensation=by) == "SUCCEEDED"
    assert await submit("boom") == "FAILED"
    assert await submit("hang", "nobody") == "FAILED"
    assert seen.get("square", []) == []
    assert await submit("fatal") == "FAILED"

    async def rolled_back():
        return await workflows.farm.database.value(SAGA, "trip") == "rolled_back"

    await until(rolled_back, what="the rollback")
    assert await workflows.undone() == [4, 3]
