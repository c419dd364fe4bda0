"""How steps fail through real jobs, and what that sets off: what is undone, and which items are stopped."""

import msgspec
import pytest

from rota import runtime
from rota.model.jobs.submission import Compensation, LayerSpec, RetrySpec, Submission
from rota.model.policy.outputs import OutputEffect
from rota.model.workflows.spec import ParallelSpec, StepSpec, WorkflowSpec
from rota.policy.output.rules import OutputMatch, OutputRule
from rota.workflow.run_queries import RunQueries
from tests.support.kernels import Table
from tests.support.outputs import SECRET, Watched
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


class Works:
    """A farm, and what is asked of its workflows."""

    def __init__(self, farm):
        self.farm = farm
        self.desk = farm.replica.workflows
        self.looking = RunQueries(farm.database)

    async def start(self, *steps, given=None, **more):
        await self.desk.declare(WorkflowSpec(name="flow", show="film", steps=steps, **more), "ann")
        return (await self.desk.start("film", "flow", given, actor="ann")).run

    async def ended(self, run):
        async def over():
            found = await self.looking.get(run)
            return found if found.state.ended else None

        return await until(over, within_s=20, what=f"the end of run {run}")

    async def run(self, *steps, given=None, **more):
        return await self.ended(await self.start(*steps, given=given, **more))

    async def undone(self):
        """Of whom compensations ran, in order; they are called with a number."""
        return seen.get("square", [])


@pytest.fixture
async def works(monkeypatch, database_url, redis_url, nats_url, bus_prefix):
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: Table())
    async with Watched(database_url, redis_url, nats_url, bus_prefix, rules=(NO_SECRETS,)) as farm:
        await farm.show()
        await farm.worker()
        yield Works(farm)
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
async def test_each_way_to_fail_undoes_what_was_done_where_the_workflow_says_so_and_nowhere_else(works, trigger):
    hanging("slow")
    what, state = TRIGGERS[trigger]
    last = StepSpec(id="last", depends_on=("first",), **what)
    run = await works.run(FIRST, last, rollback_on=frozenset({trigger}))
    assert (run.state, states(run)["last"]) == (state, state)
    assert await works.undone() == ([5, 3] if trigger == "quarantined" else [3])
    seen.clear()
    others = frozenset(TRIGGERS) - {trigger, *({"failed"} if trigger == "fatal" else ())}
    assert (await works.run(FIRST, last, rollback_on=others)).state == state
    assert await works.undone() == []


async def test_the_first_item_that_fails_ends_its_step_and_stops_the_others(works):
    for name in ("a", "b", "c", "d"):
        hanging(name)
    run = await works.start(
        StepSpec(id="each", task="hang", args=("${item}",), for_each=["a", "b", "nobody", "c", "d"], max_parallel=3),
    )
    found = await works.ended(run)
    assert found.state == "FAILED"
    assert found.error == "Step each: Item 2: KeyError: 'nobody'"
    began = seen["began"]
    assert began.count("nobody") == 1
    assert "d" not in began, "what was not begun by then is not begun"
    await until(lambda: sorted(seen.get("stopped", [])) == sorted(set(began) - {"nobody"}), what="the siblings stopped")


async def test_no_more_items_run_at_a_time_than_the_window_has(works):
    names = [f"n{number}" for number in range(6)]
    for name in names:
        hanging(name)
    run = await works.start(
        StepSpec(id="each", task="hang", args=("${item}",), for_each="${input.names}", max_parallel=2),
        given={"names": names},
    )
    for done in range(len(names)):
        await until(
            lambda done=done: len(seen.get("began", [])) >= min(done + 2, len(names)), what="the window to be full"
        )
        assert len(seen["began"]) - done <= 2
        gates[seen["began"][done]].set()
    found = await works.ended(run)
    assert (found.state, found.steps[0].output) == ("SUCCEEDED", names)


async def test_a_list_of_one_is_a_list_and_items_that_return_nothing_are_items(works):
    run = await works.run(
        StepSpec(id="one", task="square", args=("${item}",), for_each=[3]),
        StepSpec(id="none", task="noop", for_each=[1, 2, 3]),
        StepSpec(id="bad", task="boom", for_each=[1], depends_on=("one", "none")),
    )
    assert [step.output for step in run.steps] == [[9], [None, None, None], None]
    assert run.error == "Step bad: Item 0: ValueError: no luck"


async def test_what_some_items_did_before_another_failed_is_undone(works):
    each = StepSpec(
        id="each",
        task="flaky",
        args=("${item}",),
        for_each=[0, 9],
        max_parallel=1,
        compensate=Compensation(topic="undo", task="echo", context={"value": "${steps.each.output}"}),
    )
    run = await works.run(each, rollback_on=frozenset({"failed"}))
    assert run.state == "FAILED"
    saga = await works.looking.saga(run.show_id, str(run.id))
    assert (saga.state, [(entry.step, entry.state) for entry in saga.entries]) == ("rolled_back", [("each", "done")])
    [(*_, value)] = await works.farm.ends(saga.entries[0].undo)
    assert msgspec.msgpack.decode(value) == [1, None]


async def test_who_fails_for_good_in_a_parallel_fails_for_good_with_it(works):
    run = await works.run(
        FIRST,
        StepSpec(id="both", type="parallel", depends_on=("first",), parallel=ParallelSpec(steps=("good", "bad"))),
        StepSpec(id="good", task="noop"),
        StepSpec(id="bad", task="fatal"),
    )
    assert (run.state, await works.undone()) == ("FAILED", [3])


async def test_who_fails_for_good_and_is_not_mended_has_failed_for_good(works):
    run = await works.run(
        FIRST,
        StepSpec(id="bad", task="fatal", depends_on=("first",), on_error="mend"),
        StepSpec(id="mend", task="boom"),
    )
    assert (run.state, await works.undone()) == ("FAILED", [3])


async def test_a_run_whose_output_cannot_be_made_has_failed_and_is_undone(works):
    run = await works.run(FIRST, output={"x": "${input.x}"}, rollback_on=frozenset({"failed"}))
    assert (run.state, await works.undone()) == ("FAILED", [3])
    assert "no value" in run.error


async def test_jobs_of_no_workflow_are_undone_when_one_of_them_fails_for_good_and_for_nothing_less(works):
    async def submit(task, *args, **more):
        layer = LayerSpec(task=task, input={"args": list(args), "kwargs": {}})
        [submitted] = await works.farm.submitter.submit(
            [Submission(show="film", workflow_id="trip", layers=(layer,), **more)]
        )
        return await works.farm.ended(submitted.job)

    for value in (3, 4):
        by = Compensation(topic="undo", task="square", context={"args": [value], "kwargs": {}})
        assert await submit("noop", compensation=by) == "SUCCEEDED"
    assert await submit("boom") == "FAILED"
    assert await submit("hang", "nobody") == "FAILED"
    assert seen.get("square", []) == []
    assert await submit("fatal") == "FAILED"

    async def rolled_back():
        return await works.farm.database.value(SAGA, "trip") == "rolled_back"

    await until(rolled_back, what="the rollback")
    assert await works.undone() == [4, 3]
